"""Inputs of the simulator: measured costs of steps, hops, transfers and processes, and what had to be assumed."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from engine.costs.step_time import StepCost, StepTime


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Forward(_Part):
    """Duration of a model's forward: `engine.costs.step_time.StepCost`, in seconds."""

    base: float
    knots: tuple[int, ...] = (1,)
    slopes: tuple[float, ...] = (0.0,)
    per_attended: float = 0.0
    per_read: float = 0.0
    read_cap: int = 128
    per_sequence: float = 0.0

    def times(self) -> StepTime:
        """The predictor."""
        return StepTime(StepCost(**self.model_dump()))


class Pair(_Part):
    """The two models of a pool and their engine.

    Attributes:
        small, large: their forwards.
        step_s: what a step costs in addition to its forward.
        row_s: ... and each row of it.
        kv_bytes: of one token in both models' caches.
        cache_tokens: that a replica keeps of finished prompts.
        max_batch, token_budget, max_slowdown: as in `engine.scheduler.limits.Limits`.
    """

    small: Forward
    large: Forward
    step_s: float
    row_s: float
    kv_bytes: float
    cache_tokens: int
    max_batch: int = 64
    token_budget: int = 512
    max_slowdown: float = 1.75


class Way(_Part):
    """Method of a pool: drafts of `draft` tokens, each accepted with probability `acceptance`; draft 0: plain.

    Attributes:
        draft_bytes: what of a drafted token goes from the small model's actor to the large one's before the draft is
            judged: its distribution, where it is judged by rejection.
    """

    draft: int
    acceptance: float
    draft_bytes: float = 0.0


class Hop(_Part):
    """Between the coordinator and a model's actor, in seconds of one operation there and back.

    Attributes:
        transit_s: time on the way.
        coordinator_s: CPU time of the coordinator's event loop.
    """

    transit_s: float
    coordinator_s: float


class Link(_Part):
    """A transfer of n bytes takes `latency_s + n / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Of one transfer."""
        return self.latency_s + nbytes / self.bytes_per_s


class Work(_Part):
    """CPU time of a process, in seconds: for each request, and for each chunk of an answer that it passes on."""

    request_s: float
    chunk_s: float


class Control(_Part):
    """Serve's controller, one process, in CPU seconds per second.

    Attributes:
        idle: with no replica.
        per_replica: for each.
        stats_bytes: size of a replica's report to the process that chooses.
        stats_period_s: time between two of them.
        byte_s: CPU time to send one byte of it to one process that chooses.
    """

    idle: float
    per_replica: float
    stats_bytes: float
    stats_period_s: float
    byte_s: float


class Choice(_Part):
    """CPU time of a process that chooses among replicas, in seconds.

    Attributes:
        base_s, per_replica_s: of one choice.
        hear_s: for each replica that has said something new.
    """

    base_s: float
    per_replica_s: float
    hear_s: float


class Prices(_Part):
    """Of an hour, in any one currency; assumed."""

    pool: float = 4.0
    front: float = 0.4
    head: float = 0.8


class Observed(_Part):
    """One pool in one process, under a number of requests at once: what the simulator is to predict."""

    draft: int
    concurrency: int
    prompt: int
    answer: int
    tokens_per_s: float
    fitted: bool


class Costs(_Part):
    """Everything. `sources` says of each part where it comes from.

    Attributes:
        observed: runs of a real pool.
        front_cores: of a machine that runs proxies and ingress processes.
        store: one server of the prefix store.
    """

    pair: Pair
    way: Way
    hop: Hop
    transfer: Link
    proxy: Work
    ingress: Work
    replica: Work
    control: Control
    choice: Choice
    store: Link
    front_cores: int = 8
    prices: Prices = Prices()
    observed: tuple[Observed, ...] = ()
    sources: dict[str, str] = {}


DEFAULT = Path(__file__).parent / "costs.json"


def load(path: Path = DEFAULT) -> Costs:
    """Read and check a file of costs."""
    return Costs.model_validate_json(path.read_text())
