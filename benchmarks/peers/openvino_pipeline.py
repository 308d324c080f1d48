"""OpenVINO GenAI's `LLMPipeline`: one static batch of equally long prompts."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.base import Generation, Setup
from benchmarks.peers.openvino_export import export, missing_packages, openvino_versions, properties


class Engine:
    """`LLMPipeline.generate` on token ids."""

    def missing(self) -> str | None:
        """OpenVINO and the converter."""
        return missing_packages()

    def versions(self) -> dict[str, str]:
        """Of OpenVINO."""
        return openvino_versions()

    def setup(self, setup: Setup) -> None:
        """Convert and load."""
        import openvino_genai

        folder = export(setup.model_dir)
        self._pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", **properties(setup.dtype, setup.threads))

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """One batch; the prompts must be equally long."""
        import numpy as np
        import openvino
        import openvino_genai

        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = greedy(max_tokens, stop_at_end)
        started = time.perf_counter()
        result = self._pipeline.generate(inputs, config)
        return Generation(time.perf_counter() - started, [list(tokens) for tokens in result.tokens])

    def close(self) -> None:
        """Drop the pipeline."""
        del self._pipeline


def greedy(max_tokens: int, stop_at_end: bool) -> Any:
    """A greedy `GenerationConfig`."""
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.do_sample = False
    if not stop_at_end:
        config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.eos_token_id = -1
    return config
