"""Drafters that copy, and the indices they look things up in."""

import random

import pytest
import torch

from decoding.drafters.base import DraftBudget
from decoding.drafters.copyspec import CopySpecDrafter, CopySpecParams
from decoding.drafters.input_copy import InputCopyDrafter, InputCopyParams
from decoding.fakes import TableModel
from decoding.lengths.fixed import FixedLength
from decoding.ngrams import GramIndex, RecentTexts, SuffixIndex, SuffixMatcher
from decoding.sequence import Sequence
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams, Token

VOCAB = 32
LENGTH = FixedLength()
A, B, C, D, E, F, X, Y = range(8)


def sequence(prompt: list[int], answer: list[int] | None = None) -> Sequence:
    seq = Sequence(prompt, SamplingParams(max_tokens=1000), 0)
    seq.extend([Token(token, "m") for token in answer or []], {"m": 1})
    return seq


@pytest.fixture
def scripted():
    """A target that writes one answer after one prompt, whatever it is fed."""

    def make(num_prompt_tokens: int, answer: list[int]) -> TableModel:
        rows, script = torch.eye(VOCAB) * 20, dict(enumerate(answer, num_prompt_tokens))
        return TableModel("large", lambda tokens: rows[script.get(len(tokens), 0)], VOCAB)

    return make


async def propose(drafter, seq: Sequence, depth: int = 64) -> list[int]:
    draft = await drafter.propose(
        TableModel("m", lambda tokens: torch.zeros(VOCAB), VOCAB), seq, DraftBudget(depth, 64), LENGTH
    )
    assert draft.is_chain
    return list(draft.tokens)


async def test_copyspec_copies_what_followed():
    drafter = CopySpecDrafter(CopySpecParams(gamma=3))
    assert await propose(drafter, sequence([1, 2, 3, 4, 5, 9, 1, 2, 3])) == [4, 5, 9, 1, 2, 3]
    assert await propose(CopySpecDrafter(CopySpecParams(gamma=3)), sequence([1, 2, 3, 4, 9, 2, 3])) == []
    for short in ([1], [1, 2, 3]):
        assert await propose(CopySpecDrafter(CopySpecParams(gamma=3)), sequence(short)) == []


async def test_copyspec_copies_from_the_place_it_is_told():
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    for occurrence, copied in (("first", [3, 1, 2, 4, 1, 2]), ("last", [4, 1, 2])):
        drafter = CopySpecDrafter(CopySpecParams(gamma=2, occurrence=occurrence))
        assert await propose(drafter, sequence(tokens)) == copied


async def test_copyspec_looks_into_earlier_turns_and_its_own_answer_and_keeps_to_its_room():
    drafter = CopySpecDrafter(CopySpecParams(gamma=2))
    seq = sequence([1, 2, 3, 4, 5, 6], [9])
    assert await propose(drafter, seq) == []
    seq.extend([Token(token, "m") for token in (8, 7, 1, 2)], {"m": 1})
    assert await propose(drafter, seq, depth=3) == [3, 4, 5]
    seq.extend([Token(token, "m") for token in (9, 8)], {"m": 1})
    assert await propose(drafter, seq) == [7, 1, 2, 9, 8]


@pytest.mark.parametrize("latest", [False, True])
def test_grams_are_found_where_a_search_finds_them(latest: bool):
    draw = random.Random(1)
    tokens = [0, 1]
    index, found = GramIndex(3, latest), 0
    while len(tokens) < 400:
        tokens += [draw.randrange(4) for _ in range(draw.randrange(1, 6))]
        places = [place for place in range(len(tokens) - 3) if tokens[place : place + 3] == tokens[-3:]]
        expected = places[-1 if latest else 0] if places else None
        assert index.find(tokens) == expected
        found += expected is not None
    assert found > 50


class Counted(list):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, key):
        value = super().__getitem__(key)
        self.num_read += len(value) if isinstance(key, slice) else 1
        return value


def test_a_look_up_reads_as_little_of_a_long_text_as_of_a_short_one():
    costs = []
    for size in (1_000, 32_000):
        tokens = Counted(index % 997 for index in range(size))
        index = GramIndex(4)
        index.find(tokens)
        tokens.append(5)
        tokens.num_read = 0
        index.find(tokens)
        costs.append(tokens.num_read)
    assert costs[0] == costs[1] <= 8


async def test_a_rejected_last_draft_token_costs_exactly_one_token(run, scripted):
    """Accepted tokens and the target's own: never the replacement of the last and one more."""
    prompt = (1, 2, 3, 4, 5, 6, 1, 2)
    answer = [3, 4, 5, 9, 10, 11]
    large = scripted(len(prompt), answer)
    params = {"drafter": {"name": "copyspec", "gamma": 2}, "draft_length": 4}
    done = await run("speculative", large, large, params, prompt=prompt, temperature=0, max_tokens=6)
    assert done.ids == answer
    assert [len(segment.tokens) for segment in done.segments] == [4, 1, 1]


async def test_another_drafter_drafts_where_nothing_is_found(run, make_model):
    small, large = make_model("small", 1), make_model("large", 1)
    arms = [{"name": "copyspec", "gamma": 3}, "model_chain"]
    plain = await run("plain", small, large, temperature=0, max_tokens=60)
    done = await run("speculative", small, large, {"drafter": arms}, temperature=0, max_tokens=60)
    assert done.ids == plain.ids
    assert set(done.owners) == {"S", "L"}
    meter = done.seq.meter.speculation
    # Both had their turn: the model alone needs a forward for every token it drafts.
    assert 0 < small.forwards < meter.draft_tokens


@pytest.mark.parametrize("drafter", ["copyspec", "input_copy"])
async def test_copies_change_nothing(run, make_model, drafter):
    small, large = make_model("small", 1, vocab=4, scale=1.0), make_model("large", 2, vocab=4, scale=1.0)
    prompt = (0, 1, 2, 3, 0, 1, 1, 2)
    accepted = 0
    for seed in range(40):
        sampling = {"prompt": prompt, "seed": seed, "max_tokens": 30, "temperature": float(seed % 2)}
        plain = await run("plain", small, large, **sampling)
        done = await run("speculative", small, large, {"drafter": drafter}, **sampling)
        assert done.ids == plain.ids
        accepted += done.seq.meter.speculation.accepted_tokens
    assert accepted > 40


@pytest.mark.parametrize("make", [lambda: CopySpecDrafter(CopySpecParams(gamma=2)), InputCopyDrafter])
async def test_one_is_ready_exactly_where_it_would_propose(make):
    """Asked token by token, or only now and then; and what it proposes is the same, whether it was asked before."""
    draw = random.Random(0)
    ready_somewhere = 0
    for _ in range(60):
        prompt = [draw.randrange(4) for _ in range(draw.randrange(1, 12))]
        watching, seq = make(), sequence(prompt)
        for _ in range(20):
            token = draw.randrange(4)
            ready = watching.ready(seq, token) if draw.random() < 0.7 else None
            seq.extend([Token(token, "m")], {"m": 1})
            fresh = make()
            expected = await propose(fresh, seq)
            assert ready is None or ready == bool(expected)
            assert await propose(watching, seq) == expected
            ready_somewhere += bool(ready)
    assert ready_somewhere > 100


@pytest.mark.parametrize("drafter", ["copyspec", "input_copy"])
async def test_while_nothing_is_found_the_target_decodes_as_alone_and_no_copy_is_missed(run, scripted, drafter):
    """Twenty new tokens, the prompt's own, and new ones again."""
    prompt, new = tuple(range(8)), list(range(10, 30))
    answer = [*new, *prompt, 30, 31]
    large = scripted(len(prompt), answer)
    params = {"drafter": drafter, "draft_length": 16}
    done = await run("speculative", large, large, params, prompt=prompt, temperature=0, max_tokens=40, eos=(31,))
    assert done.ids == answer
    lengths = [len(segment.tokens) for segment in done.segments]
    if drafter == "copyspec":  # four tokens of the prompt must stand there again
        assert lengths == [1, 2, 4, 8, 8, 1, 5, 1]
    else:  # drafts from the prompt's first token, in vain; then one token is enough
        assert lengths == [1, 1, 2, 4, 8, 5, 8, 1]
    assert done.seq.meter.speculation.rounds == large.forwards


async def test_input_copy_needs_three_forwards_for_one_replaced_token(run, scripted):
    prompt, answer = (A, B, C, D, E, F), [A, B, X, D, E, F, 31]
    large = scripted(len(prompt), answer)
    done = await run(
        "speculative", large, large, {"drafter": "input_copy"}, prompt=prompt, temperature=0, max_tokens=12, eos=(31,)
    )
    assert done.ids == answer
    assert [[token.id for token in segment.tokens] for segment in done.segments] == [[A, B, X], [D], [E, F, 31]]
    assert large.forwards == 3


@pytest.mark.parametrize(
    ("answer", "rounds"),
    [
        ([A, B, D, E, F, 31], [3, 3]),  # C deleted: the unexpected D is found at once
        ([A, B, X, Y, C, D, E, F, 31], [3, 1, 1, 4]),  # X Y inserted
        ([A, B, C, D, E, F, 31], [7]),
        ([X, Y, X, Y, 31], [1, 1, 2, 1]),  # nothing to copy: decoded as plainly as without a drafter
    ],
    ids=["deleted", "inserted", "same", "other"],
)
async def test_input_copy_finds_back(run, scripted, answer, rounds):
    prompt = (A, B, C, D, E, F)
    large = scripted(len(prompt), answer)
    done = await run(
        "speculative", large, large, {"drafter": "input_copy"}, prompt=prompt, temperature=0, max_tokens=12, eos=(31,)
    )
    assert done.ids == answer
    assert [len(segment.tokens) for segment in done.segments] == rounds


async def test_input_copy_waits_until_the_suffix_stands_in_one_place():
    drafter, seq = InputCopyDrafter(), sequence([A, B, C, A, B, D], [X])
    assert await propose(drafter, seq) == []
    for token, expected in ((A, []), (B, []), (C, [A, B, D])):
        seq.extend([Token(token, "m")], {"m": 1})
        assert await propose(drafter, seq) == expected


async def test_rounds_of_input_copy_scale_with_the_edits(run, scripted):
    rounds = []
    draw = random.Random(4)
    for size, edits in ((60, 1), (120, 1), (120, 4)):
        source = [draw.randrange(2, VOCAB) for _ in range(size)]
        answer = list(source)
        for edit in range(edits):
            answer[10 + 25 * edit] = 1
        large = scripted(size, [*answer, 0])
        done = await run(
            "speculative",
            large,
            large,
            {"drafter": "input_copy", "draft_length": 64},
            prompt=tuple(source),
            temperature=0,
            max_tokens=size,
        )
        assert done.ids == answer
        rounds.append(len(done.segments))
    assert rounds[1] <= rounds[0] + 2  # a draft holds 64 tokens, and a place may be ambiguous for a token
    assert rounds[1] + 3 <= rounds[2] <= 4 * rounds[1]


async def test_a_source_behind_the_prompt_is_noted():
    for start, note in ((2, ""), (3, "source_start 3 is behind the prompt's last token; it has 3")):
        drafter = InputCopyDrafter(InputCopyParams(source_start=start))
        await propose(drafter, sequence([A, B, C], [A]))
        assert drafter.note.partition("copied: ")[2] == note


async def test_input_copy_copies_its_span_only():
    spanned = InputCopyDrafter(InputCopyParams(source_start=2, source_end=4))
    assert await propose(spanned, sequence([A, B, C, D, E])) == [C, D]
    beyond = InputCopyDrafter(InputCopyParams(source_start=9))
    assert await propose(beyond, sequence([A, B, C], [A])) == []
    with pytest.raises(TurnoutError, match="source_end must be above source_start"):
        get_method("speculative").parse({"drafter": {"name": "input_copy", "source_start": 4, "source_end": 4}})


def test_the_matcher_finds_what_a_search_finds():
    draw = random.Random(2)
    for size in (0, 1, 5, 60):
        source = [draw.randrange(3) for _ in range(size)]
        matcher, text, unique = SuffixMatcher(source), [], 0
        assert matcher.place is None
        for _ in range(300):
            text.append(draw.randrange(4 if draw.random() < 0.2 else 3))
            matcher.read(text[-1])
            expected = None
            for length in range(1, size + 1):
                places = [end for end in range(length, size + 1) if source[end - length : end] == text[-length:]]
                if len(places) == 1:
                    expected = places[0]
                    break
            assert matcher.place == expected
            unique += expected is not None
        assert unique > 20 or size < 5


def test_suffixes_are_found_where_a_search_finds_them():
    draw = random.Random(3)
    index, text = SuffixIndex(most_places=1000), []
    lengths = set()
    for _ in range(150):
        # Now and then an old passage again, so that long suffixes occur.
        start = draw.randrange(len(text) + 1)
        new = text[start : start + draw.randrange(20)] if draw.random() < 0.3 else [draw.randrange(4) for _ in range(3)]
        new = new or [1]
        text += new
        index.add(new)
        best: dict[int, list[list[int]]] = {}
        for place in range(2, len(text)):
            length = 0
            while length < min(16, place) and text[place - 1 - length] == text[-1 - length]:
                length += 1
            best.setdefault(length, []).insert(0, text[place : place + 5])
        length = max(best, default=0)
        found = index.find(text, 5)
        if length < 2:
            assert (found.length, found.continuations) == (0, [])
        else:
            assert (found.length, found.continuations) == (length, best[length])
        lengths.add(found.length)
    assert {2, 3, 4, 16} <= lengths


def test_documents_do_not_run_into_each_other_and_old_ones_are_forgotten():
    texts = RecentTexts(most=64)
    texts.add([1, 2, 3])
    texts.add([4, 1, 2])
    assert texts.find([9, 1, 2], 8).continuations == [[3]]
    assert texts.find([3, 4], 8).length == 0
    for start in range(10, 20):
        texts.add([start] * 8)
        assert len(texts) <= 64
    assert texts.find([9, 1, 2], 8).length == 0
    assert texts.find([9, 19, 19], 8).length > 0
    texts.add(list(range(100, 300)))
    assert len(texts) <= 64
    assert texts.find([297, 298], 8).continuations == [[299]]
