"""llama.cpp in process, through xllamacpp: its server's slots and continuous batching, without HTTP.

The prebuilt wheel is compiled for any processor with AVX2. On one with AVX-512 a build for that machine would be faster
wherever arithmetic bounds the work; the report says which kernels there were.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Generation, Setup
from benchmarks.peers.llama_export import export, missing_packages, shipped, token_ids, token_text

SLOTS = 32  # prompts at once; more wait for a free slot
SLOT_TOKENS = 2304  # prompt and answer; llama.cpp wants a multiple of 256
QUIET = 1  # of its log: errors only; a line for each request would be written while the clock runs


class Engine:
    """`Server.handle_completions` on token ids, all prompts in one call; its prefix cache is on."""

    def missing(self) -> str | None:
        """xllamacpp, and gguf for the conversion."""
        return missing_packages()

    def versions(self) -> dict[str, str]:
        """Of the wheel, the kernels it was compiled with, which decide its speed, and the settings for bfloat16."""
        from importlib.metadata import version

        import xllamacpp

        cpu = Path("/proc/cpuinfo")
        flags = cpu.read_text() if cpu.is_file() else ""
        defaults = xllamacpp.CommonParams()
        return {
            "xllamacpp": version("xllamacpp"),
            "kernels": kernels(xllamacpp.get_system_info(), flags),
            "KV cache": _value(defaults.cache_type_k),
            "flash attention": _value(defaults.flash_attn_type),
        }

    def setup(self, setup: Setup) -> None:
        """Convert and load."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        packed = setup.gguf_file
        path = shipped(setup.model_dir, packed) if packed else export(setup.model_dir, setup.dtype)
        params.model.path = str(path)
        params.n_parallel = SLOTS
        params.n_ctx = SLOTS * SLOT_TOKENS
        params.fit_params = False  # the context is what was asked for
        params.cache_ram_mib = 0  # prompts are reused where they lie; copies of old ones are not kept
        params.verbosity = QUIET
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
        if setup.dtype == "float32":  # the defaults keep the cache in float16, and so does flash attention
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._end = _end_token(setup.model_dir)
        self._server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """All prompts in one call.

        Raises:
            RuntimeError: llama.cpp refuses the request; says why.
        """
        request: dict[str, Any] = {"prompt": prompts, "max_tokens": max_tokens, "samplers": ["top_k"], "top_k": 1}
        if stop_at_end and self._end is not None:
            request["stop"] = [token_text(self._end)]
        started = time.perf_counter()
        reply = self._server.handle_completions(request)
        seconds = time.perf_counter() - started
        if "choices" not in reply:
            raise RuntimeError(reply.get("error", reply).get("message", "no message"))
        return Generation(seconds, [self._answer(choice) for choice in _in_order(reply["choices"])])

    def close(self) -> None:
        """End the server's threads."""
        del self._server

    def _answer(self, choice: dict[str, Any]) -> list[int]:
        tokens = token_ids(choice["text"])
        if choice["finish_reason"] == "stop" and self._end is not None:
            return [*tokens, self._end]  # llama.cpp cuts off what it stopped at
        return tokens


def kernels(system_info: str, flags: str) -> str:
    """The instruction sets the library was compiled for, and whether the processor has wider ones.

    Args:
        system_info: llama.cpp's, a list of NAME = 1.
        flags: /proc/cpuinfo, or nothing.
    """
    names = [part.split("=")[0].split(":")[-1].strip() for part in system_info.split("|") if part.strip()]
    built = [name for name in names if name.startswith(("AVX", "AMX", "FMA", "F16C"))]
    wasted = "avx512f" in flags and "AVX512" not in built
    return "+".join(built) + (" (without AVX-512, which the processor has)" if wasted else "")


def _value(member: Any) -> str:
    """The last word of an enumeration's member, as F16 of GGML_TYPE_F16."""
    return str(member.name).rsplit("_", 1)[-1].lower()


def _in_order(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _end_token(model_dir: str) -> int | None:
    """Of the checkpoint; the first where it has several."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        end = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if end is not None:
            return int(end[0] if isinstance(end, list) else end)
    return None
