"""The step time: fitted to known machines, to the real engine, and followed when the machine changes pace."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs.least_squares import nonnegative
from engine.costs.probe import BUDGET_S, ESSENTIAL, FURTHER, Group, Probe, Shape, attended, measure, profile
from engine.costs.step_time import RECENT, Sample, StepCost, StepTime, relative_errors
from engine.runner import Feed
from tests.engine.harness import engine_model
from training.random_models import llama_config, random_model

HELD_OUT: tuple[Shape, ...] = (
    (Group(2, 1, 64),),
    (Group(12, 1, 100),),
    (Group(24, 1, 200),),
    (Group(48, 1, 100),),
    (Group(1, 24, 100),),
    (Group(1, 96, 300),),
    (Group(1, 200, 700),),
    (Group(12, 1, 200), Group(1, 48, 800)),
    (Group(4, 5, 200),),
    (Group(1, 400, 0),),
)


@pytest.fixture(scope="module", autouse=True)
def given_step_times() -> None:
    """Here models are measured for as long as elsewhere than in tests."""


@dataclass
class Machine:
    """A runner whose forwards take exactly so long, on a clock of its own: flat to 16 rows, linear beyond."""

    base: float = 5e-3
    per_token: float = 2e-4
    per_attended: float = 8e-8
    per_sequence: float = 5e-5
    noise: random.Random | None = None
    now: float = 0.0
    block_size: int = 16
    store: Any = None

    def seconds(self, fed: int, attended: int, sequences: int) -> float:
        beyond = max(fed - 16, 0)
        return self.base + self.per_token * beyond + self.per_attended * attended + self.per_sequence * sequences

    def run(self, feeds: Sequence[Feed]) -> list[Any]:
        fed = sum(len(feed.tokens) for feed in feeds)
        seen = sum(len(feed.table) + index + 1 for feed in feeds for index in range(len(feed.tokens)))
        disturbed = 1.0 + (self.noise.expovariate(40) if self.noise else 0.0)
        self.now += disturbed * self.seconds(fed, seen, len(feeds))
        return []

    def probe(self, **limits: int) -> Probe:
        settings = {"num_blocks": 8192, "max_length": 4096, "max_batch": 64, "token_budget": 512, **limits}
        return Probe(self, clock=lambda: self.now, **settings)  # type: ignore[arg-type]

    def sample(self, shape: Shape) -> Sample:
        fed, sequences = sum(g.sequences * g.fed for g in shape), sum(g.sequences for g in shape)
        return Sample(fed, attended(shape), sequences, self.seconds(fed, attended(shape), sequences))


def test_the_coefficients_of_a_known_machine_are_recovered():
    machine = Machine()
    cost = StepTime.fit([machine.sample(shape) for shape in (*ESSENTIAL, *FURTHER)]).cost
    assert cost.base == pytest.approx(machine.base, rel=0.05)
    assert cost.per_attended == pytest.approx(machine.per_attended, rel=0.05)
    assert cost.per_sequence == pytest.approx(machine.per_sequence, rel=0.05)
    slopes = dict(zip(cost.knots, cost.slopes, strict=True))
    assert max(slope for knot, slope in slopes.items() if knot < 16) < 0.05 * machine.per_token
    for knot in (16, 32, 64, 128, 256):
        assert slopes[knot] == pytest.approx(machine.per_token, rel=0.05)


def test_a_noisy_machine_is_profiled_within_five_percent_through_the_runner():
    machine = Machine(noise=random.Random(1))
    step_time = profile(machine.probe())
    assert relative_errors(step_time, [machine.sample(shape) for shape in HELD_OUT]).max() < 0.05


def test_one_disturbed_measurement_moves_the_fit_little():
    machine = Machine()
    samples = [machine.sample(shape) for shape in (*ESSENTIAL, *FURTHER)]
    spoilt = samples[9]
    samples[9] = Sample(spoilt.fed, spoilt.attended, spoilt.sequences, 10 * spoilt.seconds)
    errors = relative_errors(StepTime.fit(samples), [machine.sample(shape) for shape in HELD_OUT])
    assert np.median(errors) < 0.05
    assert errors.max() < 0.15


def test_a_slow_machine_is_profiled_by_the_essential_shapes_only():
    machine = Machine(base=0.4, per_token=1e-2)
    samples = measure(machine.probe(), (*ESSENTIAL, *FURTHER), len(ESSENTIAL))
    assert len(samples) == len(ESSENTIAL)
    step_time = StepTime.fit(samples)
    assert relative_errors(step_time, [machine.sample(shape) for shape in HELD_OUT]).max() < 0.35


def test_a_fast_machine_stays_within_the_budget():
    machine = Machine()
    profile(machine.probe())
    assert machine.now < BUDGET_S[1] * 1.1


def test_shapes_are_cut_to_what_the_model_holds():
    probe = Machine().probe(num_blocks=16, max_length=64, max_batch=8, token_budget=32)
    assert probe.clipped((Group(1, 16, 512),)) == (Group(1, 16, 48),)
    assert probe.clipped((Group(8, 1, 512),)) == (Group(8, 1, 31),)
    assert probe.clipped((Group(16, 1, 1),)) is None, "max_batch"
    assert probe.clipped((Group(1, 33, 0),)) is None, "token_budget"
    assert probe.clipped((Group(8, 4, 100),)) == (Group(8, 4, 28),)
    tiny = Machine().probe(num_blocks=1, max_length=16, max_batch=64, token_budget=512)
    assert profile(tiny).seconds(1, 1, 1) == pytest.approx(Machine().seconds(1, 1, 1), rel=0.05)


class Listing(Machine):
    """Keeps the shapes of its forwards: (tokens fed, cached ones) of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[tuple[int, int]]] = []

    def run(self, feeds: Sequence[Feed]) -> list[Any]:
        self.shapes.append([(len(feed.tokens), len(feed.table)) for feed in feeds])
        return super().run(feeds)


def test_what_is_set_up_runs_once_in_exactly_its_shape_and_only_where_it_fits():
    machine = Listing()
    probe = machine.probe(num_blocks=66, max_length=1025, max_batch=4, token_budget=64)
    fitting = [(1, 1, 1), (4, 1, 1), (1, 64, 1), (2, 1, 65), (1, 64, 65)]
    beyond = [(5, 1, 1), (2, 33, 1), (3, 1, 65), (1, 1, 66)]  # sequences, tokens, blocks, positions
    probe.set_up([*fitting, *beyond])
    assert machine.shapes == [
        [(1, 0)],
        [(1, 0)] * 4,
        [(64, 0)],
        [(1, 1024), (1, 0)],
        [(64, 961)],
    ]


def test_attended_counts_the_positions_each_token_sees():
    assert attended((Group(1, 3, 10),)) == 11 + 12 + 13
    assert attended((Group(2, 1, 4), Group(1, 2, 0))) == 2 * 5 + 1 + 2


counts = st.integers(1, 4096)


@given(fed=counts, seen=st.integers(0, 10**6), sequences=st.integers(1, 64), more=st.integers(1, 3000))
def test_the_prediction_never_falls_when_something_is_added(fed, seen, sequences, more):
    fed = max(fed, sequences)
    slack = 1e-12
    for times in (NOISY, CORRECTED):
        before = times.seconds(fed, seen, sequences)
        assert times.seconds(fed + more, seen, sequences) >= before - slack
        assert times.seconds(fed, seen + more, sequences) >= before - slack
        assert times.seconds(fed + more, seen, sequences + more) >= before - slack


def _noisy_fit() -> StepTime:
    """Fitted to measurements so bad that an unconstrained fit would fall somewhere."""
    chance = random.Random(3)
    samples = [Machine().sample(shape) for shape in (*ESSENTIAL, *FURTHER)]
    return StepTime.fit([Sample(s.fed, s.attended, s.sequences, s.seconds * chance.uniform(0.3, 3)) for s in samples])


NOISY = _noisy_fit()
CORRECTED = _noisy_fit()
CORRECTED.observe(4, 400, 4, 3 * CORRECTED.seconds(4, 400, 4))
CORRECTED.observe(40, 4000, 4, 0.2 * CORRECTED.seconds(40, 4000, 4))


def test_a_slowdown_is_followed_and_forgotten():
    chance = random.Random(5)
    step_time = StepTime(StepCost(1e-3, (1,), (1e-4,), 1e-8, 0.0, 256, 0.0))
    true = step_time.seconds(100, 5000, 4)

    def forwards(count: int, pace: float) -> None:
        for _ in range(count):
            fed = chance.randint(5, 500)
            fitted = StepTime(step_time.cost).seconds(fed, 10 * fed, 4)
            step_time.observe(fed, 10 * fed, 4, pace * fitted * chance.uniform(0.97, 1.03))

    forwards(RECENT, 1.0)
    assert step_time.seconds(100, 5000, 4) == pytest.approx(true, rel=0.03)
    forwards(RECENT // 2 + 1, 2.0)
    assert step_time.seconds(100, 5000, 4) == pytest.approx(2 * true, rel=0.05)
    forwards(RECENT // 2 + 1, 1.0)
    assert step_time.seconds(100, 5000, 4) == pytest.approx(true, rel=0.05)


def test_a_single_slow_forward_changes_nothing():
    step_time = StepTime(StepCost(1e-3, (1,), (0.0,), 0.0, 0.0, 256, 0.0))
    for seconds in [1e-3] * 3 + [1.0] + [1e-3] * 3:
        step_time.observe(1, 1, 1, seconds)
    assert step_time.seconds(1, 1, 1) == pytest.approx(1e-3)


def test_single_tokens_and_chunks_are_corrected_apart():
    step_time = StepTime(StepCost(1e-3, (1,), (1e-4,), 0.0, 0.0, 256, 0.0))
    step_time.observe(4, 40, 4, 2 * 1.3e-3)
    assert step_time.seconds(14, 140, 4) == pytest.approx(2 * 2.3e-3), "nothing else is known of the pace"
    step_time.observe(14, 140, 4, 5 * 2.3e-3)
    assert step_time.seconds(14, 140, 4) == pytest.approx(5 * 2.3e-3)
    assert step_time.seconds(4, 40, 4) == pytest.approx(2 * 1.3e-3)


def test_nonnegative_least_squares_on_a_hand_computed_example():
    # Unconstrained: x = (2, -1). With x2 >= 0 the best is x2 = 0, x1 = (1*2 + 1*1) / 2 = 1.5.
    features = np.array([[1.0, 0.0], [1.0, 1.0]])
    assert nonnegative(features, np.array([2.0, 1.0])) == pytest.approx([1.5, 0.0])
    assert nonnegative(features, np.array([1.0, 3.0])) == pytest.approx([1.0, 2.0])


@pytest.mark.bench
def test_the_real_engine_is_predicted_on_shapes_it_was_not_fitted_to():
    config = llama_config(hidden_size=256, intermediate_size=704, num_hidden_layers=4, max_position_embeddings=2048)
    model = engine_model(random_model(config, seed=0), token_budget=512)
    # On one thread, processor time is what the wall clock shows when nobody else uses the machine.
    limits = {"num_blocks": model.pool.num_blocks, "max_length": model.max_length, "max_batch": 64, "token_budget": 512}
    model_probe = Probe(model.batcher.runner, **limits, clock=time.process_time)
    medians = []
    for _ in range(3):  # what else runs on the machine still disturbs caches
        step_time = profile(model_probe)
        shapes = [shape for shape in map(model_probe.clipped, HELD_OUT) if shape is not None]
        assert len(shapes) == len(HELD_OUT)
        medians.append(np.median(relative_errors(step_time, [model_probe.sample(shape, 7) for shape in shapes])))
        if medians[-1] < 0.1:
            break
    assert min(medians) < 0.1, medians


def test_the_model_hands_its_step_time_to_the_batcher():
    model = engine_model(random_model(llama_config(), seed=0))
    assert model.batcher.times is model.step_time
    assert model.batcher.step_seconds == model.step_time.seconds(1, 1, 1) > 0


def test_the_probe_leaves_no_trace_in_the_models_pool():
    model = engine_model(random_model(llama_config(), seed=0))
    assert (model.pool.num_held, model.pool.num_cached) == (0, 0)
    assert not model.batcher.tables
