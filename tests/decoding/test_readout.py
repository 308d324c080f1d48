import math
from dataclasses import replace
from pickle import dumps, loads
from typing import Any

import pytest
import torch

from actors.packing import _pack_rows, _unpack_rows
from decoding.logits import choice_scores, process
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from tests.constrained import CHARS, char_compiler
from turnout.structure import Structure
from turnout.types import SamplingParams, Token

VOCAB = 20
EVERYTHING = ReadSpec(entropy=True, logprob=True, top=4, probs=True, logits=True, margin=True)


def row_of(seed: int = 0, length: int = 3, path: tuple[int, ...] = (), **sampling: Any) -> RowContext:
    return RowContext(Sequence([1] * length, SamplingParams(**sampling), seed), path)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def scalars(row: Readout) -> list[float | None]:
    return [row.entropy_bits, row.logprob, row.margin, *(value for _, value in row.top)]


def same(one: Readout, two: Readout) -> None:
    assert one.token == two.token
    assert [t for t, _ in one.top] == [t for t, _ in two.top]
    for a, b in zip(scalars(one), scalars(two), strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, rel=1e-5)
    for a, b in ((one.probs, two.probs), (one.logits, two.logits)):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_a_batch_of_everything_equals_its_rows_alone():
    rows = [
        row_of(1),
        row_of(2, temperature=0),
        row_of(3, top_k=3, path=(4, 5)),
        row_of(4, temperature=0, logit_bias={3: 9.0}),
        row_of(5, temperature=0.3, top_p=0.8, frequency_penalty=1.0, path=(2,)),
        row_of(6),
    ]
    wants = [
        EVERYTHING,
        EVERYTHING,
        ReadSpec(draw=None, probs=True, top=2),
        ReadSpec(draw=None, probs=True, entropy=True),
        ReadSpec(draw=NoiseKind.DRAFT, probs=True, logprob=True),
        ReadSpec(draw=None),
    ]
    raw = logits(len(rows))
    together = read(raw, rows, wants)
    for index, row in enumerate(together):
        same(row, read(raw[index : index + 1], [rows[index]], [wants[index]])[0])
    assert together[5] == Readout()
    assert [row.token >= 0 for row in together] == [True, True, False, False, True, False]
    assert [len(row.top) for row in together] == [4, 4, 2, 0, 0, 0]


def test_every_combination_of_readings_is_in_a_batch_what_it_is_alone() -> None:
    """All pairs of readings, of greedy, drawn and structured rows together, and as they come from an actor."""
    single: list[dict[str, Any]] = [
        *({name: True} for name in ("entropy", "logprob", "margin", "surprise", "certainty", "probs", "logits")),
        *({"draw": None}, {"top": 3}, {"top_processed": 5}, {"processed_of": (7, 2)}),
    ]
    pairs = [ReadSpec(**one) | ReadSpec(**{"draw": None, **two}) for one in single for two in single]
    pairs += [replace(each, draw=None) for each in pairs]
    kinds = [
        lambda seed: row_of(seed),
        lambda seed: row_of(seed, temperature=0.0, repetition_penalty=1.3),
        lambda seed: row_of(seed, temperature=0.6, top_k=4, path=(3,)),
        lambda seed: structured("(c|d)d", []),
    ]
    rows = [kinds[place % len(kinds)](place) for place in range(len(pairs))]
    raw = torch.cat([logits(len(pairs)), torch.full((len(pairs), len(CHARS) + 2 - VOCAB), -3.0)], dim=1)
    for order in (pairs, pairs[1:] + pairs[:1]):  # with another kind of row
        together = read(raw, rows, order)
        plain = [each for each in together if not each.bears_tensors]
        assert _unpack_rows(_pack_rows(plain, dumps), loads) == plain
        for index, row in enumerate(together):
            [alone] = read(raw[index : index + 1], [rows[index]], [order[index]])
            same(row, alone)
            for name in ("surprise_bits", "certainty", "allowed_logprob"):
                one, other = getattr(row, name), getattr(alone, name)
                assert one is other is None or one == pytest.approx(other, rel=1e-5)
            for name in ("top_processed", "processed_of"):
                assert dict(getattr(row, name)) == pytest.approx(dict(getattr(alone, name)), rel=1e-5)
            assert (row.surprise_bits is not None) == (order[index].surprise and row.token >= 0 and index % 4 in (0, 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_belong_to_their_own_rows(temperature: float):
    wants = [ReadSpec(draw=None, probs=True), ReadSpec(), ReadSpec(logprob=True), ReadSpec(draw=None, logprob=True)]
    raw = logits(8)
    rows = read(raw, [row_of(seed, temperature=temperature) for seed in range(8)], wants * 2)
    for index in (2, 6):
        logprob = raw[index].log_softmax(-1)[rows[index].token].item()
        assert rows[index].logprob == pytest.approx(logprob, rel=1e-5)
    assert [row.logprob is None for row in rows] == [True, True, False, True] * 2


def test_the_drawn_token_is_the_keyed_gumbel_max_of_the_processed_logits():
    raw = logits(1)
    for draw, purpose in (
        (NoiseKind.SAMPLE, Purpose.SAMPLE),
        (NoiseKind.DRAFT, Purpose.DRAFT),
        (NoiseKind.ROUND, Purpose.DRAFT),
    ):
        for seed in range(50):
            key = noise_key(round_seed(seed, 5) if draw is NoiseKind.ROUND else seed, 7, purpose)
            row = row_of(seed, length=5, path=(1, 2), top_k=6, temperature=1.3)
            noise = gumbel([key], VOCAB, raw.device)
            scores = process(raw, [row])[0] + noise[0]
            mine = read(raw, [row], [ReadSpec(draw=draw, margin=True)])[0]
            assert mine.token == int(scores.argmax())
            best = scores.topk(2).values
            assert mine.margin == pytest.approx(float(best[0] - best[1]))


def test_rows_that_share_noise_draw_as_they_do_alone():
    """The nodes of a tree at one depth: the same seed and place, other logits."""
    seq = Sequence([1, 2], SamplingParams(), seed=5)
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1))
    histories = [
        RowContext(seq, path) for path in [(), (3,), (4,), (3, 1), (3, 2), (4, 1), (4, 2), (3, 1, 1), (4, 2, 2)]
    ]
    wants = [
        ReadSpec(draw=NoiseKind.SAMPLE),
        *[ReadSpec(draw=NoiseKind.ROUND)] * 4,
        *[ReadSpec(draw=NoiseKind.SAMPLE)] * 4,
    ]
    together = read(logits, histories, wants)
    for place, row in enumerate(together):
        [alone] = read(logits[place : place + 1], histories[place : place + 1], wants[place : place + 1])
        assert row.token == alone.token
    assert len({row.token for row in together}) > 2


def test_measurements_are_of_the_raw_logits():
    raw = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])) + 3.0
    row = row_of(temperature=0, logit_bias={3: 50.0})
    mine = read(raw, [row], [EVERYTHING])[0]
    assert mine.token == 3
    assert mine.entropy_bits == pytest.approx(1.75, abs=1e-5)
    assert mine.logprob == pytest.approx(math.log(0.125), abs=1e-5)
    assert [token for token, _ in mine.top[:2]] == [0, 1]
    assert [value for _, value in mine.top[:2]] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-5)
    assert mine.probs is not None
    assert mine.probs.tolist() == [0, 0, 0, 1]
    assert mine.margin == pytest.approx(50 + math.log(0.125) - math.log(0.5), abs=1e-4)


def test_top_is_cut_to_the_vocabulary():
    assert len(read(torch.zeros((1, 4)), [row_of()], [ReadSpec(top=20)])[0].top) == 4


def test_greedy_margin_is_the_gap_of_the_two_best():
    raw = torch.tensor([[1.0, 4.0, 3.5, 0.0]])
    assert read(raw, [row_of(temperature=0)], [ReadSpec(margin=True)])[0].margin == pytest.approx(0.5)


def test_the_input_is_left_alone():
    raw = logits(3)
    before = raw.clone()
    read(raw, [row_of(1), row_of(2, temperature=0, logit_bias={1: 3.0}), row_of(3, top_k=2)], [EVERYTHING] * 3)
    assert torch.equal(raw, before)


def test_nothing_wanted_and_no_rows():
    assert read(logits(2), [row_of(), row_of()], [ReadSpec(draw=None)] * 2) == [Readout(), Readout()]
    assert read(logits(0), [], []) == []


def structured(value: str, answer: list[int], path: tuple[int, ...] = ()) -> RowContext:
    """A row of an answer held to a regular expression over `tests.constrained.CHARS`."""
    seq = Sequence([2], SamplingParams(temperature=0.0), 0)
    for token in answer:
        seq.append(Token(token, "m"))
    seq.constraint = char_compiler().compile(Structure(kind="regex", value=value)).clone()
    return RowContext(seq, path)


def test_the_entropy_under_a_structure_is_that_of_the_tokens_it_allows():
    """By hand: c and d are left with odds of 3 to 1, whatever the other 38 tokens have; then d alone; then nothing."""
    vocab = len(CHARS) + 2
    raw = torch.zeros((5, vocab))
    c = 2 + CHARS.index("c")
    raw[:, c] = math.log(3.0)
    rows = [structured("(c|d)d", []), structured("(c|d)d", [c]), structured("(c|d)d", [], (c,)), row_of(), row_of()]
    rows[4] = structured("(c|d)d", [])
    want = ReadSpec(draw=None, entropy=True)
    found = read(raw, rows, [want, want, want, want, ReadSpec(draw=None, entropy=True, unmasked=True)])
    total = vocab + 2.0  # of the odds: 3 for c, 1 for each other token
    wide = math.log2(total) - 3.0 / total * math.log2(3.0)
    assert [row.entropy_bits for row in found] == pytest.approx([0.811278, 0.0, 0.0, wide, wide], abs=1e-5)
    assert [row.forced for row in found] == [False, True, True, False, False]
    allowed = [math.log(4.0 / total), math.log(1.0 / total), math.log(1.0 / total), None, None]
    assert [row.allowed_logprob is None for row in found] == [each is None for each in allowed]
    assert [row.allowed_logprob for row in found[:3]] == pytest.approx(allowed[:3], abs=1e-5)


def test_a_row_is_forced_by_what_is_allowed_and_not_by_what_is_likely():
    """The model is sure among two tokens that may follow: that is no forced token, though its entropy is 0."""
    raw = torch.zeros((1, len(CHARS) + 2))
    raw[0, 2 + CHARS.index("c")] = 200.0
    [row] = read(raw, [structured("c|d", [])], [ReadSpec(draw=None, entropy=True)])
    assert (row.entropy_bits, row.forced) == (0.0, False)


def test_log_probabilities_and_the_likeliest_stay_those_of_the_model_before_the_structure():
    raw = logits(1)
    raw = torch.cat([raw, torch.full((1, len(CHARS) + 2 - VOCAB), -3.0)], dim=1)
    want = ReadSpec(entropy=True, logprob=True, top=3)
    [held], [free] = read(raw, [structured("(c|d)d", [])], [want]), read(raw, [row_of(temperature=0.0)], [want])
    assert held.top == free.top
    assert held.logprob == pytest.approx(float(raw.log_softmax(-1)[0, held.token]))


def test_two_readers_of_one_row_cannot_have_different_entropies():
    held, free = ReadSpec(draw=None, entropy=True), ReadSpec(draw=None, entropy=True, unmasked=True)
    for one, other in ((held, free), (free, held)):
        with pytest.raises(AssertionError, match="read it twice"):
            one | other
    assert free | ReadSpec(top=2) == ReadSpec(entropy=True, unmasked=True, top=2)


def test_processed_log_probabilities_are_those_that_tokens_are_drawn_by():
    raw = torch.cat([logits(5), torch.full((5, len(CHARS) + 2 - VOCAB), -3.0)], dim=1)
    rows = [
        row_of(1, top_k=4, temperature=0.7, logit_bias={3: 2.0}, path=(4,)),
        row_of(2, temperature=0.0, repetition_penalty=1.4, top_k=2),
        structured("(c|d)d", []),
        row_of(4, temperature=0.0),
        row_of(5),
    ]
    given = (0, 3, 7)
    weighed = ReadSpec(top_processed=6, processed_of=given, top=2)
    wants = [weighed, weighed, replace(weighed, draw=None, processed_of=(2,)), ReadSpec(), weighed]
    found = read(raw, rows, wants)
    for place in (0, 1, 2, 4):
        scores = choice_scores(raw[place : place + 1], [rows[place]])[0].log_softmax(-1)
        best = scores.topk(6)
        assert [token for token, _ in found[place].top_processed] == best.indices.tolist()
        assert [value for _, value in found[place].top_processed] == pytest.approx(best.values.tolist())
        ids = list(wants[place].processed_of)
        assert [token for token, _ in found[place].processed_of] == ids
        assert [value for _, value in found[place].processed_of] == pytest.approx(scores[ids].tolist())
        raw_best = raw[place].log_softmax(-1).topk(2)
        assert [value for _, value in found[place].top] == pytest.approx(raw_best.values.tolist())
    assert (found[3].top_processed, found[3].processed_of) == ((), ())
    assert sum(value > -math.inf for _, value in found[0].top_processed) == 4  # top_k cuts
    assert sum(value > -math.inf for _, value in found[1].top_processed) == 6  # at temperature 0 it does not
    assert sum(value > -math.inf for _, value in found[2].top_processed) == 2  # the structure leaves c and d


def test_what_several_read_of_the_processed_law_is_the_union():
    both = ReadSpec(top_processed=2, processed_of=(3, 4)) | ReadSpec(top_processed=5, processed_of=(4, 1))
    assert (both.top_processed, both.processed_of) == (5, (3, 4, 1))
    assert ReadSpec(draw=None, processed_of=(1,)).chooses
    assert not ReadSpec(draw=None, top=3).chooses
