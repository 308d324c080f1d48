"""OpenVINO GenAI's `ContinuousBatchingPipeline`: a paged cache, prompts of any length together."""

from __future__ import annotations

import time

from benchmarks.peers.base import Generation, Setup
from benchmarks.peers.openvino_export import export, missing_packages, openvino_versions, properties
from benchmarks.peers.openvino_pipeline import greedy

CACHE_GB = 2
TOKENS_PER_STEP = 1024
MAX_SEQUENCES = 64


class Engine:
    """`ContinuousBatchingPipeline.generate` on token ids, its prefix cache on."""

    def missing(self) -> str | None:
        """OpenVINO and the converter."""
        return missing_packages()

    def versions(self) -> dict[str, str]:
        """Of OpenVINO."""
        return openvino_versions()

    def setup(self, setup: Setup) -> None:
        """Convert and load."""
        import openvino_genai

        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = CACHE_GB
        scheduling.max_num_seqs = MAX_SEQUENCES
        scheduling.max_num_batched_tokens = TOKENS_PER_STEP
        scheduling.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(export(setup.model_dir)), scheduling, "CPU", properties(setup.dtype, setup.threads)
        )

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """All prompts in one call."""
        import numpy as np
        import openvino

        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = [greedy(max_tokens, stop_at_end)] * len(prompts)
        started = time.perf_counter()
        results = self._pipeline.generate(inputs, configs)
        return Generation(time.perf_counter() - started, [list(result.m_generation_ids[0]) for result in results])

    def close(self) -> None:
        """Drop the pipeline."""
        del self._pipeline
