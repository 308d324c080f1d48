"""What requests used: a record of each, and what their tenants have spent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.access.spending import UNITS, Spending, period_start
from deployments.access.usage_record import Spent, UsageRecord
from deployments.access.usage_records import UsageRecords
from deployments.access.usage_sums import FolderSums
from turnout.access_config import Budget, UsageConfig
from turnout.calls import GenerateCall, Usage

if TYPE_CHECKING:
    from deployments.access.lease import Lease

RECENT = 0.1  # weight of the last request in what a token costs
LOOK_S = 5.0  # how often we look at what other processes record


@dataclass(slots=True)
class _Rates:
    """Recent cost of a token of each model, for requests without a known cost; 0.0 where it is not known."""

    flops: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0

    def learn(self, usage: Usage) -> None:
        spent, read = usage.cost.spent, usage.prompt_tokens - usage.cached_tokens
        self.flops = _mixed(self.flops, spent.flops, usage.prompt_tokens + usage.completion_tokens)
        self.write_s = _mixed(self.write_s, max(spent.wall_s - usage.ttft_s, 0.0), usage.completion_tokens)
        self.read_s = _mixed(self.read_s, usage.ttft_s, read)

    def spent(self, read: int, written: int, elapsed_s: float) -> Spent:
        """What a request cost, about; it cannot have been answered for longer than it was there."""
        wall_s = self.read_s * read + self.write_s * written
        return Spent(flops=self.flops * (read + written), wall_s=min(wall_s or elapsed_s, elapsed_s))


_UNKNOWN = _Rates()


def _mixed(rate: float, amount: float, tokens: int) -> float:
    new = amount / max(tokens, 1)
    return RECENT * new + (1 - RECENT) * rate if rate else new


class UsageLedger:
    """Records what requests used, and knows what tenants have spent.

    What other processes record is read at start, by sums, and then every few seconds: an ingress that is being replaced
    continues to answer what it has admitted.

    Args:
        config: where records are written; None: nowhere.
        now: the time.

    Raises:
        TurnoutError: usage cannot be recorded.
    """

    def __init__(self, config: UsageConfig | None, now: Callable[[], datetime]) -> None:
        self._now = now
        self._rates: dict[str, _Rates] = {}
        self._spending = Spending()
        self._records: UsageRecords | None = None
        self._over = threading.Event()
        if config is None:
            return
        self._records = UsageRecords(config)
        self._others = FolderSums(Path(config.folder).expanduser(), self._records.owns)
        self._look()
        self._thread = threading.Thread(target=self._watch, name="usage of others", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Records that are not written yet, those of running requests included."""
        return 0 if self._records is None else self._records.num_waiting

    def promise(self) -> None:
        """Keep room for one record; `ended` follows.

        Raises:
            TurnoutError: UNAVAILABLE: there is none.
        """
        if self._records is not None:
            self._records.promise()

    def ended(self, lease: Lease, outcome: str) -> None:
        """A request is over: what it used is recorded."""
        record = self._record(lease, outcome)
        self._spending.add(record)
        if self._records is not None:
            self._records.write(record)

    def spent(self, tenant: str, budget: Budget) -> float:
        """What a tenant has spent of a budget."""
        return self._spending.spent(tenant, budget, self._now())

    def expected(self, tokens: Mapping[str, int], unit: str) -> float:
        """Return the cost of tokens by model: of FLOPs and seconds by what the models' last requests cost."""
        if unit == "tokens":
            return sum(tokens.values())
        rates = ((self._rates.get(model, _UNKNOWN), count) for model, count in tokens.items())
        return sum(count * (each.flops if unit == "flops" else each.write_s) for each, count in rates)

    def used(self, tenant: str) -> dict[str, float]:
        """What a tenant has used this month, by unit."""
        return {unit: self.spent(tenant, Budget.model_validate({"amount": 1, "unit": unit})) for unit in UNITS}

    def flush(self) -> bool:
        """Wait until the records of what has ended are written; whether they were."""
        return self._records is None or self._records.flush()

    def close(self) -> None:
        """Write the records that wait."""
        self._over.set()
        if self._records is not None:
            self._records.close()
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        self._spending.take(self._others.since(period_start("month", self._now())).sums)

    def _record(self, lease: Lease, outcome: str) -> UsageRecord:
        call, usage = lease.call, lease.usage
        rates = self._rates.setdefault(call.model, _Rates())
        written = sum(lease.sources.values())
        values: dict[str, Any] = {"prompt_tokens": lease.prompt_tokens, "completion_tokens": written}
        if usage is not None:
            rates.learn(usage)
            cost = usage.cost.spent
            values = {
                "method": usage.method,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "cost": Spent(paper=cost.paper, flops=cost.flops, wall_s=cost.wall_s),
            }
        elif lease.prompt_tokens or written:
            values |= {"cost": rates.spent(lease.prompt_tokens, written, lease.elapsed_s), "estimated": True}
        generates = isinstance(call, GenerateCall)
        return UsageRecord(
            time=self._now(),
            request_id=call.request_id,
            kind="generate" if generates else "score",
            tenant=call.tenant,
            key_id=call.key_id,
            model=call.model,
            priority=lease.priority,
            batch_id=call.batch_id,
            tokens_by_model=dict(sorted(lease.sources.items())),
            outcome=outcome,
            **values,
        )
