"""The near-best verifier: what stays, how it becomes the match verifier, and what a longest block is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from decoding.fakes import TableModel
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.near_best import NearBestParams, NearBestVerifier
from turnout.types import SamplingParams, TokenKind


def near(**params: Any) -> NearBestVerifier:
    return NearBestVerifier(NearBestParams(**params))


def row(*probs: float, token: int = 0) -> Readout:
    """A reading whose tokens 0, 1, 2, ... fall in probability; the target's own choice is `token`."""
    return Readout(token=token, top=tuple((index, math.log(chance)) for index, chance in enumerate(probs)))


@pytest.mark.parametrize(
    ("params", "stays"),
    [
        ({"candidates": 1}, [0]),
        ({"candidates": 2, "tolerance": 1.0}, [0, 1]),
        ({"candidates": 3, "tolerance": 1.0}, [0, 1]),
        ({"candidates": 3, "tolerance": 2.0}, [0, 1, 2]),
        ({"candidates": 3, "tolerance": 0.0}, [0]),
    ],
)
def test_tokens_stay_by_rank_and_distance(params: dict[str, Any], stays: list[int]) -> None:
    reading = row(0.5, 0.25, 0.1, 0.09)  # 0.69, 1.61 and 1.71 nats below the best
    assert [token for token in range(4) if near(**params).stays(token, reading)] == stays


def test_the_targets_own_choice_always_stays() -> None:
    assert near(candidates=2).stays(3, row(0.5, 0.25, 0.1, 0.09, token=3))
    assert near(candidates=1).stays(3, row(0.5, 0.25, 0.1, 0.09, token=3))
    assert not near(candidates=1).stays(0, row(0.5, 0.25, 0.1, 0.09, token=3))


def judged(verifier: NearBestVerifier, tree: DraftTree, rows: list[Readout]) -> tuple[tuple[int, ...], list[int]]:
    verdict = verifier.judge(Sequence([0], SamplingParams(), 0), tree, rows, "large")
    return verdict.path, [token.id for token in verdict.tokens]


def test_the_longest_path_stays_and_of_several_the_likeliest() -> None:
    reading = row(0.5, 0.4, 0.05, 0.05)
    tree = DraftTree((1, 0, 2, 0, 1), (-1, -1, 0, 0, 1), "small")
    # Paths 1 0 and 0 1 are as long; 0.4 * 0.5 and 0.5 * 0.4 are equal, so the first stays; 1 2 is refused.
    assert judged(near(candidates=2), tree, [reading] * 6) == ((0, 3), [1, 0, 0])
    assert judged(near(candidates=1), tree, [reading] * 6) == ((1,), [0, 0])
    tree = DraftTree((1, 0), (-1, -1), "small")
    assert judged(near(candidates=2), tree, [reading] * 3) == ((1,), [0, 0])


def test_so_many_tokens_are_emitted_whatever_the_target_says() -> None:
    chain, reading = DraftTree.chain([3, 3, 3, 3], "small"), row(0.7, 0.1, 0.1, 0.1)
    for least in (1, 2, 4, 9):
        path, tokens = judged(near(least=least), chain, [reading] * 5)
        assert len(tokens) == min(least, 5)
        assert tokens == [3] * len(path) + [0]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3, "presence_penalty": 1.0}]
)
async def test_one_candidate_is_the_match_verifier(run: Any, make_model: Any, sampling: dict[str, Any]) -> None:
    models = make_model("small", 1), make_model("large", 2)
    for seed in range(5):
        results = [
            await run("speculative", *models, {"verifier": verifier, "drafter": "model_tree"}, seed=seed, **sampling)
            for verifier in ("match", {"name": "near_best", "candidates": 1})
        ]
        assert results[0].ids == results[1].ids
        assert [len(s.tokens) for s in results[0].segments] == [len(s.tokens) for s in results[1].segments]


def related(make_model: Any) -> tuple[TableModel, TableModel]:
    """A small model that often agrees with the large one."""
    large, twist = make_model("large", 2), make_model("twist", 1)
    return TableModel("small", lambda t: large.next_logits(t) + 0.5 * twist.next_logits(t), 12), large


async def test_blocks_grow_with_the_candidates_and_are_constant_at_the_full_length(run: Any, make_model: Any) -> None:
    models = related(make_model)
    means = []
    for params in ({"candidates": 1}, {"candidates": 2}, {"candidates": 4}, {"candidates": 12, "tolerance": 1000.0}):
        made = [
            await run(
                "speculative", *models, {"verifier": {"name": "near_best", **params}}, prompt=(seed, 2), temperature=0
            )
            for seed in range(10)
        ]
        means.append(sum(done.seq.meter.speculation.tokens_per_round for done in made) / 10)
    assert 1.0 <= means[0] < means[1] < means[2] < means[3]
    params = {"verifier": {"name": "near_best", "candidates": 1, "least": 5}, "draft_length": 4}
    done = await run("speculative", *models, params, temperature=0, max_tokens=25)
    assert [len(segment.tokens) for segment in done.segments] == [5] * 5


async def test_log_probabilities_are_the_targets_and_the_law_is_said_to_be_another(run: Any, make_model: Any) -> None:
    models = related(make_model)
    done = await run("speculative", *models, {"verifier": "near_best"}, logprobs=1, temperature=0, max_tokens=40)
    context, other = [1, 2], 0
    for token in done.seq.generated:
        logp = models[1].next_logits(context).log_softmax(-1)
        assert token.logprob == pytest.approx(float(logp[token.id]), abs=1e-5)
        assert len(token.top) == 1
        other += token.kind is TokenKind.ACCEPTED and token.id != int(logp.argmax())
        context.append(token.id)
    assert other > 0
    assert not NearBestVerifier.lossless
