"""What intervals of differences say, in sentences: which ways are surely better or worse, which are neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from experiments.stats.intervals import Interval

Verdict = Literal["better", "worse", "open"]


def verdict(interval: Interval) -> Verdict:
    """What an interval of a difference says: better where all of it is above 0."""
    if interval.low > 0.0:
        return "better"
    return "worse" if interval.high < 0.0 else "open"


def sentences(what: str, found: Mapping[str, Mapping[str, Interval]]) -> str:
    """Say of each way in which cases its difference is surely above or below 0, and of which ways neither is shown.

    Args:
        what: what the differences are to, such as "one sample".
        found: by way, by case; one case without a name is not named.
    """
    said, named = [], set()
    for wanted in ("better", "worse"):
        ways = []
        for way, cases in found.items():
            at = [case for case, interval in cases.items() if verdict(interval) == wanted]
            if at:
                named.add(way)
                ways.append(f"{_quoted(way)} ({', '.join(at)})" if any(at) else _quoted(way))
        said.append(f"{wanted}: {', '.join(ways) or 'none'}")
    left = [_quoted(way) for way in found if way not in named]
    said.append(f"neither shown: {', '.join(left) or 'none'}")
    return f"Compared with {what}: {'; '.join(said)}."


def _quoted(way: str) -> str:
    return f'"{way}"' if " " in way else way
