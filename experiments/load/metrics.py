"""From records to figures: percentiles counted from the scheduled time, and goodput under an objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.load.records import LoadResult, Record

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective of a good answer: time to first token and time per output token, seconds."""

    ttft_s: float
    tpot_s: float

    def met_by(self, record: Record) -> bool:
        """Whether an answer came, and was fast enough in both; one token has no time between tokens."""
        if record.ttft_s is None or record.ttft_s > self.ttft_s:
            return False
        return record.tpot_s is None or record.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures.

    Attributes:
        offered: requests a second that the schedule held.
        answered: requests answered; with `errors` by code they add up to `requests`.
        goodput: answers a second that met the objective, over the length of the schedule.
        tokens_per_s: new tokens, from the first arrival to the last output.
        ttft_s, tpot_s, end_to_end_s: percentiles of what was answered, in seconds, by percent.
        send_lag_s: most that a request left after its time: what the client itself fell behind.
        client_cpu: cores the client used.
        void: the client was too busy; nothing here means anything.
    """

    client: str
    schedule: str
    offered: float
    requests: int
    answered: int
    errors: dict[str, int]
    goodput: float
    tokens_per_s: float
    ttft_s: dict[int, float]
    tpot_s: dict[int, float]
    end_to_end_s: dict[int, float]
    send_lag_s: float
    client_cpu: float
    void: bool


def summarise(result: LoadResult, objective: Objective) -> Summary:
    """The figures of a run. Failures count against goodput and are listed; they have no latency."""
    records, plan = result.records, result.plan
    answered = [record for record in records if record.error is None]
    last = max((record.last_s or 0.0 for record in answered), default=0.0)
    return Summary(
        client=plan.client,
        schedule=plan.schedule,
        offered=len(records) / plan.duration_s,
        requests=len(records),
        answered=len(answered),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        goodput=sum(objective.met_by(record) for record in records) / plan.duration_s,
        tokens_per_s=sum(record.tokens for record in answered) / last if last else 0.0,
        ttft_s=percentiles(record.ttft_s for record in answered),
        tpot_s=percentiles(record.tpot_s for record in answered),
        end_to_end_s=percentiles(record.end_to_end_s for record in answered),
        send_lag_s=max((record.sent_s - record.scheduled_s for record in records), default=0.0),
        client_cpu=result.client_cpu,
        void=result.void,
    )


def percentiles(values: Iterable[float | None], at: Sequence[int] = PERCENTILES) -> dict[int, float]:
    """Values that were observed, by nearest rank; empty without any."""
    known = [value for value in values if value is not None]
    if not known:
        return {}
    found = np.percentile(known, at, method="inverted_cdf")
    return {percent: float(value) for percent, value in zip(at, found, strict=True)}
