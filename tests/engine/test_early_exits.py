"""Early exits: the text of plain decoding, an intact cache, no layer run twice, heads that see every place once."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifacts
from decoding.drafters._exits import ExitDrafter
from decoding.drafters.base import PACKAGE
from decoding.drafters.kangaroo import KangarooDrafter, KangarooParams
from decoding.exit_choice import ExitChoice
from decoding.exit_heads import ExitCache, ExitHead
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import ModelPool, ReadSpec, Request
from decoding.partial_drafts import exit_states
from decoding.partial_forward import WHOLE, LayerSelection
from decoding.selectors.first import PART as First
from decoding.sequence import Sequence
from decoding.speculation import Arm, Speculation
from decoding.verifiers.match import MatchVerifier
from engine.model import EngineModel
from engine.runner import Feed
from tests.decoding.head_models import save_head
from tests.engine.harness import Reference, engine_model, twins
from training.random_models import llama_config, random_model
from turnout.registry import get_method, load
from turnout.types import SamplingParams

LAYERS, EXIT, WIDTH = 6, 2, 32
TINY = llama_config(60, hidden_size=WIDTH, num_hidden_layers=LAYERS, pad_token_id=0, eos_token_id=1)
DelDrafter = load(PACKAGE, "del", "part").PART
PARTS = ["kangaroo", "eesd", "del"]
PROMPT = [2, 3, 4, 5]


@pytest.fixture
def loaded() -> tuple[EngineModel, Reference]:
    return twins(TINY, seed=4, block_size=4)


def exit_head(inner: int = 0, seed: int = 3, spread: float = 0.3) -> ExitHead:
    torch.manual_seed(seed)
    head = ExitHead(WIDTH, 4, 2, 8, inner)
    for each in (head.attended, *([head.down] if inner else [])):
        torch.nn.init.normal_(each.weight, std=spread)
    return head.requires_grad_(False)


def pool_of(model: EngineModel, folder: Path) -> ModelPool:
    for kind, inner in (("kangaroo", 0), ("eesd", 48)):
        save_head(folder, kind, exit_head(inner), model.digest, exit_layer=EXIT)
    return ModelPool({"m": model}, {"small": "m", "large": "m"}, None, Artifacts(folder))  # type: ignore[arg-type]


def sequence(*tokens: int, **sampling: Any) -> Sequence:
    asked = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **sampling}
    return Sequence(tokens or PROMPT, SamplingParams(**asked), seed=7)


async def write(models: ModelPool, params: dict[str, Any], seq: Sequence, release: bool = True) -> Sequence:
    info = get_method("speculative" if params else "plain")
    async for _ in info.run(Request("r", seq), models, info.parse(params)):
        pass
    if release:
        models.large.release(seq)
    return seq


def fed_rows(model: EngineModel) -> list[tuple[LayerSelection, int]]:
    """Collects (layers, rows) of every feed from now on."""
    seen: list[tuple[LayerSelection, int]] = []
    original = model.batcher.runner.run

    def run(feeds: list[Feed]) -> Any:
        seen.extend((feed.depth, len(feed.tokens)) for feed in feeds)
        return original(feeds)

    model.batcher.runner.run = run  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize("drafter", PARTS)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 1}], ids=str
)
async def test_the_text_is_that_of_plain_decoding(
    loaded: tuple[EngineModel, Reference], tmp_path: Path, drafter: str, sampling: dict[str, Any]
) -> None:
    models = pool_of(loaded[0], tmp_path)
    plain = await write(models, {}, sequence(**sampling))
    drafted = await write(models, {"drafter": drafter, "length": "fixed"}, sequence(**sampling))
    assert drafted.tokens == plain.tokens
    assert drafted.meter.speculation.draft_tokens > 0
    assert drafted.meter.models["m"].spared_tokens > 0
    assert loaded[0].pool.num_held == 0
    await loaded[0].close()


def with_idle_layers(first: int) -> EngineModel:
    """A model whose layers from one on add nothing: what an exit there says is what the model says."""
    model = random_model(deepcopy(TINY), seed=4, spread=0.2)
    for layer in model.model.layers[first:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return engine_model(model, block_size=4)


def hidden_states(plain: Reference, tokens: list[int], layer: int = EXIT) -> torch.Tensor:
    """What the plain model has behind a layer: [len(tokens), width]."""
    with torch.inference_mode():
        made = plain.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    states: torch.Tensor = made.hidden_states[layer][0]
    return states


async def assert_as_computed_anew(model: EngineModel, seq: Sequence) -> None:
    """The cache of a sequence is that of one forward over its tokens, in every layer."""
    table = model.batcher.tables[seq]
    count = len(table)
    assert count >= len(seq) - 1
    fresh = engine_model(random_model(deepcopy(TINY), 4, 0.2), block_size=4)
    again = Sequence(table.tokens, SamplingParams(max_tokens=1), 0)
    await fresh.extend(again)
    slots = fresh.batcher.tables[again].slots(0, count)
    for mine, theirs in zip(model.store.layers, fresh.store.layers, strict=True):
        torch.testing.assert_close(mine[table.slots(0, count)], theirs[slots], atol=1e-4, rtol=0)
    await fresh.close()


def rows_given(drafter: ExitDrafter) -> list[int]:
    """Collects how many states the head is given at once, from now on."""
    calls: list[int] = []
    original = drafter.head.extend

    def extend(states: torch.Tensor, cache: ExitCache) -> torch.Tensor:
        calls.append(len(states))
        return original(states, cache)

    drafter.head.extend = extend  # type: ignore[method-assign]
    return calls


async def rounds(models: ModelPool, drafter: ExitDrafter, seq: Sequence, verifier: Any = None) -> None:
    """Speculation with one drafter, which can be looked at afterwards."""
    drafter.check(models)
    arm = Arm(drafter, FixedLength(FixedParams(most=6)))
    run = Speculation(Request("r", seq), models, [arm], First(), verifier or MatchVerifier())
    async for _ in run.run():
        pass


@pytest.mark.parametrize("drafter", PARTS)
@pytest.mark.parametrize("verifier", ["match", "rejection"])
async def test_the_cache_is_as_computed_anew(
    loaded: tuple[EngineModel, Reference], tmp_path: Path, drafter: str, verifier: str
) -> None:
    model, _ = loaded
    params = {"drafter": drafter, "length": "fixed", "verifier": verifier}
    seq = await write(pool_of(model, tmp_path), params, sequence(temperature=1.0), release=False)
    speculation = seq.meter.speculation
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens
    await assert_as_computed_anew(model, seq)
    await model.close()


@pytest.mark.parametrize("drafter", ["kangaroo", "eesd"])
async def test_no_layer_runs_twice_for_a_token(
    loaded: tuple[EngineModel, Reference], tmp_path: Path, drafter: str
) -> None:
    """Verification runs the layers behind the exit only, on the rows that the draft has left there."""
    model, _ = loaded
    models = pool_of(model, tmp_path)
    seen = fed_rows(model)
    seq = await write(models, {"drafter": drafter, "length": "fixed"}, sequence(max_tokens=30))
    speculation = seq.meter.speculation
    drafting = speculation.rounds - 1
    assert seen[0] == (WHOLE, len(PROMPT))
    assert {depth for depth, _ in seen[1:]} <= {LayerSelection(last=EXIT), LayerSelection(first=EXIT), WHOLE}
    resumed = [rows for depth, rows in seen if depth == LayerSelection(first=EXIT)]
    first = [rows for depth, rows in seen if depth == LayerSelection(last=EXIT)]
    whole = [rows for depth, rows in seen[1:] if depth == WHOLE]
    assert set(first) == {1}
    assert len(first) == sum(resumed) == speculation.draft_tokens + len(resumed)
    # The last token of an answer leaves no room for a draft.
    assert whole in ([], [1])
    assert len(resumed) + len(whole) == drafting
    meter = seq.meter.models["m"]
    layers = len(PROMPT) * LAYERS + len(first) * EXIT + sum(resumed) * (LAYERS - EXIT) + sum(whole) * LAYERS
    assert (meter.processed_tokens - meter.spared_tokens) * LAYERS == pytest.approx(layers)
    await model.close()


async def test_after_a_draft_that_was_accepted_whole_the_head_is_given_two_rows(tmp_path: Path) -> None:
    model = with_idle_layers(EXIT)
    save_head(tmp_path, "kangaroo", ExitHead(WIDTH, 4, 2, 8), model.digest, exit_layer=EXIT)
    models = ModelPool({"m": model}, {"small": "m", "large": "m"}, None, Artifacts(tmp_path))  # type: ignore[arg-type]
    drafter = KangarooDrafter(KangarooParams(threshold=0.0))
    drafter.check(models)
    calls = rows_given(drafter)
    seq = sequence(max_tokens=1 + 3 * 7)
    await rounds(models, drafter, seq)
    assert seq.meter.speculation.tokens_per_round == pytest.approx((1 + 3 * 7) / 4)
    assert calls == [len(PROMPT) + 1, *[1] * 5, 2, *[1] * 5, 2, *[1] * 5]
    await model.close()


@pytest.mark.parametrize("idle", [EXIT, LAYERS], ids=["accepted", "mixed"])
async def test_the_heads_rows_are_those_of_the_text(tmp_path: Path, idle: int) -> None:
    """After every round the head has a row for each place it should, made of the model's own states there."""
    model = with_idle_layers(idle)
    plain = random_model(deepcopy(TINY), seed=4, spread=0.2)
    models = pool_of(model, tmp_path)
    drafter = KangarooDrafter(KangarooParams(threshold=0.0))
    seq = sequence(temperature=1.0)
    await rounds(models, drafter, seq)
    cache = drafter._cache
    assert cache is not None
    assert cache.start == 0
    assert cache.end > len(PROMPT)
    states = hidden_states(Reference(plain), seq.tokens[: cache.end])
    nothing = torch.empty(2, 0, 8)
    expected = drafter.head.cache(0)
    drafter.head.extend(states, expected)
    count = min(cache.end, len(seq) - 8)  # the last round may have been cut
    for mine, theirs in zip(cache.append(nothing, nothing), expected.append(nothing, nothing), strict=True):
        torch.testing.assert_close(mine[:, :count], theirs[:, :count], atol=1e-4, rtol=0)
    await model.close()


class Wandering(ExitChoice):
    """Leaves at every layer in turn, and sometimes not at all."""

    def __init__(self) -> None:
        super().__init__(LAYERS, 0.9)
        self.next = cycle([(4, 2), (1, 4), (5, 1), (1, 0), (2, 3), (3, 4)])

    def best(self, most: int) -> tuple[int, int]:
        layer, depth = next(self.next)
        return layer, min(most, depth)


async def test_exits_that_change_leave_the_cache_as_computed_anew(loaded: tuple[EngineModel, Reference]) -> None:
    model, plain = loaded
    models = ModelPool({"m": model}, {"small": "m", "large": "m"}, None)  # type: ignore[arg-type]
    drafter = DelDrafter(DelDrafter.Params(stops=False))
    seq = sequence(temperature=1.0, max_tokens=60)
    drafter.check(models)
    drafter.check = lambda models: None
    drafter.choice = Wandering()
    seen = fed_rows(model)
    await rounds(models, drafter, seq)
    assert {depth.first for depth, _ in seen} == {0, 1, 2, 3, 4, 5}
    assert seq.meter.speculation.accepted_tokens > 0
    await assert_as_computed_anew(model, seq)
    expected = [int(row.argmax()) for row in plain.logits(seq.tokens)]
    assert len(expected) == len(seq)
    await model.close()


async def test_shadow_tokens_are_what_every_layer_would_have_said(loaded: tuple[EngineModel, Reference]) -> None:
    """Against the plain model's layers, normed and read: over all rounds, whatever layer drafted."""
    model, plain = loaded
    models = ModelPool({"m": model}, {"small": "m", "large": "m"}, None)  # type: ignore[arg-type]
    drafter = DelDrafter(DelDrafter.Params(stops=False))
    drafter.check(models)
    drafter.check = lambda models: None
    drafter.choice = choice = Wandering()
    found: dict[int, list[tuple[bool, float]]] = {layer: [] for layer in range(1, LAYERS)}
    choice.observe = lambda layer, shadows: found[layer].extend(  # type: ignore[method-assign]
        (each.matches, each.confidence) for each in shadows
    )
    seq = sequence(max_tokens=30)
    await rounds(models, drafter, seq)
    with torch.inference_mode():
        made = plain.model(torch.tensor([seq.tokens]), output_hidden_states=True)
        said = {
            layer: plain.model.lm_head(plain.model.model.norm(made.hidden_states[layer][0])).softmax(-1)
            for layer in range(1, LAYERS)
        }
    right = made.logits[0].argmax(-1)
    for layer, shadows in found.items():
        count = len(shadows)  # those of the last rounds are not looked at
        assert count >= 20
        places = slice(len(PROMPT) - 1, len(PROMPT) - 1 + count)
        best = said[layer][places].max(-1)
        assert [matches for matches, _ in shadows] == (best.indices == right[places]).tolist()
        assert [sure for _, sure in shadows] == pytest.approx(best.values.tolist(), abs=1e-4)
    await model.close()


@pytest.mark.parametrize(("threshold", "length"), [(0.0, 6), (1.01, 1)])
async def test_confidence_ends_a_draft(
    loaded: tuple[EngineModel, Reference], tmp_path: Path, threshold: float, length: int
) -> None:
    model, _ = loaded
    params = {"drafter": {"name": "kangaroo", "threshold": threshold}, "length": "fixed"}
    seq = await write(pool_of(model, tmp_path), params, sequence())
    speculation = seq.meter.speculation
    drafts = speculation.drafted_at
    assert len(drafts) == length
    # All drafts but those near the end of the answer are as long as each other.
    assert drafts[-1] >= speculation.rounds - 1 - 6
    await model.close()


@pytest.mark.parametrize("budget", [5, 64])
async def test_states_of_a_prompt_come_with_its_forwards(budget: int) -> None:
    """Whatever the chunks, and only of what the cache lacked; those it had are run for through the first layers."""
    model, plain = twins(TINY, seed=4, block_size=4, token_budget=budget)
    prompt = [2 + (7 * index) % 50 for index in range(23)]
    states = hidden_states(plain, prompt)
    want = ReadSpec(draw=None, before=frozenset({EXIT, LAYERS}), hidden=frozenset({EXIT}))
    first, again = sequence(*prompt), sequence(*prompt)
    [row] = await model.extend(first, want=want)
    torch.testing.assert_close(row.before[EXIT], states[:-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(row.hidden[EXIT], states[-1], atol=1e-4, rtol=0)
    assert set(row.before) == {EXIT, LAYERS}
    [row] = await model.extend(again, want=want)
    torch.testing.assert_close(row.before[EXIT], states[20:22], atol=1e-4, rtol=0)
    for start, stop in ((0, 20), (0, 1), (6, 21)):
        found = await exit_states(model, again, EXIT, start, stop)
        torch.testing.assert_close(found, states[start:stop], atol=1e-4, rtol=0)
    assert again.meter.models["m"].draft_tokens == 20 + 1 + 15
    for seq in (first, again):
        model.release(seq)
    assert model.pool.num_held == 0
    await model.close()


@pytest.mark.parametrize("drafter", ["kangaroo", "eesd"])
async def test_a_prompt_found_in_the_cache_is_drafted_for_as_well(
    loaded: tuple[EngineModel, Reference], tmp_path: Path, drafter: str
) -> None:
    model, _ = loaded
    models = pool_of(model, tmp_path)
    prompt = [2 + (7 * index) % 50 for index in range(23)]
    one, two = [await write(models, {"drafter": drafter, "length": "fixed"}, sequence(*prompt)) for _ in range(2)]
    assert two.meter.models["m"].cached_tokens == 20
    assert two.tokens == one.tokens
    assert two.meter.speculation.drafted_at == one.meter.speculation.drafted_at
    await model.close()


@pytest.mark.parametrize("drafter", ["kangaroo", "eesd", "del"])
@pytest.mark.parametrize("beside", ["swift", "clasp"])
async def test_drafters_that_take_turns_leave_each_other_right(
    loaded: tuple[EngineModel, Reference], tmp_path: Path, drafter: str, beside: str
) -> None:
    """Rounds of others, deeper exits among them, reach the head as states, or are run for."""
    model, _ = loaded
    models = pool_of(model, tmp_path)
    settings = {"swift": {"context": 6}, "clasp": {"interval": 1}}[beside]
    other = {"drafter": {"name": beside, "threshold": 0.0, **settings}, "length": {"name": "fixed", "most": 2}}
    arms = [{"drafter": drafter}, other, {"drafter": "del"}]
    params = {"drafter": arms, "length": "fixed", "select": "exp3"}
    plain = await write(models, {}, sequence(temperature=1.0))
    drafted = await write(models, params, sequence(temperature=1.0))
    assert drafted.tokens == plain.tokens
    assert drafted.meter.speculation.draft_tokens > 0
    assert model.pool.num_held == 0
    await model.close()


async def test_a_forward_that_is_repeated_leaves_no_row_twice(
    loaded: tuple[EngineModel, Reference], tmp_path: Path
) -> None:
    """Two requests whose common forwards fail after they ran draft as they do alone."""
    model, _ = loaded
    models, params = pool_of(model, tmp_path), {"drafter": {"name": "kangaroo", "threshold": 0.0}, "length": "fixed"}
    prompts = [PROMPT, [9, 8, 7]]
    alone = [await write(models, params, sequence(*prompt)) for prompt in prompts]
    original, failed = model.batcher.runner.run, 0

    def run(feeds: list[Feed]) -> Any:
        nonlocal failed
        rows = original(feeds)
        if len(feeds) > 1:
            failed += 1
            raise RuntimeError("planted")
        return rows

    model.batcher.runner.run = run  # type: ignore[method-assign, assignment]
    together = await asyncio.gather(*(write(models, params, sequence(*prompt)) for prompt in prompts))
    assert failed > 10
    assert [seq.tokens for seq in together] == [seq.tokens for seq in alone]
    assert [seq.meter.speculation.accepted_at for seq in together] == [
        seq.meter.speculation.accepted_at for seq in alone
    ]
    await model.close()
