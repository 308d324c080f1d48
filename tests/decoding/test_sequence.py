import pytest

from decoding.sequence import Sequence
from turnout.types import FinishReason, SamplingParams, Sharing, Token


def tokens(*ids: int, source: str = "m") -> list[Token]:
    return [Token(i, source) for i in ids]


class StopAt:
    """Text stop after a number of tokens."""

    watches = True

    def __init__(self, left: int) -> None:
        self.left = left

    def feed(self, token_id: int) -> bool:
        self.left -= 1
        return self.left == 0

    def clone(self) -> "StopAt":
        return StopAt(self.left)


def test_extend_stops_inside_and_reports_what_was_added():
    seq = Sequence([1], SamplingParams(max_tokens=9), 0, eos_ids=[7])
    added = seq.extend(tokens(5, 7, 6), {"m": 11})
    assert [token.id for token in added] == [5, 7]
    assert seq.tokens == [1, 5, 7]
    assert seq.finish_reason is FinishReason.STOP
    assert seq.meter.models["m"].generated_tokens == 2
    assert seq.meter.models["m"].num_parameters == 11
    assert not seq.append(Token(5, "m"))
    assert len(seq) == 3
    assert seq.num_remaining == 0


def test_stop_ids_end_it_even_when_eos_is_ignored():
    seq = Sequence([1], SamplingParams(ignore_eos=True, stop_token_ids=(4,)), 0, eos_ids=[7])
    seq.extend(tokens(7, 4, 5), {"m": 0})
    assert seq.tokens == [1, 7, 4]
    assert seq.end_ids == {4}


def test_length_and_the_last_token_being_eos():
    seq = Sequence([1], SamplingParams(max_tokens=2), 0, eos_ids=[7])
    seq.append(Token(3, "m"))
    assert seq.num_remaining == 1
    seq.append(Token(3, "m"))
    assert seq.finish_reason is FinishReason.LENGTH
    other = Sequence([1], SamplingParams(max_tokens=1), 0, eos_ids=[7])
    other.append(Token(7, "m"))
    assert other.finish_reason is FinishReason.STOP


def test_stop_strings_end_it():
    seq = Sequence([1], SamplingParams(), 0, stop=StopAt(2))
    seq.extend(tokens(5, 6, 7), {"m": 0})
    assert seq.tokens == [1, 5, 6]
    assert seq.finish_reason is FinishReason.STOP


def test_a_fork_is_independent():
    seq = Sequence([1, 2], SamplingParams(max_tokens=5), 3, eos_ids=[9], stop=StopAt(4), sharing=Sharing.private("t"))
    seq.extend(tokens(5, 6), {"m": 0})
    twin = seq.fork(seed=8)
    seq.append(Token(7, "m"))
    twin.extend(tokens(5, 5, 5), {"m": 0})
    assert seq.tokens == [1, 2, 5, 6, 7]
    assert twin.tokens == [1, 2, 5, 6, 5, 5]  # its own stop counter: two were fed before the fork
    assert (twin.seed, seq.seed, twin.sharing) == (8, 3, Sharing.private("t"))
    assert (twin.num_prompt_tokens, twin.prompt_set) == (2, {1, 2})
    assert twin.output_counts == {5: 3, 6: 1}
    assert seq.output_counts == {5: 1, 6: 1, 7: 1}
    assert twin.meter.models["m"].generated_tokens == 2
    assert not seq.finished
    assert seq.fork().append(Token(9, "m"))
    assert not seq.finished


def test_a_fork_inherits_eos():
    twin = Sequence([1], SamplingParams(), 0, eos_ids=[9]).fork()
    twin.append(Token(9, "m"))
    assert twin.finish_reason is FinishReason.STOP


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one prompt token"):
        Sequence([], SamplingParams(), 0)


def test_only_an_answer_with_an_end_token_and_room_goes_on():
    ended = Sequence([1], SamplingParams(max_tokens=3), seed=0, eos_ids=(7,))
    ended.extend(tokens(5, 7), {"m": 1})
    ended.reopen()
    assert (ended.finished, ended.tokens) == (False, [1, 5, 7])
    ended.extend(tokens(6, 8), {"m": 1})
    assert (ended.tokens, ended.finish_reason) == ([1, 5, 7, 6], FinishReason.LENGTH)
    full = Sequence([1], SamplingParams(max_tokens=2), seed=0, eos_ids=(7,))
    full.extend(tokens(5, 7), {"m": 1})
    stopped = Sequence([1], SamplingParams(max_tokens=9), seed=0, stop=StopAt(1))
    stopped.extend(tokens(5), {"m": 1})
    for seq in (ended, full, stopped, Sequence([1], SamplingParams(), seed=0)):
        with pytest.raises(ValueError, match="end token"):
            seq.reopen()


@pytest.mark.parametrize("stop", [None, 3, 6])
@pytest.mark.parametrize("most", [2, 5, 9])
@pytest.mark.parametrize("ids", [[4, 5, 6, 5, 8], [4, 5, 7, 6, 5], [7], []])
def test_tokens_added_together_are_as_those_added_one_by_one(ids: list[int], most: int, stop: int | None) -> None:
    def sequence() -> Sequence:
        text = None if stop is None else StopAt(stop)
        return Sequence([1], SamplingParams(max_tokens=most), 0, eos_ids=[7], stop=text)

    together, single = sequence(), sequence()
    for given in (ids, [5, 6]):
        assert together.append_plain(given, "m", 3) == len(single.extend(tokens(*given), {"m": 3}))
        assert (together.tokens, together.generated) == (single.tokens, single.generated)
        assert (together.finish_reason, together.output_counts) == (single.finish_reason, single.output_counts)
        assert together.meter.written_by("m") == single.meter.written_by("m")
