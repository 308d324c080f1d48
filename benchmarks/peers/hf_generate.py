"""Hugging Face `generate`: padded batches, and speculative decoding with `assistant_model`."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from benchmarks.peers.base import Generation, Setup
from experiments.hf_model import load

BATCH = 8  # prompts of one padded batch; more waits for the slowest longer, fewer fills the machine less


class Engine:
    """`model.generate` on left-padded batches, in the order the prompts come."""

    def missing(self) -> str | None:
        """torch and transformers."""
        lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        return ", ".join(lacking) or None

    def versions(self) -> dict[str, str]:
        """Of both libraries."""
        from importlib.metadata import version

        return {"transformers": version("transformers"), "torch": version("torch")}

    def setup(self, setup: Setup) -> None:
        """Load the model, and the assistant when there is one."""
        import torch

        torch.set_num_threads(setup.threads)
        self._model = load(setup.model_dir, setup.dtype)
        self._assistant = load(setup.draft_dir, setup.dtype) if setup.draft_dir else None
        self._end = self._model.generation_config.eos_token_id
        self._pad = self._model.config.pad_token_id or 0
        for model in (self._model, self._assistant):
            if model is not None:
                model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """One batch of at most eight after the other; an assistant only takes prompts one at a time."""
        size = 1 if self._assistant is not None else BATCH
        answers: list[list[int]] = []
        started = time.perf_counter()
        for at in range(0, len(prompts), size):
            answers += self._batch(prompts[at : at + size], max_tokens, stop_at_end)
        return Generation(time.perf_counter() - started, answers)

    def _batch(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool) -> list[list[int]]:
        import torch

        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options: dict[str, Any] = {"assistant_model": self._assistant} if self._assistant is not None else {}
        if stop_at_end:
            options["eos_token_id"] = self._end
        else:
            options["min_new_tokens"] = max_tokens
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=self._pad,
                **options,
            )
        return [_until(row, self._end) if stop_at_end else row for row in output[:, width:].tolist()]

    def close(self) -> None:
        """Nothing outlives the process."""


def _until(tokens: list[int], end: int | list[int] | None) -> list[int]:
    """Tokens up to the first end token, which is kept; what follows is padding."""
    ends = {end} if isinstance(end, int) else set(end or ())
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
