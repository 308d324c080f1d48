"""Readings over a part of the vocabulary: what is read is what the whole head says of it, and only it is multiplied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.vocab_trim import VocabTrimDrafter, VocabTrimParams
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import NoiseKind, ReadSpec
from decoding.processors.base import NEG_INF
from decoding.sequence import Sequence
from decoding.vocabulary import SubVocabulary
from engine.backends.base import Kernels
from engine.backends.weight_packing import PackedLinear, linear_part, packs
from engine.loaded_model import Heads
from engine.model import EngineModel
from tests.engine.harness import ask, engine_model, twins
from training.random_models import llama_config, random_model
from turnout.structure import Structure
from turnout.types import SamplingParams

VOCAB, HIDDEN = 100, 32
IDS = torch.tensor([0, 3, 31, 32, 63, 64, 97, 99])
SOME = SubVocabulary(IDS)


def config(**changes: Any) -> Any:
    return llama_config(VOCAB, hidden_size=HIDDEN, pad_token_id=0, eos_token_id=1, **changes)


def model_of(kernels: Kernels, dtype: torch.dtype = torch.float32, **changes: Any) -> EngineModel:
    return engine_model(random_model(config(**changes), 4).to(dtype), kernels=kernels, block_size=4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["plain", "torch", "auto"])
def test_the_head_of_some_ids_says_what_the_whole_head_says_of_them(
    kernels: Kernels, dtype: torch.dtype, tied: bool
) -> None:
    plan = model_of(kernels, dtype, tie_word_embeddings=tied).batcher.runner.plan
    normed = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        whole, some = plan.logits(normed), plan.logits(normed, SOME)
        head = plan.stack.head_of(IDS)
        assert head is not None
        assert head(normed).shape == (5, len(IDS))
    torch.testing.assert_close(some[:, IDS], whole[:, IDS], atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[IDS] = False
    assert (some[:, others] == NEG_INF).all()


@pytest.mark.skipif(not packs(torch.bfloat16), reason="this processor's oneDNN has no kernels for bfloat16")
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_packed_layers_are_their_own(bias: bool) -> None:
    linear = torch.nn.Linear(64, 48, bias=bias).to(torch.bfloat16)
    hidden, ids = torch.randn(3, 64).to(torch.bfloat16), torch.tensor([1, 40, 47])
    with torch.inference_mode():
        part, packed_part = linear_part(linear, ids), linear_part(PackedLinear(linear), ids)
        assert part is not None
        assert packed_part is not None
        assert torch.equal(part(hidden), torch.nn.functional.linear(hidden, linear.weight[ids],
                                                                    linear.bias[ids] if bias else None))  # fmt: skip
        torch.testing.assert_close(packed_part(hidden), part(hidden), atol=2e-2, rtol=1e-2)
    assert linear_part(torch.nn.Identity(), ids) is None


async def test_rows_of_one_forward_are_read_over_different_parts() -> None:
    model, plain = twins(config(), seed=4, block_size=4)
    other = SubVocabulary(torch.tensor([2, 50]))
    wants = [
        ReadSpec(draw=NoiseKind.DRAFT, probs=True, logits=True, among=among) for among in (SOME, None, other, SOME)
    ]
    seqs = [Sequence([5, 6, 7 + place], SamplingParams(temperature=0.7), place) for place in range(4)]
    for seq, want in zip(seqs, wants, strict=True):
        [row] = await model.extend(seq, want=want)
        logits = plain.logits(seq.tokens)[-1]
        ids = torch.arange(VOCAB) if want.among is None else want.among.ids
        expected = torch.zeros(VOCAB)
        expected[ids] = logits[ids].div(0.7).softmax(-1)
        assert row.probs is not None
        torch.testing.assert_close(row.probs, expected, atol=1e-5, rtol=1e-4)
        assert row.token in ids
    normed = torch.randn(4, HIDDEN)
    runner = model.batcher.runner
    with torch.inference_mode():
        together = runner._logits(normed, wants)
        for place, want in enumerate(wants):
            torch.testing.assert_close(together[place], runner.plan.logits(normed[place : place + 1], want.among)[0])
    for seq in seqs:
        model.release(seq)
    await model.close()


@pytest.mark.parametrize("keep", [4, 20, 60])
async def test_a_trimmed_draft_multiplies_by_the_kept_rows_alone(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost falls with what is kept (seed 189's point): the whole head is not used, the other has so many rows."""
    model = model_of("auto")
    stack, columns, whole = model.batcher.runner.plan.stack, [], []
    head_of, logits = stack.head_of, stack.logits

    def counted(ids: torch.Tensor) -> Any:
        head = head_of(ids)
        assert head is not None

        def multiply(normed: torch.Tensor) -> torch.Tensor:
            columns.append(len(ids) * len(normed))
            return head(normed)

        return multiply

    monkeypatch.setattr(stack, "head_of", counted)
    monkeypatch.setattr(stack, "logits", lambda normed: (whole.append(len(normed)), logits(normed))[1])
    drafter = VocabTrimDrafter(VocabTrimParams(keep=keep), Candidates.DRAWN)
    seq = Sequence([5, 6, 7], SamplingParams(), 3, (99,))
    tree = await drafter.propose(model, seq, DraftBudget(6, 6), FixedLength(FixedParams(most=6)))
    assert len(tree) == 6
    assert (columns, whole) == ([keep + 1] * 6, [])
    model.release(seq)
    await model.close()


async def test_drafts_are_free_of_what_an_answer_must_fit(pool: Any) -> None:
    """Where nothing that is kept fits the structure, there must still be something to draft."""
    options = {"temperature": 0.0, "max_tokens": 24, "structure": Structure(kind="regex", value="(yes|no)+")}
    plain = await ask(pool, [72, 101], "plain", **options)
    params = {"drafter": {"name": "vocab_trim", "keep": 3}}
    assert (await ask(pool, [72, 101], "speculative", params, **options)).ids == plain.ids


def test_heads_take_no_more_memory_than_the_whole_one() -> None:
    made: list[int] = []
    heads = Heads(lambda ids: made.append(len(ids)) or (lambda normed: normed), 10)  # type: ignore[func-returns-value]
    parts = [SubVocabulary(torch.arange(size)) for size in (4, 6, 3, 20)]
    for part in [parts[0], parts[1], parts[0], parts[2], parts[0], parts[1], parts[3], parts[3]]:
        heads.of(part)
    # 6 left for the 3, as the 4 was used since; it came back, and the one that is too large stands alone.
    assert made == [4, 6, 3, 6, 20]
    assert len(heads._made) == 1


def test_wants_together_are_over_all_ids_unless_both_are_over_the_same() -> None:
    want = ReadSpec(draw=None, among=SOME)
    assert (want | want).among is SOME
    assert (want | ReadSpec()).among is None
    assert (want | replace(want, among=SubVocabulary(IDS))).among is None
