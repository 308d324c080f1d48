import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from decoding import noise
from decoding.noise import Purpose, derive_seed, gumbel, noise_key, noise_keys, normal, seed_keys, uniform
from decoding.verifiers import rejection, spectr
from tests.decoding import many_runs

CPU = torch.device("cpu")


KEYS: tuple[int, int, int] = (4544767545655708675, 8376247705207723629, 8050192055176739544)
UNIFORM = 0.313182606775406
GUMBEL = [
    -0.14925487339496613,
    -1.2249089479446411,
    -0.5316194891929626,
    2.717104434967041,
    -0.29365456104278564,
    0.551392138004303,
]
SEEDS = (5, 3567305580077179309)


def test_the_noise_of_many_runs_is_the_librarys():
    keys = [noise_key(seed, 3, Purpose.DRAFT) for seed in range(4_000)] + [0, 2**64 - 1, 2**63]
    for vocab_size in (1, 3, 64):
        assert torch.equal(many_runs.gumbel(keys, vocab_size, CPU), gumbel(keys, vocab_size, CPU))
    original = rejection.gumbel
    with many_runs.many_runs():
        assert rejection.gumbel is many_runs.gumbel
    assert rejection.gumbel is original


def test_the_ratios_of_many_runs_are_spectrs():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.15, 0.75])
    original = spectr.least_ratio
    with many_runs.many_runs():
        assert spectr.least_ratio is many_runs.least_ratio
        for probs, proposal, count in [(p, q, 2), (q, p, 2), (p, q, 3), (p, q, 2)]:
            assert spectr.least_ratio(probs, proposal, count) == original(probs, proposal, count)
    assert spectr.least_ratio is original


def test_known_answers_never_change():
    # Frozen: a change here changes every seeded answer.
    assert noise_key(0, 0, Purpose.SAMPLE) == KEYS[0]
    assert noise_key(42, 7, Purpose.DRAFT) == KEYS[1]
    assert noise_key(2**63 - 1, 100_000, Purpose.ACCEPT, lane=3) == KEYS[2]
    assert uniform(KEYS[0]) == UNIFORM
    assert gumbel([KEYS[0], KEYS[2]], 3, CPU).flatten().tolist() == pytest.approx(GUMBEL, rel=1e-6)
    assert (derive_seed(5, 0), derive_seed(5, 1)) == SEEDS


def test_gumbel_matches_the_host_generator():
    keys = [noise_key(9, position, Purpose.SAMPLE) for position in range(4)]
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    noise = gumbel(keys, 5, CPU)
    for row, key in enumerate(keys):
        for column in range(5):
            # uniform(k) mixes k + golden, so a counter of column + 1 is uniform of the key advanced by column.
            u = uniform((key + column * golden) & mask) + 2.0**-54
            assert noise[row, column].item() == pytest.approx(-np.log(-np.log(u)), rel=1e-6)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 5), (2, 2048), (2, 2049)])
def test_few_and_many_numbers_are_made_alike(monkeypatch: pytest.MonkeyPatch, rows: int, size: int) -> None:
    keys = [noise_key(seed, 4, Purpose.SAMPLE) for seed in range(rows)]
    made = gumbel(keys, size, CPU), normal(keys, size, CPU)
    for most in (0, rows * size):
        monkeypatch.setattr(noise, "_FEW", most)
        assert torch.equal(gumbel(keys, size, CPU), made[0])
        assert torch.equal(normal(keys, size, CPU), made[1])


def test_gumbel_max_samples_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, float("-inf")])
    keys = [noise_key(seed, 3, Purpose.SAMPLE) for seed in range(100_000)]
    drawn = (logits + gumbel(keys, 5, CPU)).argmax(-1)
    counts = torch.bincount(drawn, minlength=5)
    assert counts[4] == 0
    expected = logits.softmax(-1)[:4].double() * len(keys)
    assert stats.chisquare(counts[:4].numpy(), expected.numpy() * (len(keys) / expected.sum().item())).pvalue > 1e-3


def test_uniform_is_uniform_over_seeds_and_over_positions():
    for values in (
        [uniform(noise_key(seed, 0, Purpose.ACCEPT)) for seed in range(20_000)],
        [uniform(noise_key(0, position, Purpose.ACCEPT)) for position in range(20_000)],
    ):
        assert stats.kstest(values, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(Purpose, 2)))
def test_purposes_are_independent(one: Purpose, two: Purpose):
    cells = np.zeros((4, 4))
    for seed in range(8_000):
        a, b = (int(uniform(noise_key(seed, 5, purpose)) * 4) for purpose in (one, two))
        cells[a, b] += 1
    assert stats.chi2_contingency(cells).pvalue > 1e-3


def test_lanes_positions_and_seeds_give_different_keys():
    parts = itertools.product(range(6), range(6), Purpose, range(6))
    assert len({noise_key(*part) for part in parts}) == 6 * 6 * len(Purpose) * 6


def test_forks_get_seeds_of_their_own():
    seeds = [derive_seed(123, index) for index in range(64)]
    assert seeds[0] == 123
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_keys_of_many_rows_are_those_of_each() -> None:
    seeds = [0, 1, 2**63 - 1, 17, 123456789]
    positions = np.array([0, 1, 5, 10**6, 2**31], dtype=np.int64)
    for purpose in Purpose:
        keys = noise_keys(seed_keys(seeds), positions, purpose)
        assert keys.tolist() == [noise_key(s, p, purpose) for s, p in zip(seeds, positions.tolist(), strict=True)]


def test_normal_noise_has_the_shares_of_the_normal_distribution() -> None:
    drawn = normal([noise_key(1, step, Purpose.LANGEVIN) for step in range(50)], 2000, torch.device("cpu"))
    assert drawn.mean().abs() < 0.02
    assert drawn.std().item() == pytest.approx(1.0, abs=0.02)
    assert (drawn.abs() < 1.0).float().mean().item() == pytest.approx(0.6827, abs=0.01)
