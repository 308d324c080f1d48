"""The grid of cells: contenders, groups, temperatures and batch sizes, and the models they run on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import SUFFIX
from experiments import machine
from experiments.grid.contenders import PLAIN, Contender, artifacts_of, contenders, lacking
from experiments.pairs import DEMO, REAL, open_pair
from experiments.speculation.cells import Plan, code_digest, file_digest, prompts_digest
from experiments.speculation.sides import Checkpoints, HuggingFaceSide, OurSide, Side
from experiments.speculation.target import restamped, widened
from experiments.speculation.tasks import GROUPS, TaskGroup, task_group
from pool.local_pool import LocalPool
from turnout.config import EngineConfig, ModelConfig, PoolConfig, TurnoutConfig, artifacts_path, model_path
from turnout.gc_freeze import freeze_loaded

POOL = "bench"
WIDENED = "widened"
KV_MEMORY_BYTES = 256 << 20
PANEL = 4  # challengers that share the baseline's answers: more would be measured long after it
# How much longer a step may take for the prompts read in it: of prompts that come together, all are decoded together.
READING_SLOWDOWN = 8.0
LOOKUP_TOKENS = 10  # what the documentation of transformers' prompt lookup asks for

GENERATE = "generate"
ASSISTED = "generate, assistant_model"
LOOKUP = "generate, prompt_lookup_num_tokens"
# Hugging Face's ways to decode, and which of ours does the same.
PEERS = ((GENERATE, PLAIN), (ASSISTED, "model_chain"), (LOOKUP, "copyspec"), (LOOKUP, "input_copy"))


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting that all cells of a run share.

    Attributes:
        target: "widened", "demo", "real" (fetched by `make real`), or the folder of a checkpoint.
        draft: folder of the small model; absent: the demo's; of the real one, the draft that is trained for it.
        artifacts: folder of what was trained for the two; absent: the demo's, where one of the two is.
        cache: folder where the widened target is kept.
        dtype: of weights and arithmetic.
        prompts: of a group.
        max_tokens: longest answer, tokens.
        threads: CPU threads of a forward; absent: all cores.
        device: of both models, as torch names it.
        turns: of a cell, at least: its prompts are asked again until that number, all that was learned forgotten.
    """

    target: str
    draft: str | None = None
    artifacts: Path | None = None
    cache: Path = Path(".runs/speculation/targets")
    dtype: str = "bfloat16"
    prompts: int = 40
    max_tokens: int = 64
    threads: int | None = None
    device: str = "cpu"
    turns: int = 15

    @property
    def num_threads(self) -> int:
        """Of both sides: an engine that chose for itself would do so while it is measured."""
        return self.threads or torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Axes:
    """The cells that are wanted: every combination.

    Attributes:
        peers: whether Hugging Face's own ways are measured with ours, greedily and one prompt at a time.
    """

    methods: tuple[str, ...]
    groups: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batches: tuple[int, ...] = (1, 8)
    peers: bool = True


def configured(setting: Setting) -> TurnoutConfig:
    """The configuration of the pool under measurement; makes the widened target where it is asked for."""
    demo = TurnoutConfig.demo()
    if setting.target == REAL:
        pair = open_pair(REAL)
        members = {role: str(pair.folder(role)) for role in ("small", "large")}
        return _pool_config(setting, members | ({"small": setting.draft} if setting.draft else {}), setting.artifacts)
    artifacts = setting.artifacts or artifacts_path(demo.pools["demo"])
    assert artifacts is not None
    target = {WIDENED: "demo:large", DEMO: "demo:large"}.get(setting.target, setting.target)
    if setting.target == WIDENED:
        source = model_path(ModelConfig(path=target))
        folder = widened(source, setting.cache)
        artifacts = restamped(artifacts, source, folder, folder.with_name(f"{folder.name}-artifacts"))
        target = str(folder)
    members = {"small": setting.draft or "demo:small", "large": target}
    return _pool_config(setting, members, artifacts)


def _pool_config(setting: Setting, members: dict[str, str], artifacts: Path | None) -> TurnoutConfig:
    common = {"device": setting.device, "dtype": setting.dtype, "kv_memory_bytes": KV_MEMORY_BYTES}
    models = {role: ModelConfig.model_validate({"path": path, **common}) for role, path in members.items()}
    engine = EngineConfig().model_copy(update={"threads": setting.num_threads, "max_slowdown": READING_SLOWDOWN})
    pool = PoolConfig(small="small", large="large", artifacts=str(artifacts) if artifacts else None)
    return TurnoutConfig(models=models, pools={POOL: pool}, engine=engine)


@dataclass(slots=True)
class Grid:
    """Every cell there could be on a pool, and the sides that measure it.

    Attributes:
        contenders: those that can run, by name.
        missing: by name, why others cannot.
        versions: by name, the code and the artifacts that a contender's numbers come from, plain data.
        shared: what all cells' outcomes depend on, plain data.
    """

    pool: LocalPool
    config: TurnoutConfig
    setting: Setting
    contenders: dict[str, Contender] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    _groups: dict[str, TaskGroup] = field(default_factory=dict)
    _checkpoints: Checkpoints | None = None

    @classmethod
    def open(cls, setting: Setting) -> Grid:
        """Load the models.

        Raises:
            TurnoutError: a checkpoint is missing or unsupported, or the two do not share a vocabulary.
        """
        config = configured(setting)
        grid = cls(LocalPool.load(POOL, config), config, setting)
        freeze_loaded()  # as processes that serve do
        for name, contender in contenders().items():
            why = lacking(contender, grid.pool.model_pool)
            if why is None:
                grid.contenders[name] = contender
                grid.versions[name] = {
                    "code": code_digest(contender),
                    "artifacts": {each: file_digest(path) for each, path in grid.artifacts(contender).items()},
                }
            else:
                grid.missing[name] = why
        here = machine.describe(setting.device)
        grid.shared = {
            "dtype": setting.dtype,
            "threads": setting.num_threads,
            "panel": PANEL,
            "turns": setting.turns,
            "max_tokens": setting.max_tokens,
            "models": {role: grid.pool.engines[role].digest for role in ("small", "large")},
            "parameters": {role: grid.pool.engines[role].num_parameters for role in ("small", "large")},
            "machine": {key: here[key] for key in ("device", "processor", "cores", "python") if key in here},
            "versions": {name: version(name) for name in ("torch", "transformers")},
        }
        return grid

    def group(self, name: str) -> TaskGroup:
        """The prompts of a group."""
        if name not in self._groups:
            sizes = (self.setting.prompts, self.setting.max_tokens)
            self._groups[name] = task_group(name, self.pool.tokenizer, *sizes)
        return self._groups[name]

    def plans(self, axes: Axes) -> list[Plan]:
        """The cells of these axes: the greedy ones of the smallest batch first."""
        found = []
        names = [name for name in axes.methods if name in self.contenders]
        for batch, temperature, group, name in itertools.product(axes.batches, axes.temperatures, axes.groups, names):
            if temperature or not self.contenders[name].sampled_only:
                found.append(Plan(name, PLAIN, group, temperature, batch, self._setting(name, group)))
        if axes.peers:
            for (baseline, name), group in itertools.product(PEERS, axes.groups):
                if name in names:
                    found.append(Plan(name, baseline, group, 0.0, 1, self._setting(name, group)))
        return found

    def whole(self) -> list[Plan]:
        """All cells, whatever a run asks for."""
        return self.plans(Axes(tuple(self.contenders), tuple(GROUPS)))

    def artifacts(self, contender: Contender) -> dict[str, Path]:
        """The artifacts that a contender opens, by name."""
        folder = self.pool.model_pool.artifacts.folder
        return {} if folder is None else {name: folder / f"{name}{SUFFIX}" for name in artifacts_of(contender)}

    def _setting(self, name: str, group: str) -> dict[str, Any]:
        prompts = prompts_digest(self.group(group))
        return {**self.shared, "params": self.contenders[name].params, "prompts": prompts, **self.versions[name]}

    def challenger(self, plan: Plan) -> Side:
        """Who is measured in a cell."""
        return self._ours(plan.challenger, plan, "challenger")

    def baseline(self, plan: Plan) -> Side:
        """Who it is compared with."""
        return self._ours(PLAIN, plan, "baseline") if plan.baseline == PLAIN else self._theirs(plan.baseline)

    def _ours(self, name: str, plan: Plan, role: str) -> OurSide:
        tenant = f"{role}-{plan.address}"
        return OurSide(self.pool, self.contenders[name], plan.temperature, self.setting.max_tokens, tenant)

    def _theirs(self, baseline: str) -> HuggingFaceSide:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self.setting.dtype, self.setting.device)
        folders = {role: model_path(model) for role, model in self.config.models.items()}
        options: dict[str, Any] = {}
        if baseline == ASSISTED:
            options["assistant_model"] = self._checkpoints.open(folders["small"])
        elif baseline == LOOKUP:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        model = self._checkpoints.open(folders["large"])
        return HuggingFaceSide(model, self.setting.max_tokens, self.setting.num_threads, options, self.setting.device)
