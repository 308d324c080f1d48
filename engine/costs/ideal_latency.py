"""Ideal latency: the time of a request on an otherwise idle engine, a time base to compare models by.

Paper #201 (Cheaply Estimating Inference Efficiency Metrics for Autoregressive Transformer Models).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from decoding.model import Model
from decoding.sequence import Sequence as TokenSequence
from engine.costs.least_squares import nonnegative
from turnout.types import SamplingParams, Sharing

# Prompt lengths of the grid, tokens.
PROMPTS = (1, 16, 64, 128, 256, 512, 1024, 1536)
OUTPUT = 33
REPEATS = 5

# Seconds that a request of (prompt tokens, output tokens) takes.
Timer = Callable[[int, int], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class IdealisedRuntime:
    """`T(p, o) = F(p) + g * (o - 1) + h * positions`: F is the time to the first of `o` tokens, piecewise linear.

    The last term, for long contexts, counts the positions the decoded tokens attend to. Outputs add up:
    the time of o1 + o2 tokens is that of o1, and of o2 more after a prompt of p + o1.

    Attributes:
        prompts: [K] measured prompt lengths, ascending.
        first_token_s: [K] F at them.
        per_token_s: g, at no context.
        per_position_s: h.
    """

    prompts: tuple[int, ...]
    first_token_s: tuple[float, ...]
    per_token_s: float
    per_position_s: float

    def prefill_s(self, prompt: int) -> float:
        """F: seconds to the first token; extrapolated beyond the grid with the last slope."""
        if len(self.prompts) == 1:
            return self.first_token_s[0]
        index = min(max(bisect_right(self.prompts, prompt), 1), len(self.prompts) - 1)
        left, right = self.prompts[index - 1], self.prompts[index]
        low, high = self.first_token_s[index - 1], self.first_token_s[index]
        return low + (high - low) * (prompt - left) / (right - left)

    def decode_s(self, context: int, tokens: int) -> float:
        """Seconds of `tokens` more after `context` of them."""
        return self.per_token_s * tokens + self.per_position_s * _positions(context, tokens)

    def seconds(self, prompt: int, output: int) -> float:
        """T: seconds of a request with at least one token of output."""
        return self.prefill_s(prompt) + self.decode_s(prompt, output - 1)


def _positions(context: int, tokens: int) -> int:
    """Positions that `tokens` decoded after `context` attend to, their own included."""
    return tokens * context + tokens * (tokens + 1) // 2


def fit(times: Mapping[tuple[int, int], float]) -> IdealisedRuntime:
    """From seconds by (prompt, output), both output 1 and a longer one for every prompt length.

    Raises:
        ValueError: no longer output, or one whose prompt was not measured with an output of 1.
    """
    prefill = {prompt: seconds for (prompt, output), seconds in sorted(times.items()) if output == 1}
    longer = [(prompt, output, seconds) for (prompt, output), seconds in times.items() if output > 1]
    if not longer or any(prompt not in prefill for prompt, _, _ in longer):
        raise ValueError("every prompt length needs a time with one token of output and one with more")
    features = np.array([[output - 1, _positions(prompt, output - 1)] for prompt, output, _ in longer], dtype=float)
    decoding = np.array([max(seconds - prefill[prompt], 0.0) for prompt, _, seconds in longer])
    per_token_s, per_position_s = (float(value) for value in nonnegative(features, decoding))
    return IdealisedRuntime(tuple(prefill), tuple(prefill.values()), per_token_s, per_position_s)


async def denoised(
    timer: Timer, pairs: Sequence[tuple[int, int]], repeats: int = REPEATS
) -> dict[tuple[int, int], float]:
    """The fastest of repeated requests for each (prompt, output): what other work on the machine added is left out.

    The pairs take turns, so that a slow moment of the machine does not hit all repeats of one of them.
    """
    fastest = dict.fromkeys(pairs, float("inf"))
    for _ in range(repeats):
        for pair in pairs:
            fastest[pair] = min(fastest[pair], await timer(*pair))
    return fastest


async def measure(timer: Timer, max_length: int, repeats: int = REPEATS) -> IdealisedRuntime:
    """Fit to a grid of prompt lengths that fit into `max_length`; the first request warms up and does not count."""
    prompts = [prompt for prompt in PROMPTS if prompt + OUTPUT <= max_length] or [1]
    output = min(OUTPUT, max_length - prompts[-1])
    await timer(prompts[0], output)
    return fit(await denoised(timer, [(prompt, length) for prompt in prompts for length in (1, output)], repeats))


def request_timer(model: Model, vocab_size: int, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """Times requests alone on an idle model; no prompt shares a prefix with an earlier one."""
    numbers = count()

    async def seconds(prompt: int, output: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        tokens = [(7 * place + 1) % vocab_size for place in range(prompt)]
        seq = TokenSequence(tokens, sampling, seed=0, sharing=Sharing.private(f"timing-{next(numbers)}"))
        started = clock()
        await model.decode(seq)
        elapsed = clock() - started
        model.release(seq)
        return elapsed

    return seconds
