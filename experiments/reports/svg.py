"""Charts as inline SVG: points with intervals, curves over load, bars by depth. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 170, 14, 44
COLOURS = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """A point: place, the ends of its interval upwards, and what is said when it is pointed at."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour, joined by a line or not; quiet ones are grey and have no intervals."""

    name: str
    marks: Sequence[Mark]
    joined: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """Labels at the sides."""

    x: str
    y: str
    logarithmic: bool = False


def chart(title: str, axes: Axes, series: Sequence[Series]) -> str:
    """A chart that a screen reader can name, with a legend; nothing where there is no point."""
    kept = [replace(each, marks=[mark for mark in each.marks if _drawable(mark, axes)]) for each in series]
    kept = [each for each in kept if each.marks]
    marks = [mark for each in kept for mark in each.marks]
    if not marks:
        return ""
    xs = [mark.x for mark in marks]
    ys = [y for mark in marks for y in (mark.y, mark.low, mark.high) if y is not None]
    across, up = _Scale.of(xs, LEFT, WIDTH - RIGHT), _Scale.of(ys, HEIGHT - BOTTOM, TOP, axes.logarithmic)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        *_grid(across, up, axes),
    ]
    for number, each in enumerate(kept):
        parts += _series(each, across, up, number)
    return "".join([*parts, "</svg>"])


def _drawable(mark: Mark, axes: Axes) -> bool:
    known = math.isfinite(mark.x) and math.isfinite(mark.y)
    return known and (mark.y > 0 or not axes.logarithmic)


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    @classmethod
    def of(cls, values: list[float], start: float, end: float, logarithmic: bool = False) -> _Scale:
        kept = [math.log10(max(v, 1e-9)) for v in values] if logarithmic else values
        low, high = min(kept), max(kept)
        room = (high - low) * 0.06 or 0.5
        return cls(low - room, high + room, start, end, logarithmic)

    def at(self, value: float) -> float:
        place = math.log10(max(value, 1e-9)) if self.logarithmic else value
        return self.start + (place - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            found = [10.0**p for p in range(math.ceil(self.low), math.floor(self.high) + 1)]
            return found or [10 ** ((self.low + self.high) / 2)]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def _grid(across: _Scale, up: _Scale, axes: Axes) -> list[str]:
    right, foot = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{foot - TOP}"/>']
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{foot}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{foot + 16}" text-anchor="middle">{tick:.4g}</text>')
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    middle = (TOP + foot) / 2
    parts.append(
        f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(axes.x)}</text>'
    )
    turned = f'transform="rotate(-90 14 {middle})" text-anchor="middle"'
    parts.append(f'<text class="axis" x="14" y="{middle}" {turned}>{escape(axes.y)}</text>')
    return parts


def _series(series: Series, across: _Scale, up: _Scale, number: int) -> list[str]:
    parts = [f'<g class="series {"quiet" if series.quiet else f"c{number % COLOURS}"}">']
    if series.joined and len(series.marks) > 1:
        path = " ".join(f"{across.at(m.x):.1f},{up.at(m.y):.1f}" for m in series.marks)
        parts.append(f'<polyline points="{path}"/>')
    for mark in series.marks:
        x, y = across.at(mark.x), up.at(mark.y)
        bounds = None if series.quiet or mark.low is None or mark.high is None else (mark.low, mark.high)
        if bounds is not None and all(map(math.isfinite, bounds)):
            ends = f'y1="{up.at(bounds[0]):.1f}" y2="{up.at(bounds[1]):.1f}"'
            parts.append(f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" {ends}/>')
        title = escape(mark.title or f"{series.name}: {mark.x:.4g}, {mark.y:.4g}")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" tabindex="0"><title>{title}</title></circle>')
    at = TOP + 10 + 15 * number
    if at < HEIGHT - BOTTOM:
        parts.append(f'<circle cx="{WIDTH - RIGHT + 14}" cy="{at - 4}" r="4"/>')
        parts.append(f'<text class="legend" x="{WIDTH - RIGHT + 24}" y="{at}">{escape(series.name[:24])}</text>')
    return [*parts, "</g>"]
