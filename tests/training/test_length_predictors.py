"""Length predictors: labels from real rounds, heads that learn planted rules, and policies that use them."""

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.fakes import TableModel, markov, pair
from decoding.length_heads import ContinueHead
from decoding.methods.speculative import SpeculativeParams, speculative
from decoding.model import ModelPool, NoiseKind, Readout, ReadSpec, Request
from decoding.sequence import Sequence
from tests.engine.harness import engine_model
from training import length_predictors
from training.calibration import auc, calibration, calibration_error
from training.checkpoint import Checkpoint
from training.fitting import fit
from training.length_data import Examples, Source, mine_acceptance, mine_rounds
from training.length_predictors import (
    STEADY,
    Disco,
    SpecDecPlusPlus,
    split,
    train_disco,
    train_pair,
    train_specdecpp,
    weighted_loss,
)
from training.length_tuning import Costs, Replay, tune
from training.random_models import llama_config, random_model
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

# What mines for a recipe.
MINED = {
    "disco": ("mine_rounds", Disco(depth=4, top=2, epochs=2)),
    "specdecpp": ("mine_acceptance", SpecDecPlusPlus(epochs=2)),
}


def table_pair(seed: int = 0, vocab: int = 12, kind: type[TableModel] = TableModel) -> ModelPool:
    """A target, and a draft that is right about the same contexts it is sure in."""
    random = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab, vocab, generator=random) * 2
    sharp = torch.rand(vocab, 1, generator=random) * 2
    draft = target * sharp + torch.randn(vocab, vocab, generator=random) * 0.5
    tables = {"small": draft, "large": target * sharp}
    return pair(*(kind(name, markov(table.softmax(-1)), vocab) for name, table in tables.items()))


class TableWithStates(TableModel):
    """Its hidden state is the last two tokens, one-hot."""

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            tokens = torch.tensor((seq.tokens + list(path))[-2:])
            row.hidden = {-1: torch.nn.functional.one_hot(tokens, self.vocab_size).flatten().float()}
        return rows


def engine_pair(seed: int = 0) -> ModelPool:
    config = llama_config(48, hidden_size=32, intermediate_size=48, pad_token_id=None, eos_token_id=None)
    small, large = (engine_model(random_model(deepcopy(config), seed + i, 0.25)) for i in range(2))
    small.name, large.name = "small", "large"
    return pair(small, large)


def source(num_prompts: int, vocab: int = 12, **sampling) -> Source:
    prompts = [[index % vocab, (7 * index) % vocab] for index in range(num_prompts)]
    return Source(prompts, SamplingParams(**{"max_tokens": 24, **sampling}), seed=3)


def placed(models: ModelPool, artifact: Artifact, folder: Path, name: str) -> ModelPool:
    artifact.save(folder / f"{name}.safetensors")
    return replace(models, artifacts=Artifacts(folder))


# Mining


async def test_rounds_are_labelled_by_what_was_accepted():
    """A draft that says 1 2 3 4 0 .. against a target that says 1 2 3 0 ..: three tokens, then one, then again."""
    after = {"small": [1, 2, 3, 4, 0], "large": [1, 2, 3, 0, 0]}
    models = pair(*(TableModel(n, markov(torch.eye(5)[rows] + 1e-9), 5) for n, rows in after.items()))
    mined = await mine_rounds(models, Source([[0]], SamplingParams(max_tokens=40, temperature=0)), 0, depth=5, top=2)
    first = mined.rounds == 0
    assert mined.labels[first].tolist() == [1, 1, 1, 0, 0]
    assert mined.inputs[first][:, -1].tolist() == [1, 2, 3, 4, 5]
    assert mined.inputs[:, 0].tolist() == pytest.approx([1.0] * len(mined), abs=1e-6)
    assert Replay.of(mined, torch.ones(len(mined))).accepted.tolist()[:3] == [3, 3, 3]
    assert not models.small.cached
    assert not models.large.cached


async def test_mining_gives_the_same_examples_again(tmp_path: Path):
    one, two = [await mine_rounds(table_pair(), source(3), 2, depth=6, top=4) for _ in range(2)]
    one.save(tmp_path / "examples.npz")
    for examples in (two, Examples.load(tmp_path / "examples.npz")):
        for name, tensor in vars(one).items():
            assert torch.equal(tensor, getattr(examples, name)), name
    assert len(one) > 20
    assert 0 < one.labels.mean() < 1


async def test_acceptance_examples_are_the_drafts_states_at_its_own_tokens():
    models = engine_pair()
    mined = await mine_acceptance(models, source(1, vocab=48), 0, mixing=0.0)
    assert mined.inputs.shape == (24, 32)
    # By hand: the answer, the draft's draws after it, and the states after feeding these draws.
    seq, plain = source(1, vocab=48).sequence(0), source(1, vocab=48).sequence(0)
    await models.large.decode(seq)
    answer = tuple(token.id for token in seq.generated)
    drawn = await models.small.extend(plain, answer[:-1], ReadSpec(draw=NoiseKind.DRAFT, probs=True), every=True)
    judged = await models.large.extend(plain, answer[:-1], ReadSpec(draw=None, probs=True), every=True)
    for place in (0, 11, 23):
        token = drawn[place].token
        expected = min(1.0, float(judged[place].probs[token] / drawn[place].probs[token]))
        assert mined.labels[place].item() == pytest.approx(expected, rel=1e-5)
        fed = tuple(row.token for row in drawn[: place + 1])
        [state] = await models.small.extend(plain, fed, ReadSpec(draw=None, hidden=frozenset({-1})))
        assert torch.allclose(mined.inputs[place], state.hidden[-1], atol=1e-5)


async def test_mixing_leaves_out_the_answers_tokens():
    models = engine_pair()
    half = await mine_acceptance(models, source(2, vocab=48, max_tokens=100), 1, mixing=0.5)
    assert 30 < len(half) < 70
    assert len(await mine_acceptance(models, source(2, vocab=48), 1, mixing=1.0)) == 0


# Fitting and measuring


def test_an_interrupted_fit_ends_as_an_uninterrupted_one(tmp_path: Path):
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 4, generator=random)
    labels = (inputs[:, 0] > 0).float()

    def run(epochs: int, checkpoint: Path | None) -> tuple[list[float], ContinueHead]:
        torch.manual_seed(1)
        head = ContinueHead(2, 8)
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        schedule = replace(STEADY, steps=6 * epochs, batch_size=32)
        return fit(head, lambda picked: loss(head(inputs[picked]), labels[picked]), 200, schedule, checkpoint, 6), head

    straight, expected = run(6, None)
    run(2, tmp_path / "c.pt")
    resumed, head = run(6, tmp_path / "c.pt")
    assert resumed == straight
    assert straight[-1] < straight[0]
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, head.state_dict()[name]), name


def test_a_fit_that_diverges_is_refused_and_its_checkpoint_is_that_of_the_last_sound_step(tmp_path: Path):
    head, place = torch.nn.Linear(1, 1), tmp_path / "checkpoint.pt"
    schedule = replace(STEADY, steps=9, batch_size=1, learning_rate=0.5)
    losses = iter([1.0, 1.0, 1.0, math.nan, 1.0, 1.0])

    def loss(picked: torch.Tensor) -> torch.Tensor:
        return head(torch.ones(len(picked), 1)).sum() * next(losses)

    with pytest.raises(TurnoutError, match=r"learning_rate: is 0.5; the loss of step 4 is not finite"):
        fit(head, loss, 4, schedule, place, 2)
    kept = Checkpoint.load(place)
    assert kept.progress.step == 2
    assert all(bool(each.isfinite().all()) for each in (*kept.model.values(), *head.parameters()))


def test_a_planted_rule_on_entropy_is_recovered():
    random = torch.Generator().manual_seed(0)
    features = torch.rand(3_000, 12, generator=random)
    features[:, 10] *= 4
    features[:, 11] = torch.randint(1, 20, (3_000,), generator=random).float()
    labels = (features[:, 10] < 1.7).float()
    torch.manual_seed(0)
    head = ContinueHead(10, 16)
    head.mean.copy_(features.mean(0))
    head.spread.copy_(features.std(0))
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    fit(head, lambda picked: loss(head(features[picked]), labels[picked]), 2000, replace(STEADY, steps=120))
    scores = head(features[2000:]).sigmoid().detach().double().numpy()
    assert auc(scores, labels[2000:].double().numpy()) > 0.95


def test_auc_and_calibration_by_hand():
    scores, labels = np.array([0.1, 0.4, 0.4, 0.8]), np.array([0.0, 0.0, 1.0, 1.0])
    assert auc(scores, labels) == (0.5 + 1 + 1 + 1) / 4
    assert auc(np.zeros(4), labels) == 0.5
    assert auc(-scores, labels) == pytest.approx(1 - 3.5 / 4)
    # Bins [.1, .2), [.4, .5), [.8, .9): gaps .1, .8 - 1, .8 - 1.
    assert calibration_error(scores, labels) == pytest.approx((0.1 + 0.2 + 0.2) / 4)
    # Soft labels: as if each example stood for many.
    many = auc(np.repeat([0.2, 0.6], 10), np.array([1.0] * 3 + [0.0] * 7 + [1.0] * 9 + [0.0]))
    assert auc(np.array([0.2, 0.6]), np.array([0.3, 0.9])) == pytest.approx(many)
    measured = calibration(scores, labels, 0.5)
    assert measured.constant_loss == pytest.approx(math.log(2))


def test_the_loss_weighs_rejection_over_the_weighted_label_mass():
    logits, labels = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([0.75, 0.0])
    first, second = logits.log_softmax(-1)
    expected = -(0.75 * first[1] + 6 * 0.25 * first[0] + 6 * second[0]) / (0.75 + 6 * 0.25 + 6)
    assert weighted_loss(logits, labels, 6.0).item() == pytest.approx(expected.item())


# Tuning


def scripted(accepted: list[int], depth: int, scores: list[float]) -> Replay:
    """Rounds of one depth, all with the same scores."""
    return Replay(np.array([scores] * len(accepted)), np.full(len(accepted), depth), np.array(accepted))


def test_the_oracle_drafts_what_will_be_accepted():
    labels = [1, 1, 1, 0, 0, *[0] * 5, *[1] * 5]
    rounds = torch.arange(3).repeat_interleave(5)
    examples = Examples(torch.zeros(15, 1), torch.tensor(labels).float(), torch.zeros(15).long(), rounds)
    replay = Replay.of(examples, torch.linspace(0, 1, 15))
    assert replay.accepted.tolist() == [3, 0, 5]
    assert replay.scores[1].tolist() == pytest.approx(torch.linspace(0, 1, 15)[5:10].tolist())


def test_speed_by_hand_and_lengths_by_threshold():
    replay = scripted([3, 0, 5], 5, [0.9, 0.8, 0.4, 0.9, 0.9])
    assert replay.lengths(0.5, 5).tolist() == [3, 3, 3]
    assert replay.lengths(0.0, 4).tolist() == [4, 4, 4]
    assert replay.lengths(0.95, 5).tolist() == [1, 1, 1]
    costs = Costs(0.5, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    assert replay.speed(replay.fixed(3), costs) == pytest.approx((4 + 1 + 4) / (3 * (1.5 + 4.0)))
    assert replay.speed(replay.accepted, costs) == pytest.approx((4 + 1 + 6) / (1.5 + 4 + 1 + 2.5 + 6))


def test_tuning_is_for_time_not_accuracy():
    """Where drafting is nearly free every token is worth it; where it is dear, none but the sure."""
    random = np.random.default_rng(0)
    chances = random.choice([0.95, 0.2], size=(400, 8))
    accepted = (random.random(chances.shape) < chances).cumprod(1).sum(1)
    replay = Replay(chances, np.full(400, 8), accepted)
    cheap, dear = (tune(replay, replay, Costs(draft, (1.0,) * 9)) for draft in (1e-4, 0.4))
    assert cheap.threshold <= 0.2
    assert 0.2 < dear.threshold <= 0.95
    for tuned in (cheap, dear):
        assert tuned.oracle_speed >= tuned.speed >= tuned.static_speed
    assert dear.oracle_speed > dear.speed > dear.static_speed


# Whole runs


async def answer(models: ModelPool, asked: Source, index: int, **params) -> tuple[list[int], float]:
    """Tokens of an answer, and drafted tokens a round."""
    request = Request("r", asked.sequence(index))
    async for _ in speculative.run(request, models, SpeculativeParams.model_validate(params)):
        pass
    for model in models.models.values():
        model.release(request.sequence)
    speculation = request.sequence.meter.speculation
    return [token.id for token in request.sequence.generated], speculation.draft_tokens / speculation.rounds


async def test_disco_is_trained_saved_and_drafts_without_changing_the_answer(tmp_path: Path):
    models = table_pair()
    recipe = Disco(depth=8, top=4, epochs=10)
    trained = await train_disco(models, source(64), recipe, tmp_path / "run")
    assert trained.losses[-1] < trained.losses[0]
    assert trained.heldout.auc > 0.6
    assert trained.heldout.loss < trained.heldout.constant_loss
    assert trained.tuned is not None
    assert trained.tuned.oracle_speed > max(trained.tuned.speed, trained.tuned.static_speed)
    assert trained.tuned.speed > trained.tuned.plain_speed
    models = placed(models, trained.artifact, tmp_path, "mine")
    lengths = {}
    for threshold in (0.0, None, 1.0):
        choice = {"name": "disco", "artifact": "mine", "threshold": threshold}
        for index in range(8):
            ids, lengths[threshold] = await answer(models, source(8), index, length=choice)
            assert ids == (await answer(models, source(8), index, draft_length=1))[0]
    assert lengths[0.0] > 2 * lengths[1.0]
    assert lengths[1.0] <= 1.0


async def test_specdecpp_is_trained_saved_and_drafts_without_changing_the_answer(tmp_path: Path):
    models, asked = engine_pair(), source(32, vocab=48)
    recipe = SpecDecPlusPlus(epochs=6, schedule=replace(STEADY, batch_size=64))
    trained = await train_specdecpp(models, asked, recipe, tmp_path / "run")
    assert trained.losses[-1] < trained.losses[0]
    assert trained.artifact.settings["head"] == {"width": 32, "depth": 3, "shared": False}
    models = placed(models, trained.artifact, tmp_path, "mine")
    lengths = {}
    for threshold in (0.0, 0.3, 1.0):
        choice = {"name": "specdecpp", "artifact": "mine", "threshold": threshold}
        for index in range(4):
            ids, lengths[threshold] = await answer(models, asked, index, length=choice)
            assert ids == (await answer(models, asked, index, draft_length=1))[0]
    assert lengths[0.0] <= lengths[0.3] <= lengths[1.0]
    assert lengths[0.0] <= 2.0 < lengths[1.0]


async def test_an_acceptance_head_beats_a_constant_where_there_is_something_to_learn():
    models, asked = table_pair(kind=TableWithStates), source(64)
    recipe = SpecDecPlusPlus(reject_weight=1.0, epochs=15, schedule=replace(STEADY, batch_size=64))
    trained = await train_specdecpp(models, asked, recipe)
    assert trained.losses[0] > trained.losses[3] > trained.losses[-1]
    assert trained.heldout.loss < trained.heldout.constant_loss
    assert trained.heldout.auc > 0.6


async def test_training_again_gives_the_same_artifact_and_other_settings_are_refused(tmp_path: Path):
    recipe = Disco(depth=4, top=2, epochs=3)
    for name, folder in (("one", "a"), ("two", "b"), ("three", "b")):
        trained = await train_disco(table_pair(), source(16), recipe, tmp_path / folder)
        trained.artifact.save(tmp_path / f"{name}.safetensors")
    assert len({(tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "two", "three")}) == 1
    with pytest.raises(TurnoutError, match="other settings"):
        await train_disco(table_pair(), source(16), replace(recipe, depth=5), tmp_path / "a")


@pytest.mark.parametrize("kind", list(MINED))
async def test_mining_that_is_cut_off_goes_on_with_the_prompts_it_lacks(tmp_path: Path, monkeypatch, kind: str):
    miner, recipe = MINED[kind]
    mine, mined, end = getattr(length_predictors, miner), [], 16

    async def mine_before_the_end(models: ModelPool, asked: Source, index: int, *args) -> Examples:
        if index >= end:
            raise InterruptedError
        mined.append(index)
        return await mine(models, asked, index, *args)

    models = table_pair(kind=TableWithStates)
    whole = await train_pair(models, source(22), recipe, tmp_path / "whole")
    monkeypatch.setattr(length_predictors, miner, mine_before_the_end)
    with pytest.raises(InterruptedError):
        await train_pair(models, source(22), recipe, tmp_path / "cut")
    assert sorted(mined) == list(range(16))
    end = 22
    for expected in (range(16, 22), range(0)):
        mined.clear()
        resumed = await train_pair(models, source(22), recipe, tmp_path / "cut")
        assert sorted(mined) == list(expected)
        assert resumed.losses == whole.losses
        assert resumed.artifact.version == whole.artifact.version


async def test_too_few_prompts_are_refused():
    with pytest.raises(TurnoutError, match="at least 8"):
        await train_disco(table_pair(), source(7), Disco(depth=4, top=2))


async def test_prompts_are_never_on_both_sides():
    examples = Examples(torch.zeros(24, 1), torch.zeros(24), torch.arange(24), torch.zeros(24).long())
    parts = [set(part.prompts.tolist()) for part in split(examples, source(24))]
    assert [len(part) for part in parts] == [18, 3, 3]
    assert set.union(*parts) == set(range(24))


def test_an_engine_models_digest_is_its_weights_in_any_precision():
    config = llama_config(48, hidden_size=32, pad_token_id=None, eos_token_id=None)

    def digest(seed: int, dtype: torch.dtype) -> str:
        return engine_model(random_model(deepcopy(config), seed).to(dtype)).digest

    assert digest(0, torch.float32) == digest(0, torch.bfloat16) != digest(1, torch.float32)
