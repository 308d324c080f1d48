"""Workloads and turns on an engine whose times are made up, so that every number can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from benchmarks.peers.base import Generation
from benchmarks.peers.remote import PeerError
from benchmarks.peers.turns import measure
from benchmarks.peers.workloads import Decode, HostStep, Mixed, OneByOne, Overhead, Prefill, SharedPrefix, Workload

WORKLOADS: list[Workload] = [
    Decode(batch=2, tokens=10),
    Prefill(tokens=100),
    Mixed(requests=3, shortest=4, longest=8, tokens=5),
    SharedPrefix(shared=50, own=5),
    Overhead(batch=2, tokens=10),
    HostStep(rows=2, tokens=10, vocab=100),
]


@dataclass
class Clockwork:
    """Reads a token in `read_s`, writes one for each prompt in `write_s`, knows prefixes; a tenth is no forward."""

    read_s: float = 0.01
    write_s: float = 0.1
    first_token: int = 0
    cpu: float = 0.0
    calls: list[tuple[list[list[int]], int]] = field(default_factory=list)

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        known = [prompt for earlier, _ in self.calls for prompt in earlier]
        self.calls.append((prompts, max_tokens))
        read = sum(len(prompt) - max((_shared(prompt, old) for old in known), default=0) for prompt in prompts)
        seconds = self.read_s * read + self.write_s * max_tokens
        answers = [[self.first_token] * max_tokens for _ in prompts]
        return Generation(seconds, answers, 0.9 * seconds)

    def cpu_seconds(self) -> float:
        return self.cpu


def _shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_decoding_leaves_the_prompt_out() -> None:
    # Each turn reads 2 prompts and writes once 10 tokens and once 20; the difference is 10 steps of 0.1 s for 2 rows.
    assert Decode(batch=2, tokens=10).measure(Clockwork(), 0).value == pytest.approx(2 / 0.1)


def test_decoding_leaves_out_what_is_decoded_while_prompts_are_read() -> None:
    class Mingled(Clockwork):
        def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
            made = super().generate(prompts, max_tokens)
            return Generation(made.seconds + 3.0 * (max_tokens > 1), made.answers, made.forward_s)

    assert Decode(batch=2, tokens=10).measure(Mingled(), 0).value == pytest.approx(2 / 0.1)


def test_prefill_counts_prompt_tokens() -> None:
    assert Prefill(tokens=100).measure(Clockwork(), 0).value == pytest.approx(100 / (100 * 0.01 + 0.1))


def test_a_step_of_the_host_gives_every_row_a_token() -> None:
    engine = Clockwork(read_s=0.001)
    # A turn reads 4 prompts of 16 tokens in 0.001 s a token and writes 10 times, 0.1 s for all rows each time.
    assert HostStep(rows=4, tokens=10, vocab=100).measure(engine, 0).value == pytest.approx(1e6 * (0.064 + 1.0) / 10)
    assert {token < 100 for prompts, _ in engine.calls for prompt in prompts for token in prompt} == {True}


def test_mixed_lengths_are_spread_evenly_and_count_new_tokens() -> None:
    engine = Clockwork(read_s=0.1)
    reading = Mixed(requests=3, shortest=4, longest=8, tokens=5).measure(engine, 0)
    assert sorted(len(prompt) for prompt in engine.calls[0][0]) == [4, 6, 8]
    assert reading.value == pytest.approx(3 * 5 / (18 * 0.1 + 5 * 0.1))


def test_a_shared_prefix_is_the_second_time_over_the_first() -> None:
    reading = SharedPrefix(shared=50, own=5).measure(Clockwork(), 0)
    assert reading.value == pytest.approx((5 * 0.01 + 0.1) / (55 * 0.01 + 0.1))
    forgetful = SharedPrefix(shared=50, own=5).measure(Clockwork(read_s=0.0), 0)
    assert forgetful.value == pytest.approx(1.0)


def test_overhead_is_what_forwards_do_not_explain() -> None:
    assert Overhead(batch=2, tokens=10).measure(Clockwork(), 0).value == pytest.approx(0.1)


def test_one_by_one_takes_the_rounds_own_prompts() -> None:
    engine = Clockwork()
    work = OneByOne(((1, 1), (2, 2), (3, 3), (4, 4)), per_round=2, tokens=5)
    assert work.measure(engine, 1).value == pytest.approx(10 / (2 * (0.02 + 0.5)))
    assert [prompts for prompts, _ in engine.calls] == [[[3, 3]], [[4, 4]]]


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.name)
def test_prompts_are_equal_for_all_engines_and_new_in_every_round(work: Workload) -> None:
    one, other = Clockwork(), Clockwork()
    work.measure(one, 3)
    work.measure(other, 3)
    assert one.calls == other.calls
    work.measure(other, 4)
    prompts = [tuple(prompt) for call, _ in other.calls for prompt in call]
    assert len(set(prompts)) == len(prompts)


def test_a_turn_lasts_at_least_a_second() -> None:
    engine = Clockwork(read_s=0.0, write_s=0.01)
    assert Decode(batch=1, tokens=20).measure(engine, 0).value == pytest.approx(100)
    assert [tokens for _, tokens in engine.calls] == [20, 40] * 5


@dataclass
class Sided(Clockwork):
    """Notes whose turn it is; fails from a turn on."""

    name: str = ""
    turns: list[str] = field(default_factory=list)
    fails_from: int = 10**6

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        self.turns.append(self.name)
        if self.turns.count(self.name) > self.fails_from:
            raise PeerError("broken")
        return super().generate(prompts, max_tokens)


async def test_engines_take_turns_and_the_first_round_does_not_count() -> None:
    turns: list[str] = []
    engines = {
        name: Sided(name=name, turns=turns, read_s=read_s)
        for name, read_s in (("ours", 0.01), ("a", 0.02), ("b", 0.04))
    }
    outcome = await measure(Prefill(tokens=100), engines, "ours", rounds=2)
    assert turns == ["ours", "a", "b", "a", "b", "ours", "b", "ours", "a"]
    assert {name: len(values) for name, values in outcome.values.items()} == {"ours": 2, "a": 2, "b": 2}
    assert outcome.ratio("a").value == pytest.approx(2.1 / 1.1)
    assert outcome.agreement == {"ours": 1.0, "a": 1.0, "b": 1.0}


async def test_an_engine_that_fails_leaves_and_the_others_go_on() -> None:
    engines = {"ours": Sided(name="ours"), "a": Sided(name="a", fails_from=1)}
    outcome = await measure(Prefill(tokens=100), engines, "ours", rounds=3)
    assert outcome.failures == {"a": "broken"}
    assert list(outcome.values) == ["ours"]
    assert len(outcome.values["ours"]) == 3


async def test_without_any_engine_there_are_no_numbers() -> None:
    outcome = await measure(Prefill(tokens=100), {}, "ours", rounds=3)
    assert (outcome.values, outcome.failures) == ({}, {})


async def test_engines_that_answer_differently_are_seen() -> None:
    engines = {"ours": Clockwork(first_token=1), "a": Clockwork(first_token=2)}
    assert (await measure(Prefill(tokens=100), engines, "ours", rounds=1)).agreement == {"ours": 1.0, "a": 0.0}


async def test_an_engine_that_does_not_rest_is_seen() -> None:
    class Busy(Clockwork):
        """Has used a second more whenever anyone looks."""

        def cpu_seconds(self) -> float:
            self.cpu += 1.0
            return self.cpu

    rested = await measure(Prefill(tokens=100), {"ours": Clockwork(), "a": Clockwork()}, "ours", rounds=1)
    assert rested.waiting_cpu == 0.0
    busy = await measure(Prefill(tokens=100), {"ours": Clockwork(), "a": Busy()}, "ours", rounds=1)
    assert busy.waiting_cpu > 1.0
