"""The harness of the benchmarks: sides that take turns, goals, result pages and one command line.

A benchmark describes its sides, measures them with `take_turns`, puts rows into a `Report`, and ends with

    if __name__ == "__main__":
        run(command_line(__doc__, RESULT), measure)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import uvloop
from rich.console import Console
from rich.markdown import Markdown

from experiments.machine import describe, one_line
from experiments.pairs import DEMO, OPTION
from experiments.stats.intervals import Interval, spread
from turnout.standard_streams import replace_unencodable

Reading = TypeVar("Reading")
Row = TypeVar("Row")
Cell = str | int | float | Interval | None
_PICTURE = "PICTURE"


@dataclass(frozen=True, slots=True)
class Side(Generic[Reading]):
    """One of several ways of doing the same work.

    Attributes:
        name: for the report.
        turn: does the work once and returns what was read; it gets the number of the round, 0 for the warm-up.
    """

    name: str
    turn: Callable[[int], Awaitable[Reading]]


@dataclass(frozen=True, slots=True)
class Turns(Generic[Reading]):
    """Readings by side, in the order of the rounds; those of the warm-up are dropped.

    Attributes:
        readings: of the sides that did all their turns.
        failures: by name of each other side, why it has none.
    """

    readings: Mapping[str, list[Reading]]
    failures: Mapping[str, str] = field(default_factory=dict)

    def spread(self, name: str, key: Callable[[Any], float] = float) -> Interval:
        """Median and extremes of a side's rounds; `key` makes a number of a reading."""
        return spread([key(each) for each in self.readings[name]])

    def ratio(self, name: str, over: str, key: Callable[[Any], float] = float) -> Interval:
        """Median and extremes of one side over another, round by round."""
        return spread(self.compared(name, over, lambda mine, other: key(mine) / key(other)))

    def compared(self, name: str, other: str, figure: Callable[[Any, Any], float]) -> list[float]:
        """A figure of two sides' readings of the same round, for each round."""
        pairs = zip(self.readings[name], self.readings[other], strict=True)
        return [figure(mine, theirs) for mine, theirs in pairs]


def blocking(work: Callable[[], Reading]) -> Callable[[int], Awaitable[Reading]]:
    """Make a turn of a function that does not wait on the event loop; it runs in the loop's own thread."""

    async def turn(_: int) -> Reading:
        return work()

    return turn


def turn_order(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield round and side, turn by turn: round 0 warms up, and each round begins with the next side."""
    for number in range(rounds + 1 if names else 0):
        start = number % len(names)
        for name in [*names[start:], *names[:start]]:
            yield number, name


async def take_turns(
    sides: Sequence[Side[Reading]],
    rounds: int,
    before: Callable[[int], Awaitable[None]] | None = None,
    warm_up: bool = True,
    may_fail: tuple[type[Exception], ...] = (),
) -> Turns[Reading]:
    """Measure all sides in each round, one at a time, in an order that rotates.

    Args:
        sides: at least one, each with a name of its own.
        rounds: that count; one more, which comes first, warms up.
        before: called with the round's number before its first turn.
        warm_up: False leaves that first round out.
        may_fail: exceptions that take a side out of the comparison; any other ends it.

    Raises:
        ValueError: two sides have one name.
    """
    by_name = {side.name: side for side in sides}
    if len(by_name) < len(sides):
        raise ValueError(f"sides: each needs a name of its own, got {[side.name for side in sides]}")
    readings: dict[str, list[Reading]] = {name: [] for name in by_name}
    failures: dict[str, str] = {}
    begun = -1
    for number, name in turn_order(list(by_name), rounds):
        if name in failures or not (number or warm_up):
            continue
        if before is not None and number != begun:
            await before(number)
        begun = number
        try:
            reading = await by_name[name].turn(number)
        except may_fail as error:
            failures[name] = str(error)
            del readings[name]
            continue
        if number:
            readings[name].append(reading)
    return Turns(readings, failures)


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a figure: at least a value, or at most."""

    value: float
    at_most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:g}"

    def met(self, figure: float | Interval) -> str:
        """Whether the figure, or the median of an interval, reaches the goal: yes or no."""
        value = figure.value if isinstance(figure, Interval) else figure
        return "yes" if (value <= self.value if self.at_most else value >= self.value) else "no"

    def surely_met(self, figure: Interval) -> str:
        """Whether the whole interval reaches the goal: yes, no where none of it does, else open."""
        ends = {self.met(figure.low), self.met(figure.high)}
        return ends.pop() if len(ends) == 1 else "open"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A side next to the one it is compared with.

    Attributes:
        case: what was measured, by column.
        figures: median and extremes of each side, the one that the other is compared with first.
        ratio: of the second side over the first, round by round.
        goal: of the ratio.
        more: further columns.
    """

    case: dict[str, Any]
    figures: dict[str, Interval]
    ratio: Interval
    goal: Goal | None = None
    more: dict[str, Cell] = field(default_factory=dict)


async def compare(
    case: dict[str, Any],
    sides: tuple[Side[float], Side[float]],
    rounds: int,
    goal: Goal | None = None,
    before: Callable[[int], Awaitable[None]] | None = None,
) -> Comparison:
    """Let two sides take turns; see `Comparison` and `take_turns`."""
    note(", ".join(f"{name} {value}" for name, value in case.items()))
    turns = await take_turns(sides, rounds, before)
    base, other = (side.name for side in sides)
    return Comparison(case, {name: turns.spread(name) for name in (base, other)}, turns.ratio(other, base), goal)


def shown(value: float | Interval, digits: int = 0, scale: float = 1, unit: str = "") -> str:
    """Write a figure times `scale`, an interval as its value with both ends."""
    if not isinstance(value, Interval):
        return f"{scale * value:,.{digits}f}{unit}"
    low, high = (f"{scale * end:,.{digits}f}" for end in (value.low, value.high))
    return f"{scale * value.value:,.{digits}f}{unit} [{low}, {high}]"


def signed(value: Interval) -> str:
    """Write a difference, with its sign and both ends."""
    return f"{value.value:+.3f} [{value.low:+.3f}, {value.high:+.3f}]"


class Report:
    """A page of results, and the numbers it was made from.

    Args:
        title: of the page.
        how: the command and how the figures were obtained; the line about the machine follows.
        device: torch device that the work ran on.
        machine: as `experiments.machine.describe` found it before the work; None: as it is now.

    Attributes:
        values: for the JSON file.
        failures: what is not as it must be; any of them makes the exit status 1.
    """

    def __init__(self, title: str, how: str, device: str = "cpu", machine: dict[str, str] | None = None) -> None:
        machine = machine or describe(device)
        self.values: dict[str, Any] = {"machine": machine}
        self.failures: list[str] = []
        self._draw: Callable[[Path], None] | None = None
        self._parts = [f"# {title}", how, f"Machine: {one_line(machine)}."]
        if float(machine.get("load average at start", 0)) > int(machine.get("cores", 1)):
            self.text("The machine was busy with other work: times are uncertain, ratios less; bytes and counts hold.")

    def section(self, title: str) -> None:
        """Begin a section."""
        self._parts.append(f"## {title}")

    def text(self, paragraph: str) -> None:
        """Add a paragraph, or a list of lines."""
        self._parts.append(paragraph)

    def facts(self, rows: Mapping[str, Cell]) -> None:
        """Add a table of names and values; it is not in the JSON file."""
        self.table(None, list(rows.items()), {"": lambda row: row[0], " ": lambda row: row[1]})

    def picture(self, title: str, draw: Callable[[Path], None]) -> None:
        """Add the page's picture, which is drawn where the page is saved and has its name."""
        self._draw = draw
        self._parts.append(f"![{title}]({_PICTURE})")

    def table(self, name: str | None, rows: Sequence[Row], columns: Mapping[str, Callable[[Row], Cell]]) -> None:
        """Add a table; the rows go into the JSON file too.

        Args:
            name: of the rows in the JSON file; None: they are not in it.
            rows: dataclasses, or values of JSON.
            columns: how each column makes its cell of a row; numbers are written with three digits.
        """
        if name is not None:
            self.values[name] = [
                asdict(row) if is_dataclass(row) and not isinstance(row, type) else row for row in rows
            ]
        cells = [[_cell(make(row)) for make in columns.values()] for row in rows]
        numeric = [
            any(column) and all(cell.lstrip("-+")[:1].isdigit() for cell in column if cell)
            for column in ([line[place] for line in cells] for place in range(len(columns)))
        ]
        lines = [list(columns), ["---:" if right else "---" for right in numeric], *cells]
        self._parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))

    def comparisons(self, name: str, rows: Sequence[Comparison], unit: str, digits: int = 2, scale: float = 1) -> None:
        """Add a table of comparisons: cases, figures times `scale` in `unit`, ratios with `digits`, goals."""
        columns: dict[str, Callable[[Comparison], Cell]] = {}
        for key in rows[0].case:
            columns[key] = partial(lambda key, row: row.case[key], key)
        for side in rows[0].figures:
            columns[f"{side}, {unit}"] = partial(lambda side, row: shown(row.figures[side], 0, scale), side)
        columns["ratio"] = lambda row: shown(row.ratio, digits)
        for key in rows[0].more:
            columns[key] = partial(lambda key, row: row.more[key], key)
        if any(row.goal for row in rows):
            columns["goal"] = lambda row: f"{row.goal.value:g}" if row.goal else None
            columns["met"] = lambda row: row.goal.met(row.ratio) if row.goal else None
        self.table(name, rows, columns)

    def markdown(self, stem: str = "result") -> str:
        """The page; `stem` names its file and its picture."""
        return "\n\n".join(self._parts).replace(f"]({_PICTURE})", f"]({stem}.png)") + "\n"

    def save(self, out: Path, values: Mapping[str, Any] | None = None) -> None:
        """Write the page, the JSON file and the picture.

        Args:
            out: place of the page, whatever the suffix.
            values: more for the JSON file.
        """
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".md").write_text(self.markdown(out.stem), encoding="utf-8")
        numbers = json.dumps({**self.values, **(values or {})}, indent=2)
        out.with_suffix(".json").write_text(numbers + "\n", encoding="utf-8")
        if self._draw is not None:
            self._draw(out.with_suffix(".png"))


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def command_line(
    text: str | None,
    result: Path,
    rounds: int | None = 5,
    takes_pair: bool = False,
    demo_only: str = "",
    **quick: Any,
) -> argparse.ArgumentParser:
    """Make the options that every benchmark has; a benchmark adds its own.

    Args:
        text: the help; its first paragraph is shown.
        result: the page that a run writes.
        rounds: that count; None: the benchmark repeats nothing.
        takes_pair: whether `--pair` chooses the models, for `experiments.pairs.open_pair`.
        demo_only: why it measures nothing on another pair than the demo's; `--pair` is refused with it.
        quick: what `--quick` sets of options that are not given, besides `rounds`, which becomes 1.
    """
    parser = argparse.ArgumentParser(description=text)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"that count; absent: {rounds}, 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="a short run; shown and not saved")
    parser.add_argument("--out", type=Path, help=f"the page, with a JSON file; absent: {result}, nowhere with --quick")
    parser.add_argument("--no-write", action="store_true", help="save nothing")
    if takes_pair or demo_only:
        parser.add_argument("--pair", default=DEMO, help=f"only {DEMO}: {demo_only}" if demo_only else OPTION)
    parser.set_defaults(_demo_only=demo_only)
    parser.set_defaults(_quick=quick if rounds is None else {"rounds": 1, **quick}, _result=result)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `out` is the place of the page, or None where nothing is saved.

    A run on another device than the processor, or on another pair than the demo's, has a page of its own.
    """
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**options._quick)
        options = parser.parse_args(arguments)
    pair = Path(getattr(options, "pair", DEMO)).stem
    if options._demo_only and pair != DEMO:
        parser.error(f"--pair must be {DEMO}: {options._demo_only}")
    if options.no_write:
        options.out = None
    elif options.out is None and not options.quick:
        device = getattr(options, "device", "cpu")
        result: Path = options._result
        marks = [mark for mark, usual in ((device, "cpu"), (pair, DEMO)) if mark != usual]
        options.out = result.with_stem("-".join([result.stem, *marks]).replace(":", "-"))
    return options


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Report | Awaitable[Report]],
    arguments: Sequence[str] | None = None,
) -> Report:
    """Read the command line, measure, save the page where there is a place for it, and show it.

    Raises:
        SystemExit: the report has failures.
    """
    options = parse(parser, arguments)

    async def awaited(made: Awaitable[Report]) -> Report:
        return await made

    made = measure(options)
    report = made if isinstance(made, Report) else uvloop.run(awaited(made))
    if options.out is not None:
        asked = vars(options).items()
        given = {name: value for name, value in asked if name not in ("out", "no_write") and name[0] != "_"}
        values = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        report.save(options.out, {"options": values})
    show(report.markdown(Path(options.out or options._result).stem))
    if report.failures:
        raise SystemExit("; ".join(report.failures))
    return report


def show(markdown: str) -> None:
    """Print a result page; tables are drawn where the terminal allows it."""
    replace_unencodable()
    console = Console()
    if console.is_terminal:
        console.print(Markdown(markdown))
    else:
        console.out(markdown)


def note(text: str) -> None:
    """Say on stderr how far a long run is."""
    replace_unencodable()
    Console(stderr=True, highlight=False).print(text, style="dim")
