"""Workloads: each turns an engine's `generate` into one number, the same way for every engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.peers.base import Generation

AT_LEAST_S = 1.0  # work of one turn; shorter timings mean little
PROMPT_TOKENS = 128
HOST_PROMPT_TOKENS = 16
VOCAB = 8192
RESERVED = 10  # ids below are special


class Generator(Protocol):
    """The part of a peer that is measured."""

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """See `benchmarks.peers.base.Peer.generate`."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """One turn of one engine: the number, and the first answers, by which engines are seen to run the same model."""

    value: float
    answers: list[list[int]]


class Workload(Protocol):
    """One kind of work. A round's prompts are the same for every engine and in no other round: a cache would answer."""

    @property
    def name(self) -> str:
        """For the tables."""
        ...

    @property
    def unit(self) -> str:
        """Of the number; of "tokens/s" more is better, of "share" and "us" less."""
        ...

    def measure(self, engine: Generator, number: int) -> Reading:
        """Run it once, as round `number`."""
        ...


class RandomPrompts:
    """Prompts of random tokens, a new one each time.

    Args:
        seed: equal seeds give the same prompts in the same order.
        vocab: of the model.
    """

    def __init__(self, seed: str, vocab: int = VOCAB) -> None:
        self._random = random.Random(seed)
        self._vocab = vocab

    def one(self, length: int) -> list[int]:
        """A prompt of `length` tokens."""
        return [self._random.randrange(RESERVED, self._vocab) for _ in range(length)]

    def batch(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens."""
        return [self.one(length) for _ in range(count)]


def _repeated(generate: Callable[[], Generation]) -> tuple[float, list[list[int]]]:
    """Generate until a turn is long enough; returns the mean seconds of one time, and the first answers."""
    seconds, times = 0.0, 0
    answers: list[list[int]] = []
    while seconds < AT_LEAST_S:
        done = generate()
        answers = answers or done.answers
        seconds += done.seconds
        times += 1
    return seconds / times, answers


@dataclass(frozen=True, slots=True)
class Decode:
    """Decoding after equally long prompts: answers of two lengths, whose times differ by the tokens between them.

    The time to a first token would be no measure of reading: with several prompts, engines decode some while they read
    others, in steps of another kind.
    """

    batch: int
    tokens: int
    unit = "tokens/s"

    @property
    def name(self) -> str:
        """For the tables."""
        return f"decode, batch {self.batch}"

    def measure(self, engine: Generator, number: int) -> Reading:
        """Tokens behind the first `tokens` of each answer, per second."""
        prompts = RandomPrompts(f"{self.name}/{number}")
        seconds, tokens = 0.0, 0
        answers: list[list[int]] = []
        while seconds < AT_LEAST_S:
            half = engine.generate(prompts.batch(self.batch, PROMPT_TOKENS), self.tokens)
            whole = engine.generate(prompts.batch(self.batch, PROMPT_TOKENS), 2 * self.tokens)
            answers = answers or whole.answers
            seconds += whole.seconds - half.seconds
            tokens += self.batch * self.tokens
        return Reading(tokens / seconds, answers)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Reading one long prompt, until its first new token."""

    tokens: int
    unit = "tokens/s"

    @property
    def name(self) -> str:
        """For the tables."""
        return f"prefill of {self.tokens}"

    def measure(self, engine: Generator, number: int) -> Reading:
        """Prompt tokens per second."""
        prompts = RandomPrompts(f"{self.name}/{number}")
        seconds, answers = _repeated(lambda: engine.generate([prompts.one(self.tokens)], 1))
        return Reading(self.tokens / seconds, answers)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Prompts of many lengths, submitted together, each with the same number of new tokens."""

    requests: int
    shortest: int
    longest: int
    tokens: int
    unit = "tokens/s"

    @property
    def name(self) -> str:
        """For the tables."""
        return f"{self.requests} mixed requests"

    def measure(self, engine: Generator, number: int) -> Reading:
        """New tokens per second of the whole batch, reading the prompts included."""
        prompts = RandomPrompts(f"{self.name}/{number}")
        step = (self.longest - self.shortest) / (self.requests - 1)
        lengths = [round(self.shortest + step * i) for i in range(self.requests)]
        random.Random(number).shuffle(lengths)
        seconds, answers = _repeated(lambda: engine.generate([prompts.one(length) for length in lengths], self.tokens))
        return Reading(self.requests * self.tokens / seconds, answers)


@dataclass(frozen=True, slots=True)
class HostStep:
    """Steps of an engine whose layers cost nothing, each of all rows; see `turnout_host`."""

    rows: int
    tokens: int
    vocab: int
    unit = "us"

    @property
    def name(self) -> str:
        """For the tables."""
        return f"{self.rows} rows"

    def measure(self, engine: Generator, number: int) -> Reading:
        """Microseconds of a step: a token of every answer, its share of beginning and ending them included."""
        prompts = RandomPrompts(f"{self.name}/{number}", self.vocab)
        seconds, answers = _repeated(lambda: engine.generate(prompts.batch(self.rows, HOST_PROMPT_TOKENS), self.tokens))
        return Reading(1e6 * seconds / self.tokens, answers)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A second prompt that begins like the first: its time to the first token over the first one's."""

    shared: int
    own: int
    unit = "share"

    @property
    def name(self) -> str:
        """For the tables."""
        return f"TTFT after a shared prefix of {self.shared}"

    def measure(self, engine: Generator, number: int) -> Reading:
        """Second time to first token over the first."""
        prompts = RandomPrompts(f"{self.name}/{number}")
        first = second = 0.0
        answers: list[list[int]] = []
        while first < AT_LEAST_S:
            prefix = prompts.one(self.shared)
            first += engine.generate([prefix + prompts.one(self.own)], 1).seconds
            again = engine.generate([prefix + prompts.one(self.own)], 1)
            answers = answers or again.answers
            second += again.seconds
        return Reading(second / first, answers)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Time outside model forwards while many requests decode together. Only an engine that says it can be asked."""

    batch: int
    tokens: int
    unit = "share"

    @property
    def name(self) -> str:
        """For the tables."""
        return f"time outside forwards, {self.batch} concurrent"

    def measure(self, engine: Generator, number: int) -> Reading:
        """Share of the wall time of decoding."""
        prompts = RandomPrompts(f"{self.name}/{number}")
        seconds = forward = 0.0
        answers: list[list[int]] = []
        while seconds < AT_LEAST_S:
            first = engine.generate(prompts.batch(self.batch, PROMPT_TOKENS), 1)
            whole = engine.generate(prompts.batch(self.batch, PROMPT_TOKENS), self.tokens + 1)
            if first.forward_s is None or whole.forward_s is None:
                raise ValueError("this engine does not report the time inside its forwards")
            answers = answers or whole.answers
            seconds += whole.seconds - first.seconds
            forward += whole.forward_s - first.forward_s
        return Reading(1 - forward / seconds, answers)


@dataclass(frozen=True, slots=True)
class Answers:
    """Real prompts answered a batch at a time, each with the same number of new tokens.

    Attributes:
        prompts: enough of them that every round has its own: a cache would answer.
        per_round: prompts of a round, at least a batch.
        batch: submitted together.
        tokens: of each answer.
    """

    prompts: tuple[tuple[int, ...], ...]
    per_round: int
    batch: int
    tokens: int
    unit = "tokens/s"

    @property
    def name(self) -> str:
        """For the tables."""
        return f"real text, batch {self.batch}"

    def measure(self, engine: Generator, number: int) -> Reading:
        """New tokens per second, reading the prompts included."""
        taken = itertools.cycle(self.prompts[number * self.per_round : (number + 1) * self.per_round])
        seconds, tokens = 0.0, 0
        answers: list[list[int]] = []
        while seconds < AT_LEAST_S:
            done = engine.generate([list(prompt) for prompt in itertools.islice(taken, self.batch)], self.tokens)
            answers = answers or done.answers
            seconds += done.seconds
            tokens += self.batch * self.tokens
        return Reading(tokens / seconds, answers)


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Real prompts answered one after the other, each to its end: what speculative decoding is for.

    Attributes:
        prompts: enough of them that every round has its own.
        per_round: prompts of a round.
        tokens: longest answer.
    """

    prompts: tuple[tuple[int, ...], ...]
    per_round: int
    tokens: int
    unit = "tokens/s"
    name = "answers, one at a time"

    def measure(self, engine: Generator, number: int) -> Reading:
        """New tokens per second, reading the prompts included."""
        prompts = self.prompts[number * self.per_round : (number + 1) * self.per_round]
        done = [engine.generate([list(prompt)], self.tokens, stop_at_end=True) for prompt in prompts]
        answers = [generation.answers[0] for generation in done]
        return Reading(sum(map(len, answers)) / sum(generation.seconds for generation in done), answers)
