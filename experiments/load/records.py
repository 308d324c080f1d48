"""Plan and results of a load run, one request a record; both travel as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# A client busier than this measures itself: its own queue would be taken for the server's.
MAX_CLIENT_CPU = 0.7


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        client: "grpc" or "http".
        address: host:port of the endpoint.
        schedule: name in `experiments.load.schedule.SCHEDULES`.
        rate: requests a second, on average.
        duration_s: length of the schedule, seconds; the answers may take longer.
        seed: of the schedule.
        prompts: user messages, taken in turn.
        model: pool or model asked for.
        max_tokens: longest answer.
        drain_s: seconds after the last arrival before what is unfinished is given up.
    """

    client: str
    address: str
    schedule: str
    rate: float
    duration_s: float
    seed: int
    prompts: tuple[str, ...]
    model: str
    max_tokens: int
    drain_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Record:
    """One request, in seconds from the start of the schedule.

    Attributes:
        scheduled_s: when it should leave, and what every latency counts from.
        sent_s: when it did leave.
        first_s: arrival of its first output; None without any.
        last_s: arrival of its last output.
        tokens: new tokens of the answer.
        error: the server's code for a failure, e.g. RESOURCE_EXHAUSTED; None for an answer.
    """

    scheduled_s: float
    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from the scheduled time; None for a failure."""
        return None if self.error or self.first_s is None else self.first_s - self.scheduled_s

    @property
    def end_to_end_s(self) -> float | None:
        """Time to the last token from the scheduled time; None for a failure."""
        return None if self.error or self.last_s is None else self.last_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a failure and for a single token."""
        if self.error or self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass(slots=True)
class Used:
    """Sum of the usage that answers report."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: dict[str, int]) -> None:
        """Count one more answer.

        Args:
            usage: as the answer has it.
        """
        self.requests += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All records of a run, and cores the client used: while it sent or over the whole run, whichever is more."""

    plan: Plan
    records: tuple[Record, ...]
    client_cpu: float

    @property
    def void(self) -> bool:
        """Whether the client was too busy for its figures to mean anything."""
        return self.client_cpu > MAX_CLIENT_CPU

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoadResult:
        """Back from JSON."""
        plan = Plan(**{**values["plan"], "prompts": tuple(values["plan"]["prompts"])})
        return cls(plan, tuple(Record(**record) for record in values["records"]), values["client_cpu"])
