"""One cell of an experiment: what is asked of whom, and the address that all it depends on gives it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from typing import Any

from experiments.grid.spec import DatasetChoice, LoadChoice
from turnout.types import SamplingParams

FORMAT = 2  # of what a record holds: 2 counts dropped tokens of the large model in `by_large`
LIKELIHOOD = "likelihood"
# Of sampling, since the format is this one.
ADDED_SAMPLING = (
    *("allowed_token_ids", "bad_word_ids", "bad_words", "include_stop_str_in_output", "min_tokens"),
    *("processors", "skip_special_tokens", "thinking_token_budget", "truncate_prompt_tokens"),
)
# Figures of `Utilisation` that add up.
SUMS = ("sampled_s", "samples", "memory_byte_s", "cpu_s", "machine_cpu_s")


@dataclass(frozen=True, slots=True)
class Cell:
    """A way of answering, on a pool, asked a dataset under a load, with a seed.

    Attributes:
        label: the way's name in reports; no part of the address.
        method: that answers; where a policy chooses one, `AUTO`.
        params: of the method, or of the policy.
        chunk: prompts that are saved together.
        depends: digests of what else the outcome depends on: config, code, models, dataset, machine.
        policy: that routes; empty where the method is named.
    """

    pool: str
    label: str
    method: str
    params: dict[str, Any] = field(hash=False)
    dataset: DatasetChoice = field(hash=False)
    load: LoadChoice = field(hash=False)
    seed: int = 0
    sampling: SamplingParams = field(default=SamplingParams(), hash=False)
    chunk: int = 16
    depends: dict[str, str] = field(default_factory=dict, hash=False)
    policy: str = ""

    @property
    def family(self) -> str:
        """What ways of answering that differ only in parameters have in common."""
        return f"route {self.policy}" if self.policy else self.method

    @property
    def name(self) -> str:
        """For people, and to find the same cell in another experiment."""
        return f"{self.pool} / {self.label} / {self.dataset.label} / {self.load.label} / seed {self.seed}"

    @property
    def likelihood(self) -> bool:
        """Whether its scores are log-likelihoods, in nats a token, and not from 0 to 1."""
        return self.dataset.scorer is not None and self.dataset.scorer.kind == LIKELIHOOD

    @property
    def place(self) -> tuple[str, str, str, int]:
        """Cells that differ only in the way of answering have the same: they are compared."""
        return (self.pool, self.dataset.label, self.load.label, self.seed)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "pool": self.pool,
            "label": self.label,
            "method": self.method,
            "params": self.params,
            "dataset": self.dataset.model_dump(mode="json"),
            "load": self.load.model_dump(mode="json"),
            "seed": self.seed,
            "sampling": _plain(self.sampling),
            "chunk": self.chunk,
            "depends": self.depends,
            "policy": self.policy,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """From plain data."""
        dataset = DatasetChoice.model_validate(values["dataset"])
        load, sampling = LoadChoice.model_validate(values["load"]), SamplingParams.model_validate(values["sampling"])
        return cls(**{**values, "dataset": dataset, "load": load, "sampling": sampling})

    @property
    def address(self) -> str:
        """Names the cell by all its outcome depends on: 24 hexadecimal digits.

        Where a dataset lies and what it and the way of answering are called decides nothing.
        """
        values = self.as_dict()
        del values["label"]
        values["dataset"] = self.dataset.chat
        text = json.dumps({"format": FORMAT, **values}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _plain(sampling: SamplingParams) -> dict[str, Any]:
    """Plain data, in which what a cell of the format may lack stands only where it is not the default."""
    unset = {name for name in ADDED_SAMPLING if getattr(sampling, name) == SamplingParams.model_fields[name].default}
    return sampling.model_dump(mode="json", exclude=unset)


@dataclass(slots=True)
class Record:
    """One prompt's answer.

    Attributes:
        id: of the row.
        score: None where it could not be scored.
        text: the answer.
        tokens: of it.
        by_large: written by the large model, those included that a switch dropped or that were thrown away.
        paper: parameters charged for its tokens, in tokens of the large model.
        flops: of all processed.
        flops_large_only: what the large model alone would have taken.
        wall_s: seconds.
        ttft_s: to the first token, seconds.
        switches: hand-overs.
        rounds: of speculation.
        drafted_at: rounds whose draft reached so deep, by depth.
        accepted_at: rounds that accepted so deep, by depth.
        pieces: (model, kind, text) of stretches of tokens.
        error: why there is no answer; it counts as a wrong one.
        note: why there is no score, or a word about it.
        again: whether what kept it from being scored may pass: the next run has it scored again.
        prompt_tokens: of what was asked.
        generated: tokens by the model that wrote them, in vain or not; a model that worked and wrote none has 0.
    """

    id: str
    score: float | None = None
    text: str = ""
    tokens: int = 0
    by_large: int = 0
    paper: float = 0.0
    flops: float = 0.0
    flops_large_only: float = 0.0
    wall_s: float = 0.0
    ttft_s: float = 0.0
    switches: int = 0
    rounds: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    pieces: list[tuple[str, str, str]] = field(default_factory=list)
    error: str = ""
    note: str = ""
    again: bool = False
    prompt_tokens: int = 0
    generated: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Utilisation:
    """Resources used while a cell was answered, as sums: those of a cell that is resumed add up.

    Attributes:
        sampled_s: seconds that the samples of memory span.
        samples: how many there are.
        memory_byte_s: memory in use, summed over time.
        cpu_s: processor time of this process.
        machine_cpu_s: processor time of everything on the machine.
        memory_peak_bytes: most in use at a sample.
        period_s: between two samples.
        memory_total_bytes: that there is for models and caches.
        cores: processors that this process may use.
        peak_flops_per_s: of matrix products, measured here.
        weight_bytes: by model.
        idle_s: how long the machine was watched before the first answer, with all models loaded.
        idle_memory_bytes: in use then.
        idle_cores: processors at work then, for whomever.
        idle_watts: power then; None: the machine has no meter.
    """

    sampled_s: float = 0.0
    samples: int = 0
    memory_byte_s: float = 0.0
    cpu_s: float = 0.0
    machine_cpu_s: float = 0.0
    memory_peak_bytes: int = 0
    period_s: float = 0.0
    memory_total_bytes: int = 0
    cores: int = 0
    peak_flops_per_s: float = 0.0
    weight_bytes: dict[str, int] = field(default_factory=dict)
    idle_s: float = 0.0
    idle_memory_bytes: int = 0
    idle_cores: float = 0.0
    idle_watts: float | None = None

    def add(self, more: Utilisation) -> None:
        """Add what came later; of what does not add up, the later holds."""
        sums = {name: getattr(self, name) + getattr(more, name) for name in SUMS}
        peak = max(self.memory_peak_bytes, more.memory_peak_bytes)
        for each in fields(more):
            setattr(self, each.name, getattr(more, each.name))
        for name, value in sums.items():
            setattr(self, name, value)
        self.memory_peak_bytes = peak


@dataclass(slots=True)
class Facts:
    """Measurements of a cell as a whole.

    Attributes:
        wall_s: seconds that answering took, all chunks together.
        energy_j: joules that the machine's meters counted meanwhile; None: it has none.
        stopped: why it ended before its last prompt; empty where it did not.
        sequence: ends of the stop rule's interval of the difference, which holds whenever it stops; None: no rule.
        load: figures of an open-loop run (`experiments.load.metrics.Summary`), or None.
        machine: what it ran on, for people.
        utilisation: what the machine gave meanwhile; None: it was not watched.
        unscored: answers that the next run has scored again.
    """

    wall_s: float = 0.0
    energy_j: float | None = None
    stopped: str = ""
    sequence: list[float] | None = None
    load: dict[str, Any] | None = None
    machine: dict[str, str] = field(default_factory=dict)
    utilisation: Utilisation | None = None
    unscored: int = 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Facts:
        """From plain data; figures that only an earlier version kept are left out."""
        kept = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        watched = kept.get("utilisation")
        return cls(**{**kept, "utilisation": Utilisation(**watched) if watched else None})
