"""The file that describes an experiment."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, FiniteFloat, Tag, model_validator

from experiments.grid.scoring import JudgeChoice, ScorerChoice
from turnout.config import Section, TurnoutConfig, load_config, read_yaml
from turnout.registry import validated
from turnout.types import SamplingParams

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Group = Literal["registered", "speculation"]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Values = Annotated[list[Any], Field(min_length=1)]


# What a way of answering may have of its own of how tokens are chosen; length and ends are the same for all.
CHOOSING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Arm(NamedTuple):
    """One combination of an axis: what it is called, its parameters, and its sampling where it has one of its own."""

    label: str
    params: dict[str, Any]
    sampling: dict[str, Any]


class Axis(Section):
    """Something with parameters, and values of these to try: every combination is one way of answering."""

    params: dict[str, Any] = Field(default_factory=dict, description="parameters that stay the same")
    grid: dict[str, Values] = Field(default_factory=dict, description="values to try, by parameter")
    sampling: dict[str, Any] = Field(
        default_factory=dict, description=f"how it chooses tokens, other than the rest: {', '.join(CHOOSING)}"
    )
    sampling_grid: dict[str, Values] = Field(default_factory=dict, description="values of these to try")
    seeds: Annotated[
        tuple[Seed, ...] | None, Field(min_length=1, description="of what it draws; absent: the experiment's")
    ] = None
    label: Annotated[Name | None, Field(description="name in reports; absent: what it is and what is tried")] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for fixed, tried, name in ((self.params, self.grid, ""), (self.sampling, self.sampling_grid, "sampling_")):
            both = sorted(set(fixed) & set(tried))
            if both:
                raise ValueError(f"{both[0]} stands in {name.rstrip('_') or 'params'} and in {name}grid")
        unknown = sorted({*self.sampling, *self.sampling_grid} - set(CHOOSING))
        if unknown:
            raise ValueError(f"sampling: {unknown[0]!r} must be one of {', '.join(CHOOSING)}: the rest is of all ways")
        return self

    @property
    def words(self) -> str:
        """What it is."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """How many ways of answering it is."""
        return math.prod(len(values) for values in (*self.grid.values(), *self.sampling_grid.values()))

    @property
    def family(self) -> str:
        """What its settings are settings of: a sampling of its own makes it another."""
        return self.label or "+".join([self.words, *self.sampling, *self.sampling_grid])

    def arms(self) -> list[Arm]:
        """Each of them."""
        found = []
        for values in itertools.product(*self.grid.values(), *self.sampling_grid.values()):
            tried = dict(zip(self.grid, values, strict=False))
            drawn = dict(zip(self.sampling_grid, values[len(tried) :], strict=True))
            said = {**tried, **drawn} if self.label else {**tried, **self.params, **drawn, **self.sampling}
            words = [self.label or self.words, *(f"{name}={value}" for name, value in said.items())]
            found.append(Arm(" ".join(words), {**self.params, **tried}, {**self.sampling, **drawn}))
        return found


class MethodAxis(Axis):
    """A decoding method."""

    name: Annotated[str, Field(description="as in `turnout methods`")]

    @property
    def words(self) -> str:
        """See `Axis.words`."""
        return self.name


class PolicyAxis(Axis):
    """A routing policy, which chooses a method for each prompt."""

    policy: Annotated[str, Field(description="as in docs/routing.md")]

    @property
    def words(self) -> str:
        """See `Axis.words`."""
        return f"route {self.policy}"


def _kind(entry: Any) -> str:
    """Which of the entries of `methods` is meant."""
    if isinstance(entry, str):
        return "group"
    policy = entry.get("policy") if isinstance(entry, dict) else getattr(entry, "policy", None)
    return "method" if policy is None else "policy"


Entry = Annotated[
    Annotated[Group, Tag("group")] | Annotated[MethodAxis, Tag("method")] | Annotated[PolicyAxis, Tag("policy")],
    Discriminator(_kind),
]


class DatasetChoice(Section):
    """Prompts and how answers to them are scored: a demo task, or a file."""

    name: Annotated[Name | None, Field(description="in reports; absent: the task's or the file's name")] = None
    demo: Annotated[
        Literal["arithmetic", "edits", "lists", "passages", "templates"] | None, Field(description="a shipped task")
    ] = None
    path: Annotated[str | None, Field(description="a file of JSON lines (.jsonl) or Parquet (.parquet)")] = None
    prompt: Annotated[str, Field(description="field of a row that holds the prompt")] = "prompt"
    id: Annotated[str, Field(description="field that names a row; where no row has it: its number")] = "id"
    chat: Annotated[bool, Field(description="ask as a chat message; false: continue the text")] = True
    count: Annotated[int | None, Field(ge=1, description="only the first ones; absent: all, 40 of a task")] = None
    scorer: Annotated[ScorerChoice | None, Field(description="how answers are scored; a task brings its own")] = None

    @model_validator(mode="after")
    def _check(self) -> DatasetChoice:
        if (self.demo is None) == (self.path is None):
            raise ValueError("give either demo or path")
        if self.path is not None and self.scorer is None:
            raise ValueError("a file needs a scorer")
        if self.demo is not None and self.scorer is not None:
            raise ValueError("a demo task brings its own scorer")
        return self

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.name or self.demo or Path(str(self.path)).stem


class LoadChoice(Section):
    """Arrival of prompts: a number at once, or on a schedule that does not wait for answers."""

    at_once: Annotated[int, Field(ge=1, le=1024, description="prompts answered at once, without a rate")] = 8
    rate: Annotated[FiniteFloat | None, Field(gt=0, description="requests a second on average")] = None
    schedule: Annotated[Literal["poisson", "constant", "bursts"], Field(description="of the arrivals")] = "poisson"
    duration_s: Annotated[FiniteFloat, Field(gt=0, le=3600, description="length of the schedule, seconds")] = 10.0
    ttft_s: Annotated[FiniteFloat, Field(gt=0, description="objective: time to first token, seconds")] = 0.5
    tpot_s: Annotated[FiniteFloat, Field(gt=0, description="objective: time per output token, seconds")] = 0.05

    @property
    def label(self) -> str:
        """Name in reports."""
        if self.rate is None:
            return f"{self.at_once} at once"
        return f"{self.schedule} {self.rate:g}/s for {self.duration_s:g} s"


class StopRule(Section):
    """When a cell may end before its last prompt: as soon as its difference from the baseline is known well enough.

    Looked at after each chunk by a confidence sequence, so that looking often costs no false alarm.
    """

    margin: Annotated[FiniteFloat, Field(gt=0, le=1, description="difference in quality that matters")] = 0.02
    alpha: Annotated[
        FiniteFloat, Field(gt=0, lt=1, description="chance of any wrong stop, over all looks at all cells")
    ] = 0.05


class ExperimentSpec(Section):
    """A grid: every combination of pool, way of answering, dataset, load and seed is a cell."""

    name: Annotated[Name, Field(description="of the experiment, among others in the same folder")]
    config: Annotated[str | None, Field(description="configuration with models and pools; absent: the demo pair")] = (
        None
    )
    pools: Annotated[tuple[str, ...], Field(description="names in the configuration; absent: all of them")] = ()
    methods: Annotated[
        list[Entry],
        Field(min_length=1, description="registered: every method; speculation: every speculative part"),
    ]
    left_out: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict, description="ways of `registered` and `speculation` that are not run, by label, and why"
    )
    baseline: Annotated[str, Field(description="label of the way of answering that others are compared with")] = "plain"
    datasets: Annotated[list[DatasetChoice], Field(min_length=1, description="what is asked")]
    loads: Annotated[tuple[LoadChoice, ...], Field(min_length=1, description="how prompts arrive")] = (LoadChoice(),)
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, description="of what is drawn")] = (0,)
    sampling: Annotated[SamplingParams, Field(description="of every answer")] = SamplingParams(
        temperature=0.0, max_tokens=160
    )
    chunk: Annotated[int, Field(ge=1, le=10_000, description="prompts that are saved together")] = 16
    workers: Annotated[int, Field(ge=0, le=4096, description="Ray actors that run cells; 0: this process")] = 1
    gpus: Annotated[float, Field(ge=0, description="of each worker")] = 0.0
    stop: Annotated[StopRule | None, Field(description="when to end a cell early; absent: never")] = None
    idealised: Annotated[
        bool, Field(description="whether to measure once, before the cells, what single requests take on each pool")
    ] = False
    max_cells: Annotated[int, Field(ge=1, description="more missing cells than this are asked about first")] = 500
    margin: Annotated[FiniteFloat, Field(gt=0, le=1, description="loss of quality that does not matter")] = 0.02
    accelerators: Annotated[
        int, Field(ge=1, description="that a worker computes on; a machine without any counts as one")
    ] = 1
    price_per_hour: Annotated[
        FiniteFloat | None, Field(ge=0, description="of an accelerator with its share of the machine; absent: unknown")
    ] = None
    watts: Annotated[
        FiniteFloat | None,
        Field(gt=0, description="power of an accelerator at work, where the machine has no meter; absent: unknown"),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> ExperimentSpec:
        labels = [dataset.label for dataset in self.datasets]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"datasets: two are called {twice!r}; give one of them a name")
        return self


def read_spec(path: Path) -> ExperimentSpec:
    """An experiment's file, checked; paths in it count from its folder.

    Raises:
        TurnoutError: INVALID_ARGUMENT: cannot be read, or names the field at fault.
    """
    spec = validated(ExperimentSpec, read_yaml(path), "")
    here = path.resolve().parent
    datasets = [_placed(dataset, here) for dataset in spec.datasets]
    config = None if spec.config is None else str(here / spec.config)
    return spec.model_copy(update={"datasets": datasets, "config": config})


def _placed(dataset: DatasetChoice, here: Path) -> DatasetChoice:
    """A dataset whose paths count from a folder."""
    if dataset.path is None:
        return dataset
    scorer = dataset.scorer
    if isinstance(scorer, JudgeChoice) and scorer.key_file is not None:
        scorer = scorer.model_copy(update={"key_file": str(here / Path(scorer.key_file).expanduser())})
    return dataset.model_copy(update={"path": str(here / dataset.path), "scorer": scorer})


def config_of(spec: ExperimentSpec) -> TurnoutConfig:
    """The configuration that holds an experiment's pools.

    Raises:
        TurnoutError: it cannot be read or is wrong.
    """
    return TurnoutConfig.demo() if spec.config is None else load_config(Path(spec.config))
