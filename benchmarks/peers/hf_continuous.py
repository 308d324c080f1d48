"""The continuous batching of transformers 5: `generate_batch` over a paged cache."""

from __future__ import annotations

import importlib.util
import time

from benchmarks.peers.base import Generation, Setup
from experiments.hf_model import load

# Left alone, the manager takes nine tenths of the machine's memory and refuses to start where that is not free.
CACHE_PAGES = 96  # of 256 tokens
TOKENS_PER_STEP = 1024


class Engine:
    """`model.generate_batch`, with a manager that is kept between calls."""

    def missing(self) -> str | None:
        """A transformers that has it."""
        if importlib.util.find_spec("transformers") is None:
            return "transformers"
        if importlib.util.find_spec("transformers.generation.continuous_batching") is None:
            return "transformers >= 5"
        return None

    def versions(self) -> dict[str, str]:
        """Of transformers and torch."""
        from importlib.metadata import version

        return {"transformers": version("transformers"), "torch": version("torch")}

    def setup(self, setup: Setup) -> None:
        """Load the model."""
        import torch
        from transformers import ContinuousBatchingConfig

        torch.set_num_threads(setup.threads)
        self._model = load(setup.model_dir, setup.dtype)
        self._manages_end = False
        self._batching = ContinuousBatchingConfig(num_blocks=CACHE_PAGES, max_batch_tokens=TOKENS_PER_STEP)

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """All prompts in one call."""
        from transformers import GenerationConfig

        if stop_at_end is not self._manages_end:  # a kept manager keeps the end token it was made with
            self._model.destroy_cached_continuous_batching_manager()
            self._manages_end = stop_at_end
        end = self._model.generation_config.eos_token_id if stop_at_end else -1
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=end)
        started = time.perf_counter()
        results = self._model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=self._batching, persistent_manager=True
        )
        seconds = time.perf_counter() - started
        for result in results.values():
            if result.error is not None:
                raise RuntimeError(result.error)
        return Generation(seconds, [list(result.generated_tokens) for result in results.values()])

    def close(self) -> None:
        """End the manager's thread."""
        self._model.destroy_cached_continuous_batching_manager()
