import itertools
from dataclasses import dataclass, field

import pytest

from decoding.decode_loop import reported, run_decode_loop, stretch_lengths
from decoding.model import Decision, Readout, ReadSpec, StopCondition
from decoding.sequence import Sequence
from turnout.types import SamplingParams


@dataclass
class Scripted:
    """Says `decision` at the token `at`."""

    name: str
    at: int
    decision: Decision
    want: ReadSpec = ReadSpec(entropy=True)
    seen: list[int] = field(default_factory=list)

    def observe(self, token: int, row: Readout) -> Decision:
        self.seen.append(token)
        return self.decision if token == self.at else Decision.GO_ON


class Counting:
    """Chooses 10, 11, 12, ... by position."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.wants: list[ReadSpec] = []

    async def __call__(self, want: ReadSpec) -> Readout:
        self.wants.append(want)
        return Readout(token=9 + len(self.seq), entropy_bits=1.0)


def sequence(max_tokens: int = 20, eos: tuple[int, ...] = (), **sampling) -> Sequence:
    return Sequence([1], SamplingParams(max_tokens=max_tokens, **sampling), 0, eos)


async def stretch(seq: Sequence, *rules: Scripted, max_tokens: int | None = None):
    segment = await run_decode_loop(Counting(seq), seq, StopCondition(rules, max_tokens), "m", 7)
    return [token.id for token in segment.tokens], segment.stopped_by


async def test_stop_keeps_the_token_and_drop_does_not():
    seq = sequence()
    assert await stretch(seq, Scripted("r", 12, Decision.STOP)) == ([10, 11, 12], "r")
    assert await stretch(seq, Scripted("d", 14, Decision.DROP)) == ([13], "d")
    assert seq.tokens == [1, 10, 11, 12, 13]
    meter = seq.meter.models["m"]
    assert (meter.generated_tokens, meter.discarded_tokens, meter.num_parameters) == (4, 1, 7)


async def test_a_rule_that_drops_hides_the_token_from_later_rules():
    first, second = Scripted("first", 11, Decision.DROP), Scripted("second", 99, Decision.STOP)
    assert await stretch(sequence(), first, second) == ([10], "first")
    assert (first.seen, second.seen) == ([10, 11], [10])


async def test_a_rule_wins_over_max_tokens_and_the_end_over_both():
    assert await stretch(sequence(), Scripted("r", 11, Decision.STOP), max_tokens=2) == ([10, 11], "r")
    assert await stretch(sequence(), max_tokens=2) == ([10, 11], "max_tokens")
    assert await stretch(sequence(2), Scripted("r", 11, Decision.STOP), max_tokens=2) == ([10, 11], "finish")
    assert await stretch(sequence(eos=(11,)), max_tokens=9) == ([10, 11], "finish")


async def test_nothing_happens_after_the_end_or_with_no_room():
    seq = sequence(1)
    await stretch(seq)
    assert await stretch(seq) == ([], "finish")
    assert await stretch(sequence(), max_tokens=0) == ([], "max_tokens")


async def test_asks_for_what_rules_and_the_request_want():
    seq = sequence(1, logprobs=3)
    step = Counting(seq)
    await run_decode_loop(step, seq, StopCondition((Scripted("r", 0, Decision.STOP),)), "m", 0)
    assert step.wants == [ReadSpec(entropy=True, logprob=True, top=3)]
    assert reported(sequence()) == ReadSpec(draw=None)
    assert reported(sequence(logprobs=0)) == ReadSpec(draw=None, logprob=True)


def test_first_stretch_is_one_token_then_they_double():
    assert list(itertools.islice(stretch_lengths(), 6)) == [1, 2, 4, 8, 8, 8]


def test_until_combines():
    one, two = Scripted("a", 0, Decision.STOP), Scripted("b", 0, Decision.STOP, want=ReadSpec(top=2))
    both = StopCondition((one,), 5) | StopCondition((two,), 3)
    assert both.rules == (one, two)
    assert both.max_tokens == 3
    assert both.want == ReadSpec(entropy=True, top=2)
    assert (StopCondition() | StopCondition()).max_tokens is None


@pytest.mark.parametrize("length", [1, 2, 3, 7])
async def test_boundaries_change_nothing(length):
    whole, parts = sequence(11), sequence(11)
    await stretch(whole)
    while not parts.finished:
        await stretch(parts, max_tokens=length)
    assert whole.generated == parts.generated
