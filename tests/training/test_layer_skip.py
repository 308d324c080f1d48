"""Training to be left early: which layers are left out how often, what each exit weighs, and that exits do learn."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
from scipy import stats
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from training.checkpoint import Checkpoint, Progress
from training.data.mixture import TrainingStream
from training.export_demo import DEMO_FOLDER, TRAINING_FACTS, export
from training.layer_skip import LayerSkip
from training.model import batch_loss, build_model, exit_losses, layer_states
from training.model_card import write_card
from training.optimiser import PairedOptimiser
from training.packing import IGNORED, Document, pack
from training.recipe import RECIPES, Recipe, Shares
from training.train_demo import Trainer

LAYERS = 4
TINY = Recipe(
    name="tiny",
    hidden_size=32,
    num_layers=LAYERS,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=48,
    total_steps=60,
    decay_steps=10,
    warmup_steps=2,
    num_rows=4,
    row_len=128,
    autocast=False,
    shares=Shares(python=0.0),
)
SKIPPING = replace(TINY, layer_skip=LayerSkip(dropout=0.2, scale=1.0, every=2))
# Three documents in two rows.
BATCH = pack(
    [[Document([5, 6, 7], [True] * 3), Document([8, 9], [True] * 2)], [Document([3, 4, 5, 6], [True] * 4)]], 6, 0
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(DEMO_FOLDER / "large")
    return loaded


def make_trainer(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Trainer:
    return Trainer(recipe, tokenizer, TrainingStream(recipe, tokenizer))


def test_rates_rise_exponentially_from_none_to_the_last_layers() -> None:
    # 2^(l / 2) - 1 for l = 0, 1, 2.
    assert LayerSkip(dropout=0.4).rates(3) == pytest.approx([0.0, 0.4 * 0.41421356, 0.4])
    rates = LayerSkip(dropout=0.1).rates(8)
    assert [rates[0], rates[-1]] == pytest.approx([0.0, 0.1])
    grown = [(after + 0.1) / (before + 0.1) for before, after in pairwise(rates)]
    assert grown == pytest.approx([2 ** (1 / 7)] * 7)


def test_each_layer_is_left_out_at_its_rate_for_every_row_by_itself() -> None:
    skip, runs, rows = LayerSkip(dropout=0.4), 5_000, 3
    draws = torch.tensor([skip.kept(LAYERS, rows, f"20-layers-{step}") for step in range(runs)])
    for layer, rate in enumerate(skip.rates(LAYERS)):
        left_out = int((~draws[:, layer]).sum())
        assert (left_out == 0) if layer == 0 else stats.binomtest(left_out, runs * rows, rate).pvalue > 1e-3
    # Rows and layers are left out independently of each other.
    assert stats.chi2_contingency(_table(draws[:, 3, 0], draws[:, 3, 1])).pvalue > 1e-3
    assert stats.chi2_contingency(_table(draws[:, 2, 0], draws[:, 3, 0])).pvalue > 1e-3


def _table(one: torch.Tensor, other: torch.Tensor) -> list[list[int]]:
    return [[int(((one == a) & (other == b)).sum()) for b in (True, False)] for a in (True, False)]


def test_the_same_draw_is_the_same_whatever_was_drawn_before() -> None:
    skip = LayerSkip(dropout=0.9)
    first = skip.kept(8, 16, "20-layers-7")
    assert skip.kept(8, 16, "20-layers-8") != first
    assert skip.kept(8, 16, "20-layers-7") == first


def test_weights_by_hand() -> None:
    """Of five layers, two apart: e(1), e(2), e(3) are 0.5, 1.5 and 3, e(4) is 4 + 3."""
    skip = LayerSkip(scale=0.5, every=2)
    assert skip.weights(5, step=0) == pytest.approx({3: 1.5 / 8.5, 5: 7 / 8.5})
    assert skip.weights(5, step=1) == pytest.approx({2: 0.5 / 10.5, 4: 3 / 10.5, 5: 7 / 10.5})
    assert skip.weights(5, step=12) == skip.weights(5, step=0)
    assert LayerSkip(scale=0.5, every=1).weights(5, step=3) == pytest.approx(
        {2: 0.5 / 12, 3: 1.5 / 12, 4: 3 / 12, 5: 7 / 12}
    )


def test_every_layer_but_the_first_has_its_turn() -> None:
    shipped = RECIPES["large-exits"]
    assert shipped.layer_skip is not None
    turns = [shipped.layer_skip.weights(shipped.num_layers, step) for step in range(shipped.layer_skip.every)]
    assert all(sum(weights.values()) == pytest.approx(1.0) for weights in turns)
    assert sorted(layer for weights in turns for layer in weights if layer < 8) == list(range(2, 8))
    # The last layer keeps most of every step's loss; on average a step has one and a half exits beside it.
    assert min(weights[8] for weights in turns) > 0.6


def test_a_layer_leaves_rows_that_skip_it_as_they_are() -> None:
    model = build_model(TINY, pad_id=0, end_id=1)
    whole = torch.ones(LAYERS, 2, dtype=torch.bool)
    kept = whole.clone()
    kept[2, 1] = False
    run = (model.model, BATCH.token_ids, BATCH.position_ids, BATCH.attention_mask())
    behind, all_run = layer_states(*run, kept), layer_states(*run, whole)
    assert torch.equal(behind[2][1], behind[1][1])
    assert not torch.equal(behind[3][1], behind[2][1])
    for some, every in zip(behind, all_run, strict=True):
        torch.testing.assert_close(some[0], every[0], rtol=1e-5, atol=1e-6)
    kept[2] = False
    torch.stack(layer_states(*run, kept)).sum().backward()  # type: ignore[no-untyped-call]
    learned = [sum(float(each.grad.abs().sum()) for each in layer.parameters()) > 0 for layer in model.model.layers]
    assert learned == [True, True, False, True]


def reference_losses(model: LlamaForCausalLM) -> dict[int, torch.Tensor]:
    """By the model's own forward, left behind each layer."""
    told = model(
        input_ids=BATCH.token_ids,
        position_ids=BATCH.position_ids,
        attention_mask=BATCH.attention_mask(),
        use_cache=False,
        output_hidden_states=True,
    )
    taught = BATCH.targets != IGNORED
    logits = {layer: model.lm_head(model.model.norm(told.hidden_states[layer])) for layer in range(1, LAYERS)}
    logits[LAYERS] = told.logits
    return {layer: F.cross_entropy(each[taught], BATCH.targets[taught]) for layer, each in logits.items()}


def test_an_exits_loss_is_that_of_the_norm_and_the_head_on_its_states() -> None:
    model = build_model(TINY, pad_id=0, end_id=1)
    losses = exit_losses(model, BATCH, False, range(1, LAYERS + 1))
    assert list(losses) == [1, 2, 3, 4]
    for layer, expected in reference_losses(model).items():
        torch.testing.assert_close(losses[layer], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses[LAYERS], batch_loss(model, BATCH, False), rtol=1e-5, atol=1e-6)


class Repeated:
    """A stream of one batch."""

    def batch(self, step: int) -> object:
        return BATCH


@pytest.mark.parametrize("step", [0, 1])
def test_a_steps_loss_is_the_weighted_sum_of_its_exits(tokenizer: PreTrainedTokenizerFast, step: int) -> None:
    recipe = replace(TINY, layer_skip=LayerSkip(dropout=0.0, scale=1.0, every=2))
    trainer = Trainer(recipe, tokenizer, Repeated())  # type: ignore[arg-type]
    trainer.progress.step = step
    # Of four layers e(1), e(2), e(3) are 1, 3 and 3 + 3; steps take turns with layer 3 and with layer 2.
    weights = ({3: 3 / 9, 4: 6 / 9}, {2: 1 / 7, 4: 6 / 7})[step]
    expected = {layer: float(loss.detach()) for layer, loss in reference_losses(trainer.model).items()}
    assert trainer.step() == pytest.approx(sum(weights[layer] * expected[layer] for layer in weights), rel=1e-5)


def test_without_it_a_run_is_what_it_was_bit_for_bit(tokenizer: PreTrainedTokenizerFast) -> None:
    trainer = make_trainer(tokenizer, TINY)
    stream = TrainingStream(TINY, tokenizer)
    model = build_model(TINY, int(tokenizer.pad_token_id), int(tokenizer.eos_token_id))
    optimiser = PairedOptimiser(model, TINY)
    for step in range(3):
        loss = batch_loss(model, stream.batch(step), autocast=False)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step(TINY.lr_scale(step))
        assert trainer.step() == float(loss.detach())
    for (name, expected), actual in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(expected, actual), name


def test_exits_learn_and_the_last_layer_does_not_suffer_much(tokenizer: PreTrainedTokenizerFast) -> None:
    def trained(recipe: Recipe) -> Mapping[str, float]:
        trainer = make_trainer(tokenizer, replace(recipe, hidden_size=48, total_steps=110))
        for _ in range(110):
            trainer.step()
        return trainer.exits()

    plain, skipping = trained(TINY), trained(SKIPPING)
    assert skipping["loss_behind_2"] < 0.9 * plain["loss_behind_2"]
    assert skipping["loss_behind_3"] < 0.97 * plain["loss_behind_3"]
    assert skipping["loss_behind_4"] < 1.1 * plain["loss_behind_4"]


def test_its_course_is_the_large_models_own_but_for_that() -> None:
    assert replace(RECIPES["large-exits"], name="large", layer_skip=None) == RECIPES["large"]
    assert all(recipe.layer_skip is None for name, recipe in RECIPES.items() if name != "large-exits")


@pytest.mark.parametrize(
    ("settings", "name"), [({"dropout": 1.0}, "dropout"), ({"scale": 0.0}, "scale"), ({"every": 0}, "every")]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LayerSkip(**settings)  # type: ignore[arg-type]


def test_a_model_of_two_layers_has_no_early_exit() -> None:
    with pytest.raises(ValueError, match="num_layers of at least 3"):
        replace(SKIPPING, num_layers=2)


def test_it_can_be_shipped_as_the_large_model(tmp_path: Path) -> None:
    runs, demo = tmp_path / "runs", tmp_path / "demo"
    shutil.copytree(DEMO_FOLDER / "large", runs / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    for name, step in (("large", 3), ("large-exits", 5), ("small", 7)):
        weights = build_model(RECIPES[name], 0, 1).state_dict()
        Checkpoint(weights, [], Progress(step=step)).save(runs / name / "checkpoint.pt")
    export(runs, demo, "large-exits")
    facts = json.loads((demo / TRAINING_FACTS).read_text())
    assert [facts[name]["num_steps"] for name in ("small", "large")] == [7, 5]
    assert facts["large"]["recipe"]["layer_skip"] == {"dropout": 0.1, "scale": 0.2, "every": 4}
    assert (demo / "large" / "model.safetensors").exists()
    shutil.copy(DEMO_FOLDER / "evaluation.json", demo)
    assert "--model large-exits" in write_card(demo)
    assert "last layer out for 10% of the rows" in write_card(demo)
    export(runs, demo, "large")
    assert json.loads((demo / TRAINING_FACTS).read_text())["large"]["num_steps"] == 3
    assert "left early" not in write_card(demo)
    with pytest.raises(typer.BadParameter, match="large-exits"):
        export(runs, demo, "small")
