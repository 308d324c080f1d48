"""From a Hugging Face checkpoint to OpenVINO's format, once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

PACKAGES = {"openvino_genai": "openvino-genai", "optimum": "optimum-intel"}


def missing_packages() -> str | None:
    """What OpenVINO GenAI and the conversion need and this environment lacks."""
    lacking = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    return ", ".join(lacking) or None


def export(model_dir: str) -> Path:
    """The checkpoint in OpenVINO's format, 16-bit weights; written next to it unless it is there.

    Raises:
        RuntimeError: the conversion failed; says with what.
    """
    target = Path(f"{model_dir}-openvino")
    if not (target / "openvino_model.xml").is_file():
        exporter = Path(sys.executable).parent / "optimum-cli"
        task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        command = [str(exporter), "export", "openvino", "--model", model_dir, *task, str(target)]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            raise RuntimeError(f"converting to OpenVINO failed: {finished.stderr.strip().splitlines()[-1:]}")
    return target


def properties(dtype: str, threads: int) -> dict[str, object]:
    """Settings of OpenVINO's CPU plugin: arithmetic and threads as asked, the rest as it comes.

    Where a processor has no bfloat16 of its own, OpenVINO computes in float32; asked for bfloat16, its paged attention
    does not load with AVX-512.
    """
    precision = "bf16" if dtype == "bfloat16" and _has_bfloat16() else "f32"
    return {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}


def openvino_versions() -> dict[str, str]:
    """Of the libraries, the precision of the KV cache, which is theirs to choose, and what stands for bfloat16."""
    from importlib.metadata import version

    import openvino

    cache = openvino.Core().get_property("CPU", "KV_CACHE_PRECISION")
    made = {"openvino-genai": version("openvino-genai"), "KV cache": cache.get_type_name()}
    return made if _has_bfloat16() else {**made, "in place of bfloat16": "float32"}


def _has_bfloat16() -> bool:
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
