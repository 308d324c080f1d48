"""What the confidence that ends a draft changes in whole answers, and the cache behind drafts accepted whole."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from decoding.artifacts import Artifacts
from decoding.exit_heads import ExitHead
from decoding.model import ModelPool, Request
from decoding.partial_forward import LayerSelection
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.runner import Feed
from tests.decoding.head_models import save_head
from tests.engine.harness import engine_model
from training.random_models import llama_config, random_model
from turnout.registry import get_method
from turnout.types import SamplingParams

LAYERS, EXIT, WIDTH, MOST = 6, 1, 32, 6
PROMPTS = [[2 + (5 * index + place) % 50 for place in range(4)] for index in range(8)]


def model_of(behind: float) -> EngineModel:
    """Of a model whose layers behind the exit add so much of what they would: an untrained head there knows the rest.

    Where nothing is added it says exactly what the model says; where little is, it is right where it is sure.
    """
    config = llama_config(60, hidden_size=WIDTH, num_hidden_layers=LAYERS, pad_token_id=0, eos_token_id=1)
    model = random_model(config, seed=4, spread=0.35)
    model.lm_head.weight.data *= 2.0  # sure at some places, unsure at others
    for layer in model.model.layers[EXIT:]:
        layer.self_attn.o_proj.weight.data *= behind
        layer.mlp.down_proj.weight.data *= behind
    return engine_model(model, block_size=4, max_batch=16)


@dataclass
class Spent:
    """Some answers, and what they took.

    Attributes:
        sequences: the answers, whose keys and values the model still holds.
        rounds: in all.
        drafted: tokens of a round's draft.
        accepted: share of these that stayed.
        speed: tokens for each time that all layers ran for a sequence.
    """

    sequences: list[Sequence]
    rounds: int
    drafted: float
    accepted: float
    speed: float

    @property
    def texts(self) -> list[list[int]]:
        """All their tokens."""
        return [seq.tokens for seq in self.sequences]


def runs_of_layers(model: EngineModel) -> Counter[LayerSelection]:
    """How often which layers run for a sequence, from now on."""
    counts: Counter[LayerSelection] = Counter()
    original = model.batcher.runner.run

    def run(feeds: list[Feed]) -> object:
        counts.update(feed.depth for feed in feeds)
        return original(feeds)

    model.batcher.runner.run = run  # type: ignore[method-assign, assignment]
    return counts


async def spend(folder: Path, threshold: float, model: EngineModel) -> Spent:
    """Answers that all draft at once and end their drafts below a token of less confidence."""
    save_head(folder, "kangaroo", ExitHead(WIDTH, 4, 2, 8), model.digest, exit_layer=EXIT)
    models = ModelPool({"m": model}, {"small": "m", "large": "m"}, None, Artifacts(folder))  # type: ignore[arg-type]
    info = get_method("speculative")
    drafter = {"name": "kangaroo", "threshold": threshold}
    params = info.parse({"drafter": drafter, "length": {"name": "fixed", "most": MOST}})
    sampling = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    sequences = [Sequence(prompt, sampling, seed) for seed, prompt in enumerate(PROMPTS)]
    counts = runs_of_layers(model)

    async def write(seq: Sequence) -> None:
        async for _ in info.run(Request(f"r{seq.seed}", seq), models, params):
            pass

    await asyncio.gather(*map(write, sequences))
    meters = [seq.meter.speculation for seq in sequences]
    rounds = sum(meter.rounds for meter in meters)
    drafted = sum(meter.draft_tokens for meter in meters)
    work = sum(((depth.last or LAYERS) - depth.first) / LAYERS * count for depth, count in counts.items())
    return Spent(
        sequences=sequences,
        rounds=rounds,
        drafted=drafted / rounds,
        accepted=sum(meter.accepted_tokens for meter in meters) / drafted,
        speed=sum(len(seq.generated) for seq in sequences) / work,
    )


async def test_a_higher_threshold_drafts_less_more_surely_and_the_best_lies_between(tmp_path: Path) -> None:
    """Time is what the layers take, of all of which the exit spares most; the text never changes."""
    thresholds = [0.0, 0.3, 0.5, 0.7, 1.01]
    found = []
    for threshold in thresholds:
        model = model_of(0.15)
        found.append(await spend(tmp_path, threshold, model))
        await model.close()
    assert all(each.texts == found[0].texts for each in found)
    drafted, accepted = [each.drafted for each in found], [each.accepted for each in found]
    assert drafted == sorted(set(drafted), reverse=True)
    assert accepted == sorted(set(accepted))
    assert drafted[0] > 4 * drafted[-1]
    best = max(each.speed for each in found[1:-1])
    assert best > 1.04 * max(found[0].speed, found[-1].speed)


async def test_drafts_that_are_accepted_whole_leave_the_cache_as_computed_anew(tmp_path: Path) -> None:
    """In every layer, at the last drafted token too, which nothing was drafted below."""
    model = model_of(0.0)
    done = await spend(tmp_path, 0.0, model)
    assert done.accepted == 1.0
    fresh = model_of(0.0)
    for seq in done.sequences:
        assert seq.meter.speculation.accepted_at[MOST - 1] >= 4
        table = model.batcher.tables[seq]
        assert len(table) >= len(seq) - 1
        again = Sequence(table.tokens, SamplingParams(max_tokens=1), 0)
        await fresh.extend(again)
        places = fresh.batcher.tables[again].slots(0, len(table))
        for mine, theirs in zip(model.store.layers, fresh.store.layers, strict=True):
            torch.testing.assert_close(mine[table.slots(0, len(table))], theirs[places], atol=1e-4, rtol=0)
    for each in (model, fresh):
        await each.close()
