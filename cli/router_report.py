"""Tables of what was measured of a trained router on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from cli.output import print_table

CURVE = ("cost", "quality")  # numbers of a curve's points that have intervals
ERRORS = ("hard_sent_small", "easy_sent_large")  # the like, but None where no prompt could be sent wrongly


def _interval(found: dict[str, float]) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _point(point: dict[str, Any], name: str) -> str:
    """A number of a curve's point with its interval."""
    if point[name] is None:
        return "-"
    low, high = point[f"{name}_interval"]
    return f"{point[name]:.3f} [{low:.3f}, {high:.3f}]"


def show(report: dict[str, Any], place: Path) -> None:
    """Tables of what was measured on held-out prompts."""
    chances = {name: each for name, each in report["predictions"].items() if "auc" in each}
    if chances:
        _show_chances(chances)
    if "routing" in report:
        _show_routing(report["routing"])
    if "accuracy" in report:
        typer.echo(f"right strategy: {report['accuracy']:.1%}; always the commonest: {report['majority_accuracy']:.1%}")
    rows = report["rows"]
    typer.echo(f"{place}: trained on {rows['train']} prompts, calibrated on {rows['calibration']}")


def _show_chances(chances: dict[str, Any]) -> None:
    """How good each predicted chance is, and its reliability diagram."""
    print_table(
        ["prediction", ">prompts", ">base rate", ">AUC", ">calibration error", ">loss", ">loss of a constant"],
        [
            [
                name,
                each["num_prompts"],
                f"{each['base_rate']:.3f}",
                _interval(each["auc"]),
                _interval(each["expected_calibration_error"]),
                f"{each['loss']:.3f}",
                f"{each['constant_loss']:.3f}",
            ]
            for name, each in chances.items()
        ],
    )
    bins = [(name, each) for name, chance in chances.items() for each in chance["reliability"]]
    print_table(
        ["prediction", ">from", ">to", ">prompts", ">predicted", ">observed"],
        [
            [
                name,
                f"{each['low']:.1f}",
                f"{each['high']:.1f}",
                each["count"],
                f"{each['predicted']:.3f}",
                _interval(each["observed"]),
            ]
            for name, each in bins
        ],
    )


def _show_routing(routing: dict[str, Any]) -> None:
    """What sending requests to the large model is worth."""
    print_table(
        [">large share", ">worth from", ">cost", ">quality", ">random", ">oracle"],
        [
            [
                f"{p['share']:.0%}",
                f"{p['threshold']:.3f}",
                *(_point(p, key) for key in CURVE),
                *(f"{p[key]:.3f}" for key in ("random", "oracle")),
            ]
            for p in routing["curve"][::2]
        ],
    )
    print_table(
        [">large share", ">hard sent small", ">easy sent large"],
        [[f"{p['share']:.0%}", *(_point(p, key) for key in ERRORS)] for p in routing["curve"][::2]],
    )
    typer.echo(
        f"hard, only the large model is right: {routing['hard']:.1%} of the prompts;"
        f" easy, the small one is right: {routing['easy']:.1%}"
    )
    found = routing["recovered"]
    typer.echo(
        f"recovered share of the oracle's gain over random at the same cost: {_interval(found['all'])};"
        f" at a tenth to a half of the extra cost: {_interval(found['0.1-0.5'])}"
    )
