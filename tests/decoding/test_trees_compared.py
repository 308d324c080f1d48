"""Drawn trees against chains, sequences and shapes fixed beforehand, where the papers say that they are ahead."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel

VOCAB = 12


async def tokens_per_round(run: Any, models: tuple[TableModel, TableModel], arm: dict[str, Any], **each: Any) -> float:
    """Over some answers of one length."""
    done = [await run("speculative", *models, arm, seed=seed, **each) for seed in range(4)]
    meters = [answer.seq.meter.speculation for answer in done]
    return sum(len(answer.ids) for answer in done) / sum(meter.rounds for meter in meters)


RSD = {
    "rsd_c": {"drafter": {"name": "rsd_c", "branching": [3, 1, 1]}, "verifier": "rejection"},
    "rsd_s": {"drafter": {"name": "rsd_s", "beam": 3}, "verifier": "rejection"},
}
CHAIN = {"drafter": "model_chain", "verifier": "rejection"}
# Drawn apart from one another, so that two may be the same: as many nodes for the target at most, as deep.
APART = {"drafter": {"name": "model_sequences", "sequences": 3}, "verifier": "spectr"}


@pytest.mark.exactness
async def test_draws_without_replacement_are_worth_more_the_further_the_draft_is_from_the_target(
    run: Any, make_model: Callable[..., TableModel]
) -> None:
    large, twist = make_model("large", 2), make_model("twist", 1)
    over_chain: dict[str, list[float]] = {name: [] for name in RSD}
    over_apart: dict[str, list[float]] = {name: [] for name in RSD}
    for far in (0.1, 0.6, 2.0):
        small = TableModel("small", lambda t, far=far: large.next_logits(t) + far * twist.next_logits(t), VOCAB)

        async def speed(arm: dict[str, Any], small: TableModel = small) -> float:
            return await tokens_per_round(run, (small, large), {**arm, "draft_length": 3}, max_tokens=250)

        chain, apart = await speed(CHAIN), await speed(APART)
        for name, arm in RSD.items():
            tree = await speed(arm)
            over_chain[name].append(tree / chain)
            over_apart[name].append(tree / apart)
    for name in RSD:
        near, further, far_off = over_chain[name]
        assert 1.0 < near < further < far_off
        assert far_off > 1.12
        near, _, far_off = over_apart[name]
        assert near < 1.04 < far_off


SHARP, FLAT = 0, 1
NODES = 8
SHAPES = [(1,) * 8, (2, 1, 1, 1), (2, 2, 1), (3, 1, 1), (2, 3), (4, 1), (8,)]


def knowing_draft() -> tuple[TableModel, TableModel]:
    """A draft that is right as often as it says, and a target that has no doubt.

    Answers that begin with SHARP are easy for the draft, those that begin with FLAT hard, all along.
    """
    generator, chance = torch.Generator().manual_seed(5), random.Random(5)
    doubt = {SHARP: 4.5, FLAT: 1.0}
    logits = {kind: torch.randn((VOCAB,) * 3, generator=generator) * scale for kind, scale in doubt.items()}
    truths = {
        kind: [[chance.choices(range(VOCAB), weights)[0] for weights in row] for row in table.softmax(-1).tolist()]
        for kind, table in logits.items()
    }
    sure = 50.0 * torch.eye(VOCAB)
    small = TableModel("small", lambda t: logits[t[0]][t[-2], t[-1]], VOCAB)
    large = TableModel("large", lambda t: sure[truths[t[0]][t[-2]][t[-1]]], VOCAB)
    return small, large


@pytest.mark.exactness
async def test_a_grown_tree_beats_every_fixed_shape_of_its_size_and_most_on_mixed_prompts(run: Any) -> None:
    small, large = knowing_draft()
    prompts = [(kind, a, b) for kind in (SHARP, FLAT) for a in range(6) for b in (1, 7)]

    async def speeds(drafter: dict[str, Any]) -> dict[str, float]:
        """Tokens a round, of either kind of prompt and of all."""
        params = {"drafter": drafter, "verifier": "rejection", "nodes": NODES}
        rounds = {SHARP: 0, FLAT: 0}
        for prompt in prompts:
            done = await run("speculative", small, large, params, prompt=prompt, max_tokens=40)
            rounds[prompt[0]] += done.seq.meter.speculation.rounds
        each, both = 40 * len(prompts) / 2, sum(rounds.values())
        return {"sharp": each / rounds[SHARP], "flat": each / rounds[FLAT], "mixed": 2 * each / both}

    grown = await speeds({"name": "dyspec", "threshold": 0.0})
    fixed = [await speeds({"name": "rsd_c", "branching": shape}) for shape in SHAPES]
    ahead = {kind: grown[kind] / max(shape[kind] for shape in fixed) for kind in grown}
    assert min(ahead.values()) > 1.03
    assert ahead["mixed"] == max(ahead.values())
    assert ahead["mixed"] > 1.12
