"""Hidden states for processors on the engine: what a plain Hugging Face model's states say, however they come about."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from decoding.logits import choice_scores
from decoding.model import ReadSpec, StopCondition
from decoding.noise import Purpose, gumbel, noise_key
from decoding.partial_forward import LayerSelection, Sketch
from decoding.processor_chain import chain_of
from decoding.processors.base import Batch
from decoding.processors.fsd_vector import FsdVector
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.step_states import LAST, StepStates
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.model import EngineModel
from tests.engine.architectures import config_of
from tests.engine.harness import Reference, twins
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams, Token

FOCUS = {"name": "dynamic_focus", "sigma": 0.05, "mask": 0.02}
NORMED = {**FOCUS, "normed": True, "layers": [1]}
VECTOR = {"name": "fsd_vector", "k": 20, "n": 3}
SMALL = {"block_size": 4, "token_budget": 7}
PARENTS = [ROOT, 0, 0, 1, 2, 2, 4, ROOT, 7, 6]
DRAFTED = [5, 9, 7, 5, 9, 3, 5, 9, 5, 7]
PROBS = ReadSpec(draw=None, probs=True)


def sequence(processor: dict[str, Any], prompt: list[int], seed: int = 0, max_tokens: int = 10) -> Sequence:
    temperature = 0.0 if processor["name"] == "fsd_vector" else 1.0
    chosen = (PartChoice.model_validate(processor),)
    return Sequence(prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, processors=chosen), seed)


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.inference_mode()
def expected(plain: Reference, seq: Sequence) -> list[int]:
    """The answer, token by token from whole forwards of the plain model."""
    model, twin = plain.model, Sequence(seq.tokens[: seq.num_prompt_tokens], seq.sampling, seq.seed)
    count = len(model.model.layers)

    def head(states: torch.Tensor, normed: bool) -> torch.Tensor:
        logits: torch.Tensor = model.lm_head(model.model.norm(states) if normed else states).float()
        return logits

    while not twin.finished:
        out = model(torch.tensor([twin.tokens]), use_cache=False, output_hidden_states=True)
        states = [each[0] for each in out.hidden_states]
        rows = {**{layer: states[layer][-1:] for layer in range(1, count)}, LAST: states[-1][-1:]}
        chain_of(twin).past.put("", LAST, 0, states[-1])
        seen = StepStates("", count, rows, head)
        scores = choice_scores(out.logits[0, -1:].float(), [RowContext(twin)], seen)
        if not twin.sampling.greedy:
            scores = scores + gumbel([noise_key(twin.seed, len(twin), Purpose.SAMPLE)], scores.shape[1], scores.device)
        twin.append(Token(int(scores.argmax()), "m"))
    return twin.tokens


async def write(model: EngineModel, seq: Sequence) -> Sequence:
    await model.decode(seq)
    model.release(seq)
    return seq


@pytest.mark.parametrize("kernels", ["auto", "plain"])
async def test_rows_read_what_the_plain_model_says(kernels: Any) -> None:
    model, plain = twins(config_of("llama"), seed=3, kernels=kernels, **SMALL)
    asked = [FOCUS, VECTOR, NORMED, {"name": "top_k", "k": 5}, VECTOR]
    seqs = [sequence(each, prompt_of(9 + 4 * place), place) for place, each in enumerate(asked)]
    await asyncio.gather(*(write(model, seq) for seq in seqs))
    for seq in seqs:
        assert seq.tokens == expected(plain, seq)
    bare = [sequence({"name": "top_k", "k": 97}, seq.tokens[: seq.num_prompt_tokens], seq.seed) for seq in seqs]
    for seq in (bare[0], bare[2]):
        await write(model, seq)
    assert seqs[0].tokens != bare[0].tokens != bare[2].tokens


async def test_states_of_cached_prompts_forks_and_preempted_answers_are_computed_again() -> None:
    model, plain = twins(config_of("llama"), seed=4, **SMALL)
    prompt = prompt_of(16)
    first = await write(model, sequence(VECTOR, prompt))
    again = await write(model, sequence(VECTOR, prompt))  # its blocks are in the cache, its states are not
    assert first.tokens == again.tokens == expected(plain, first)
    seq = sequence(VECTOR, prompt, max_tokens=6)
    other = sequence(VECTOR, prompt, max_tokens=10)
    await model.decode(seq)
    for token in seq.generated:
        other.append(token)
    twin = model.fork(other)
    model.release(seq)
    await write(model, other)
    assert (await write(model, twin)).tokens == other.tokens == first.tokens
    crowd = [sequence(VECTOR, prompt_of(12 + place), place, max_tokens=14) for place in range(3)]
    await asyncio.gather(*(model.decode(each, StopCondition(max_tokens=5)) for each in crowd))
    for each in crowd[::2]:
        model.batcher.tables[each].drop()  # preempted: all of its cache is gone
    await asyncio.gather(*(write(model, each) for each in crowd))
    for each in crowd:
        assert each.tokens == expected(plain, each)
    assert model.pool.num_held == 0


async def test_a_fork_of_a_cached_answer_and_a_chain_made_anew_go_on_with_the_states_of_all_tokens() -> None:
    model, plain = twins(config_of("llama"), seed=4, **SMALL)
    first = sequence(VECTOR, prompt_of(16))
    await model.decode(first, StopCondition(max_tokens=5))
    digest = model.pool.model
    twin = model.fork(first)
    known = chain_of(first).past.known(digest, LAST)
    assert known == chain_of(twin).past.known(digest, LAST) == len(twin) - 1
    anew = model.fork(first)
    anew.chain = None  # as in a replica that was written anew; its cache stays
    for each in (first, twin, anew):
        await write(model, each)
        assert each.tokens == expected(plain, each)
        assert chain_of(each).past.known(digest, LAST) == 0  # given back with the cache
    assert len(first) == 26


@pytest.mark.parametrize(("processor", "cached"), [(VECTOR, 0), ({"name": "top_k", "k": 5}, 12)])
async def test_prompt_tokens_that_are_computed_for_their_states_do_not_count_as_cached(
    processor: dict[str, Any], cached: int
) -> None:
    model, _ = twins(config_of("llama"), seed=4, **SMALL)
    await write(model, sequence(processor, prompt_of(16)))
    again = sequence(processor, prompt_of(16))
    await model.decode(again)
    assert model.batcher.tables[again].cached_on_arrival == cached
    model.release(again)


async def test_hypothetical_tokens_are_part_of_the_text() -> None:
    model, plain = twins(config_of("llama"), seed=5, **SMALL)
    seq = sequence(VECTOR, prompt_of(15))
    answer = expected(plain, seq)
    hypothetical = tuple(answer[15:21])
    rows = await model.extend(seq, hypothetical, every=True)
    assert [row.token for row in rows] == answer[15:22]
    model.release(seq)
    seq = sequence(VECTOR, prompt_of(15))
    [row] = await model.extend(seq, hypothetical)
    assert row.token == answer[21]
    model.release(seq)


@pytest.mark.parametrize("parents", [(ROOT, 0, 1, 2, 3), (ROOT, ROOT, 1, 2, 1)])
async def test_states_of_accepted_tokens_are_kept(parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = twins(config_of("llama"), seed=5, **SMALL)
    seq = sequence(VECTOR, prompt_of(15))
    answer = expected(plain, seq)
    wrong = (answer[18] + 1) % 97
    drafted = [*answer[15:18], wrong, answer[19]]
    if parents[1] == ROOT:  # a tree: the right path is its second branch
        drafted = [wrong, *answer[15:18], wrong]
    tree = DraftTree(tuple(drafted), parents, "m")
    verdict = await model.verify(seq, tree, MatchVerifier(), ReadSpec())
    assert [token.id for token in verdict.tokens] == answer[15:19]
    for token in verdict.tokens:
        seq.append(token)
    fed: list[int] = []
    run = model.batcher.runner._run_all

    def counted(feeds: Any) -> Any:
        fed.extend(len(feed.tokens) for feed in feeds)
        return run(feeds)

    monkeypatch.setattr(model.batcher.runner, "_run_all", counted)
    assert (await write(model, seq)).tokens == answer
    assert fed == [1] * 6  # the token after the accepted ones, and then each of the others


async def one_by_one(model: EngineModel, seq: Sequence, path: tuple[int, ...]) -> torch.Tensor:
    """The distribution after a path that was written."""
    twin = Sequence([*seq.tokens, *path], seq.sampling, seq.seed)
    [row] = await model.extend(twin, want=PROBS)
    model.release(twin)
    assert row.probs is not None
    return row.probs


@pytest.mark.parametrize("processor", [FOCUS, VECTOR])
async def test_nodes_of_a_tree_read_what_written_rows_read(
    processor: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = twins(config_of("llama"), seed=6, **SMALL)
    seen: dict[tuple[int, ...], list[torch.Tensor]] = {}
    similarity = FsdVector.similarity

    def noted(part: FsdVector, batch: Batch, row: int, tokens: list[int]) -> torch.Tensor:
        weights = similarity(part, batch, row, tokens)
        seen.setdefault(tuple(batch.contexts[row].tokens), []).append(weights)
        return weights

    monkeypatch.setattr(FsdVector, "similarity", noted)
    seq = sequence(processor, [5, 9, 7, 3] * 3 + [5, 9])
    tree = DraftTree(tuple(DRAFTED), tuple(PARENTS), "m")
    verdict = await model.verify(seq, tree, MatchVerifier(), PROBS)
    assert verdict.rows is not None
    for node, row in enumerate(verdict.rows, -1):
        path = tuple(tree.tokens[each] for each in tree.path(node)) if node >= 0 else ()
        alone = await one_by_one(model, seq, path)
        assert row.probs is not None
        assert torch.allclose(row.probs, alone, atol=1e-5)
        if processor is VECTOR:
            drafted, written = seen[(*seq.tokens, *path)]
            assert torch.allclose(drafted, written, atol=1e-4)
            assert float(written.max()) > 0.1
    model.release(seq)


async def test_a_draft_that_ran_through_some_layers_is_judged_by_all() -> None:
    model, _ = twins(config_of("llama"), seed=6, **SMALL)
    seq = sequence({**FOCUS, "layers": [1]}, prompt_of(9))
    drafted = (5, 9, 7)
    await model.extend(seq, want=PROBS)
    sketch = Sketch.chain(len(seq) - 1, (seq.tokens[-1], *drafted), 0, LayerSelection(last=2))
    await model.partial_forward(seq, sketch, ReadSpec(draw=None, logits=True))
    verdict = await model.verify(seq, DraftTree.chain(list(drafted), "m"), MatchVerifier(), PROBS)
    assert verdict.rows is not None
    for place, row in enumerate(verdict.rows):
        assert row.probs is not None
        assert torch.allclose(row.probs, await one_by_one(model, seq, drafted[:place]), atol=1e-5)
    model.release(seq)
