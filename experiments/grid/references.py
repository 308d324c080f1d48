"""Times of single requests alone on a pool's models, measured once: a time base for all ways (paper #201)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.costs.ideal_latency import IdealisedRuntime, denoised, measure, request_timer
from engine.costs.report import REQUESTS
from experiments import machine
from experiments.grid.cells import Record
from pool.local_pool import LocalPool


@dataclass(frozen=True, slots=True)
class Reference:
    """The idealised runtimes of a pool's models.

    Attributes:
        key: of all that they depend on (`experiments.grid.depends.reference_key`).
        machine: what they were measured on, for people.
        runtimes: by model.
        errors: by model, the largest relative error at requests that the runtime was not fitted to; None: none fits.
    """

    key: str
    machine: dict[str, str]
    runtimes: dict[str, IdealisedRuntime]
    errors: dict[str, float | None]

    def seconds(self, record: Record) -> float | None:
        """Idealised runtime of an answer: each token charged to the model that wrote it, as the paper meter does.

        What one model read of the other's text is not in it. None where there is no such time: there is no answer, a
        draft was checked (a round of it is no decoding step), or a model was not measured.
        """
        writers = {name: count for name, count in record.generated.items() if count}
        if not writers or record.rounds or not writers.keys() <= self.runtimes.keys():
            return None
        return sum(self._written(self.runtimes[name], record, count) for name, count in writers.items())

    @staticmethod
    def _written(runtime: IdealisedRuntime, record: Record, count: int) -> float:
        """Prefill, and tokens that lie anywhere in the answer: at its middle, on average."""
        middle = record.prompt_tokens + record.tokens / 2
        decoding = (count - 1) * (runtime.per_token_s + runtime.per_position_s * middle)
        return runtime.prefill_s(record.prompt_tokens) + decoding

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Reference:
        """From plain data."""
        runtimes = {
            name: IdealisedRuntime(
                tuple(each["prompts"]), tuple(each["first_token_s"]), each["per_token_s"], each["per_position_s"]
            )
            for name, each in values["runtimes"].items()
        }
        return cls(values["key"], values["machine"], runtimes, values["errors"])


async def measure_reference(pool: LocalPool, key: str) -> Reference:
    """Measure each model of an idle pool, alone; some seconds for each.

    Args:
        pool: idle.
        key: of what is measured.
    """
    runtimes, errors = dict[str, IdealisedRuntime](), dict[str, float | None]()
    for name, model in pool.engines.items():
        timer = request_timer(model, model.vocab_size)
        runtimes[name] = await measure(timer, model.max_length)
        fitting = [pair for pair in REQUESTS if sum(pair) <= model.max_length]
        measured = await denoised(timer, fitting)
        wrong = [abs(runtimes[name].seconds(*pair) / seconds - 1.0) for pair, seconds in measured.items()]
        errors[name] = max(wrong, default=None)
    return Reference(key, machine.describe(), runtimes, errors)
