"""A calibration made by hand."""

from __future__ import annotations

from decoding.calibration import Basis, KnobCalibration, Point, Span

FIXED = {
    "window": 1, "min_stay": 2, "effect": "current", "threshold_down": None, "start": "small", "clear_on_switch": None
}  # fmt: skip


def span(value: float) -> Span:
    return Span(value, value - 0.01, value + 0.01)


def point(position: float, value: float, share: float, quality: float, seen: tuple[int, ...] = ()) -> Point:
    same = span(1.0)
    return Point(position, value, span(share), span(0.1 + 0.9 * share), same, same, span(quality), span(quality), seen)


BASIS = Basis("d" * 32, "some.jsonl", 40, "numeric", 0.0, 64, 0, span(1.0))
# At position 0 nothing is above the threshold; half of the means are above 1 bit, and all above 0.2.
CURVE = KnobCalibration(
    method="entropy_adaptive",
    knob="threshold",
    fixed=FIXED,
    basis=BASIS,
    grid=((0.0, 3.0), (0.5, 1.0), (1.0, 0.2)),
    points=(
        point(0.0, 3.0, 0.0, 0.60, (8, 2)),
        point(0.5, 1.0, 0.3, 0.90, (5, 5)),
        point(1.0, 0.2, 0.5, 0.96, (2, 8)),
    ),
    chosen=0.25,
    target={"large_share": 0.15},
    edges=(1.0,),
    drift_limit=0.25,
)
