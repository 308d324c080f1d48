"""Probes: from hidden state and features to calibrated predictions, and back from disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.artifacts import Artifact
from decoding.constraints.base import Constraint, Mask
from decoding.decode_loop import reported
from decoding.fakes import pair
from decoding.model import Readout, ReadSpec
from router.base import PROMPT_WANT, Reading
from router.difficulty.features import FEATURES, features_of, inputs_of, state_of
from router.difficulty.probe import EXTRA_COST, LEAST_EXTRA, ROUTER_PROBE, Probe, ProbeNetwork, extra_costs
from router.difficulty.scaling import Scaling
from router.difficulty.strategies import EASY, HARD, NORMAL, LabelRule
from tests.router.probes import LastToken, models_of, network_of, save_router
from tests.router.probes import asked as request
from turnout.errors import TurnoutError
from turnout.structure import Structure
from turnout.types import SamplingParams

CHANCES = [[0.1 * t, 1.0 - 0.05 * t] for t in range(10)]


async def test_what_is_written_predicts_the_same_when_it_is_read(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    probe = Probe.load(Artifact.load(tmp_path / "router.safetensors"))
    models = models_of(tmp_path)
    for token in (1, 4, 9):
        row = await request(token).read(models)
        found = probe.predict(state_of(row), features_of(row, 4))
        assert list(found) == ["p_small", "p_large"]
        assert found == pytest.approx({"p_small": CHANCES[token][0], "p_large": CHANCES[token][1]}, abs=1e-5)


async def test_features_of_a_reading():
    model = LastToken("small", 10)
    [row] = await model.extend(request(3).request.sequence, want=PROMPT_WANT)
    found = features_of(row, 4)
    assert tuple(found) == FEATURES
    assert found == pytest.approx(
        {
            "log_prompt_tokens": math.log(4),
            "entropy_bits": math.log2(10),
            "margin_nats": 0.0,
            "top_logprob": -math.log(10),
        },
        abs=1e-5,
    )
    with pytest.raises(ValueError, match="must read entropy"):
        features_of(Readout(), 4)
    assert features_of(Readout(entropy_bits=0.0, top=((3, 0.0),)), 1)["margin_nats"] == 100.0


def test_one_prompt_is_predicted_as_many_are():
    """What is served is what was trained, calibrated and reported: inputs far out and costs out of range included."""
    torch.manual_seed(0)
    main, extra = ProbeNetwork(14, 8, 2).requires_grad_(False), ProbeNetwork(14, 8, 1).requires_grad_(False)
    for network in (main, extra):
        network.standardise(torch.randn(50, 14) * 3.0 + 1.0)
    extra.last.weight *= 20.0
    scaling = Scaling("chances", [1.5, 0.7])
    probe = Probe(main, ("p_small", "p_large"), scaling, extra)
    costs = []
    for inputs in torch.randn(40, 14) * torch.linspace(0.5, 60.0, 40)[:, None]:
        features = dict(zip(FEATURES, inputs[10:].tolist(), strict=True))
        found = probe.predict(inputs[:10].numpy(), features)
        chances = scaling(main(inputs[None]).numpy())[0].tolist()
        costs.append(found[EXTRA_COST])
        expected = {"p_small": chances[0], "p_large": chances[1], EXTRA_COST: extra_costs(extra, inputs[None])[0]}
        assert found == pytest.approx(expected, rel=1e-4)
    assert (min(costs), max(costs)) == pytest.approx((LEAST_EXTRA, 1.0 / LEAST_EXTRA))


def test_a_state_of_another_width_is_refused():
    probe = Probe(network_of(CHANCES), ("p_small", "p_large"), Scaling("chances"))
    with pytest.raises(ValueError, match="is fed 14 numbers, not 15"):
        probe.predict(np.zeros(11, dtype=np.float32), dict.fromkeys(FEATURES, 0.0))


def test_a_probe_that_sees_other_features_is_refused(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    artifact = Artifact.load(tmp_path / "router.safetensors")
    artifact.settings["features"] = ["entropy_bits"]
    with pytest.raises(TurnoutError, match="its probe sees entropy_bits; this version computes log_prompt_tokens"):
        Probe.load(artifact)


def test_a_probe_of_other_models_or_kind_is_refused(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models = models_of(tmp_path)
    with pytest.raises(TurnoutError, match=r"artifact: is of the kind 'router_probe'; 'strategy_probe' is needed"):
        models.artifacts.open("router", "strategy_probe", models, "artifact")
    models.large.digest = "another"
    with pytest.raises(TurnoutError, match="was made for the large model with digest table large"):
        models.artifacts.open("router", ROUTER_PROBE, models, "artifact")


def test_temperatures_and_knots_by_hand():
    outputs = np.array([[2.0, -4.0]])
    halved = Scaling("chances", [2.0, 4.0])(outputs)[0].tolist()
    assert halved == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])
    assert Scaling("choice", [2.0])(outputs).tolist()[0] == pytest.approx(
        [1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3))]
    )
    assert np.array_equal(Scaling("values", [2.0])(outputs), outputs)
    knots = [([0.2, 0.6], [0.1, 0.5]), ([0.5], [0.25])]
    even = Scaling("chances", knots=knots)
    chances = np.array([[0.1, 0.9], [0.2, 0.1], [0.4, 0.5], [0.6, 0.5], [0.9, 0.5]])
    logits = np.log(chances / (1.0 - chances))
    assert even(logits)[:, 0].tolist() == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.5], abs=1e-6)
    assert even(logits)[:, 1].tolist() == [0.25] * 5
    again = Scaling(**even.settings)
    assert np.array_equal(again(logits), even(logits))
    sure = Scaling("chances")(np.array([-1e4, 1e4], dtype=np.float32))
    assert sure.tolist() == [0.0, 1.0]


def test_inputs_are_the_state_and_then_the_features():
    row = Readout(
        entropy_bits=2.0, top=((1, -0.5), (2, -2.0)), hidden={-1: torch.tensor([7.0, 8.0], dtype=torch.bfloat16)}
    )
    found = inputs_of(state_of(row), features_of(row, 1))
    assert found.dtype == np.float32
    assert found.tolist() == [7.0, 8.0, 0.0, 2.0, 1.5, -0.5]


@pytest.mark.parametrize(
    ("accuracy", "nats", "strategy"),
    [
        (1.0, 0.1, NORMAL),
        (0.85, 0.35, NORMAL),
        (1.0, 0.36, EASY),
        (0.84, 0.1, EASY),
        (0.6, 2.0, EASY),
        (0.59, 0.0, HARD),
        (0.0, 3.0, HARD),
    ],
)
def test_which_strategy_a_question_called_for(accuracy: float, nats: float, strategy):
    """The U-shape: sure and right is normal, lost is hard, what lies between is easy (right but needlessly unsure)."""
    assert LabelRule().label(accuracy, (nats - 1e-12) / math.log(2)) == strategy.name


def test_the_strategies_settings():
    assert [(each.temperature, each.share) for each in (EASY, NORMAL, HARD)] == [(0.5, 0.4), (0.8, 1.0), (0.4, 0.5)]
    assert len({EASY.suffix, NORMAL.suffix, HARD.suffix, ""}) == 4


class OnlyOne(Constraint):
    """A structure that leaves token 3."""

    end_ids, vocab_size, failure, remembers = frozenset(), 10, "", True

    def masks(self, answer: list[int], paths: Sequence[tuple[int, ...]]) -> list[Mask | None]:
        return [np.packbits(np.arange(16) == 3, bitorder="little")] * len(paths)

    def accepts(self, tokens: list[int]) -> bool:
        return True

    def clone(self) -> OnlyOne:
        return self


async def test_a_probe_reads_the_model_before_a_structure_and_an_answer_is_reported_under_it():
    """It has learned from prompts without one; its reading is no entropy of the answer's first token."""
    model, made = LastToken("small", 10), request(3)
    seq = made.request.sequence
    seq.constraint = OnlyOne()
    seq.sampling = seq.sampling.model_copy(
        update={"structure": Structure(kind="regex", value="x"), "token_details": True}
    )
    row = await made.read(pair(model, LastToken("large", 10)))
    assert (row.token, row.entropy_bits) == (3, pytest.approx(math.log2(10)))
    assert made.reading is not None
    assert made.reading.covers(ReadSpec())
    assert not made.reading.covers(ReadSpec() | reported(seq))
    [first] = await model.extend(seq, want=ReadSpec() | reported(seq))
    assert (first.token, first.entropy_bits, first.forced) == (3, 0.0, True)


def test_what_is_taken_of_a_reading_keeps_what_a_structure_said():
    read = Readout(3, entropy_bits=0.0, logprob=-1.0, forced=True, allowed_logprob=-0.25)
    reading = Reading(read, ReadSpec(entropy=True, logprob=True), SamplingParams())
    assert reading.only(ReadSpec(entropy=True)) == Readout(3, entropy_bits=0.0, forced=True, allowed_logprob=-0.25)
    assert reading.only(ReadSpec(logprob=True)) == Readout(3, logprob=-1.0)


async def test_a_request_without_a_structure_is_reported_from_the_reading():
    made = request(3)
    seq = made.request.sequence
    seq.sampling = seq.sampling.model_copy(update={"token_details": True})
    await made.read(pair(LastToken("small", 10), LastToken("large", 10)))
    assert made.reading is not None
    assert made.reading.covers(ReadSpec() | reported(seq))
