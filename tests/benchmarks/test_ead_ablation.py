"""The ablation's page, from outcomes made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import ead_ablation
from benchmarks.ead_ablation import (
    EFFECTS,
    HALVINGS,
    SMALL_STAYS,
    STAYS,
    WINDOWS,
    Ablation,
    Cell,
    effects,
    page,
    settings,
    verdict,
)
from benchmarks.strategies import Arm, ArmResult, Outcome
from benchmarks.switching_arms import Setting
from turnout.calls import TokenOut, Usage
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.types import TokenKind

COST = Cost(0.5, 10.0, 1.0)
USAGE = Usage(1, 1, 0, {}, SpeculationMeter(), 0, CostReport(COST, COST, 0.3), "x", {}, 1, 0.1, 0.2)
TOKEN = TokenOut(1, "a", "small", TokenKind.DECODED)


def result(name: str, right: int, count: int = 40) -> ArmResult:
    outcomes = tuple(Outcome(index < right, "", (TOKEN,), USAGE) for index in range(count))
    return ArmResult(Arm(name, "entropy_adaptive"), outcomes, 1.0)


def cell(setting: Setting, gain: float, band: float = 1.0) -> Cell:
    """Above random by `gain` on average."""
    above = np.where(np.arange(40) < 40 * abs(gain), np.sign(gain), 0.0)
    return Cell(setting, band, 0.01, result(setting.title, 30), above)


def test_every_combination_is_tried_and_effects_are_means_over_the_others() -> None:
    tried = settings()
    assert len(tried) == len(WINDOWS) * len(STAYS) * len(SMALL_STAYS) * len(EFFECTS)
    cells = [cell(setting, 0.5 if setting.effect == "current" else 0.25) for setting in tried]
    found = dict(effects([*cells, cell(tried[0], -1.0, band=0.5)]))
    assert found["effect current"].value == pytest.approx(0.5)
    assert found["effect next"].value == pytest.approx(0.25)
    assert found["window 2"].value == pytest.approx(0.375)
    assert found["effect next"].low < 0.25 < found["effect next"].high


def test_the_verdict_says_whether_the_paper_is_beaten() -> None:
    even = [cell(setting, 0.25) for setting in settings()]
    assert "not distinguishable from the paper's choice" in verdict(even)
    better = [cell(s, 0.75 if (s.window, s.stay, s.effect) == (1, "1", "current") else 0.25) for s in settings()]
    assert verdict(better).startswith("Best combination: window 1, stay 1, current, +0.750")
    assert "; above the paper's choice" in verdict(better)
    text = page("small a, large b", [result("small only", 10), result("large only", 36)], better).markdown()
    assert text.count("\n| 1 | 1 | current |") == text.count("\n| 1 | 1, small 0 | current |") == 1
    assert "(small a, large b)" in text
    assert "Large model alone: 0.900 [" in text


async def test_a_band_is_moved_until_the_large_model_writes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if at threshold t and band b the large model wrote 0.3 / sqrt(100 t sqrt(b)) of the tokens."""
    seen: list[Arm] = []

    async def ran(pool: Any, problems: Any, arm: Arm, at_once: int, max_tokens: int) -> Any:
        seen.append(arm)
        upper, lower = arm.params["threshold"], arm.params["threshold_down"]
        return SimpleNamespace(large_share=0.3 * ((upper * lower) ** 0.5 / 0.01) ** -0.5)

    monkeypatch.setattr(ead_ablation, "run_arm", ran)
    pool: Any = None
    ablation = Ablation(pool, [], [], share=0.3)
    for band in (0.5, 0.2):
        found = await ablation.band_threshold(settings()[0], band, 0.01)
        assert found * band**0.5 == pytest.approx(0.01, rel=0.05)
        assert [arm.params["threshold_down"] for arm in seen] == [band * arm.params["threshold"] for arm in seen]
        assert len(seen) == HALVINGS
        seen.clear()
