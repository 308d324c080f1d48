"""Greedy answers to held-out problems, and the share of right ones with its uncertainty."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.data.problem import Problem
from training.tokenizer import ASSISTANT, USER

_Z_95 = 1.959964


@dataclass(frozen=True)
class Accuracy:
    """Right answers out of all, with the 95% Wilson interval of the share."""

    num_right: int
    num_problems: int

    @property
    def share(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.num_right / self.num_problems

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of the 95% Wilson score interval."""
        n, z2 = self.num_problems, _Z_95**2
        centre = (self.share + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z_95 * math.sqrt(self.share * (1 - self.share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)


@torch.inference_mode()
def complete(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    max_new_tokens: int = 256,
    batch_size: int = 128,
) -> list[str]:
    """Greedy completions of the problems' prompts, in order, without the end mark."""
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    texts: list[str] = []
    for start in range(0, len(problems), batch_size):
        prompts = [f"{USER}{problem.prompt}{ASSISTANT}" for problem in problems[start : start + batch_size]]
        encoded = tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        produced = model.generate(**encoded, generation_config=settings)
        new_ids = produced[:, encoded["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    return texts


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    is_correct: Callable[[Problem, str], bool],
) -> Accuracy:
    """Greedy accuracy on the problems; leaves the model in the mode it was in."""
    was_training = model.training
    model.eval()
    texts = complete(model, tokenizer, problems)
    model.train(was_training)
    right = sum(is_correct(problem, text) for problem, text in zip(problems, texts, strict=True))
    return Accuracy(right, len(problems))
