"""What the route log says of many requests together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from turnout.errors import invalid

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that went the same way. Means and quantiles are over those that were answered; None without any.

    Attributes:
        kind: request, or shadow.
        pool: who answered.
        policy: which decided; "" where none did, as when limits were refused.
        version: of its rules or artifact.
        arm: of a split.
        method: what ran.
        requests: how many.
        share: of all of this kind and pool.
        answered: how many of them came to an end.
        large_share: mean of the tokens that the large model wrote, dropped ones included, per token of the answer.
        paper: mean cost, parameters per token written relative to the large model alone.
        flops: mean cost likewise, of all tokens processed.
        wall_p50_s: median time.
        wall_p95_s: time that 95% stay within.
        same_text: of shadows, the share whose text is the answer's.
    """

    kind: str
    pool: str
    policy: str
    version: str
    arm: str
    method: str
    requests: int
    share: float
    answered: int
    large_share: float | None
    paper: float | None
    flops: float | None
    wall_p50_s: float | None
    wall_p95_s: float | None
    same_text: float | None


def read_log(path: Path, field: str = "log") -> Iterator[Entry]:
    """The entries of a log; a line that was cut off at its end is passed over.

    Raises:
        TurnoutError: INVALID_ARGUMENT: no such file, or a line is no entry; names the line.
    """
    try:
        # Not splitlines: it would also cut at line separators inside texts, which JSON leaves as they are.
        *lines, rest = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(field, f"cannot read {path}: {error}") from None
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            if number > len(lines):
                return
            raise invalid(field, f"{path}, line {number}: is no JSON") from None
        if not isinstance(entry, dict) or not {"kind", "request_id", "decision", "outcome"} <= set(entry):
            raise invalid(field, f"{path}, line {number}: is no entry of a route log")
        yield entry


def summarise(entries: Iterable[Entry]) -> list[Group]:
    """Groups of entries, the largest of each kind first."""
    groups: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for entry in entries:
        decision = entry["decision"] or {}
        parts = (str(decision.get(name, "")) for name in ("policy", "version", "arm", "method"))
        kind, pool = entry["kind"], entry.get("pool", "")
        groups[kind, pool, *parts].append(entry)
        totals[kind, pool] += 1
    found = [_group(key, members, totals[key[0], key[1]]) for key, members in groups.items()]
    return sorted(found, key=lambda group: (group.kind, group.pool, -group.requests, group.arm, group.method))


def _group(key: tuple[str, ...], members: list[Entry], total: int) -> Group:
    kind, pool, policy, version, arm, method = key
    outcomes = [entry["outcome"] for entry in members if entry["outcome"].get("status") == "OK"]
    alike = [float(entry["same_text"]) for entry in members if "same_text" in entry]
    times = [outcome["wall_s"] for outcome in outcomes]
    flops = [o["flops"] / o["flops_large_only"] for o in outcomes if o["flops_large_only"]]
    return Group(
        kind, pool, policy, version, arm, method,
        requests=len(members),
        share=len(members) / total,
        answered=len(outcomes),
        large_share=_mean([outcome["large_share"] for outcome in outcomes]),
        paper=_mean([outcome["paper"] for outcome in outcomes]),
        flops=_mean(flops),
        wall_p50_s=float(np.quantile(times, 0.5)) if times else None,
        wall_p95_s=float(np.quantile(times, 0.95)) if times else None,
        same_text=_mean(alike),
    )  # fmt: skip


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None
