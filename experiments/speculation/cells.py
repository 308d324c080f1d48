"""One cell of the comparison: what was asked, what was measured, and the file that keeps both."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import decoding
import engine
import experiments.speculation
import turnout
from decoding.methods.speculative import SpeculativeParams
from experiments.speculation.contenders import Contender
from experiments.speculation.tasks import TaskGroup
from turnout.cost import SpeculationMeter

FORMAT = 2
SLOTS = ("drafters", "lengths", "verifiers", "selectors")
SOURCES = (".py", ".cpp", ".h")
REPORTING = {"page.py", "plot.py", "summary.py", "bench.py", "__init__.py"}  # what a measurement does not depend on


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell that is to be measured.

    Attributes:
        challenger: who is compared with the baseline, as in tables.
        baseline: "plain", or for an engine of others our own contender.
        batch: prompts answered at once.
        setting: everything else that the outcome depends on, plain data.
    """

    challenger: str
    baseline: str
    group: str
    temperature: float
    batch: int
    setting: dict[str, Any] = field(hash=False)

    @property
    def address(self) -> str:
        """Names the cell by all it depends on: 16 hexadecimal digits."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def path(self, folder: Path) -> Path:
        """The cell's file."""
        words = f"{self.challenger} over {self.baseline} {self.group} t{self.temperature:g} b{self.batch}"
        readable = re.sub(r"[^\w+.]+", "-", words)
        return folder / f"{readable}-{self.address}.json"


@dataclass(slots=True)
class Cell:
    """What was measured.

    Attributes:
        plan: what was asked.
        turns: seconds and tokens of the baseline, then of the challenger, turn by turn.
        speculation: counters of the challenger's answers together.
        target_steps: forwards of the target that gave tokens, in the challenger's answers.
        target_tokens: fed to the target in them, prompts left out; through half of the layers counts one half.
        equality: see `experiments.speculation.equality.Equality`; None where other engines are compared.
        num_prompts: that were answered.
        agreement: share of prompts that both sides answered alike.
        load_average: of the machine when the cell began.
    """

    plan: Plan
    turns: list[tuple[float, int, float, int]]
    speculation: SpeculationMeter
    target_steps: int
    target_tokens: float
    equality: dict[str, int] | None
    num_prompts: int
    agreement: float
    load_average: float

    def save(self, folder: Path) -> None:
        """Write the file beside its place and rename it, so that a run that is cut off leaves no half of one."""
        path = self.plan.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".partial")
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        beside.replace(path)

    @classmethod
    def load(cls, plan: Plan, folder: Path) -> Cell | None:
        """What was measured for a plan before; None: nothing."""
        path = plan.path(folder)
        if not path.is_file():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        values |= {"plan": plan, "speculation": SpeculationMeter(**values["speculation"])}
        values["turns"] = [tuple(turn) for turn in values["turns"]]
        return cls(**values)


def prompts_digest(group: TaskGroup) -> str:
    """A name for a group's prompts."""
    return hashlib.blake2b(repr((group.warm_up, group.prompts)).encode(), digest_size=8).hexdigest()


def file_digest(path: Path) -> str:
    """A name for a file's content."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Source:
    """A file of code: its digest, and the (slot, name) of parts it imports."""

    digest: str
    parts: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, text: str) -> Source:
        """Of its text."""
        parts = re.findall(r"from decoding\.(\w+)\.(\w+) import", text)
        return cls(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), frozenset(parts))


def read_sources() -> dict[Path, Source]:
    """The code that measurements come from, as it is now, by file."""
    found: dict[Path, Source] = {}
    for package in (turnout, decoding, engine, experiments.speculation):
        for path in sorted(Path(package.__path__[0]).rglob("*")):
            reports = package is experiments.speculation and path.name in REPORTING
            if path.suffix in SOURCES and not reports:
                found[path] = Source.of(path.read_text(encoding="utf-8"))
    return found


def code_digest(contender: Contender, sources: dict[Path, Source]) -> str:
    """A name for the code that a contender's numbers come from: a part it does not use can change without notice."""
    named = set()
    if contender.params is not None:
        named = _names(SpeculativeParams.model_validate(contender.params).model_dump(mode="json"))
    kept: set[Path] = set()
    slots: dict[tuple[str, str], Path] = {}
    for path in sources:
        if path.parent.name in SLOTS and not path.stem.startswith("_") and path.stem not in ("base", *named):
            slots[path.parent.name, path.stem] = path
        else:
            kept.add(path)
    reached = list(kept)
    while reached:  # parts that other parts are made of
        for part in sources[reached.pop()].parts & slots.keys():
            reached.append(slots.pop(part))
            kept.add(reached[-1])
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(kept):
        digest.update(f"{path.parent.name}/{path.name} {sources[path].digest}\n".encode())
    return digest.hexdigest()


def _names(value: Any) -> set[str]:
    """Every string in parameters: names of parts are among them."""
    if isinstance(value, dict):
        return set().union(*map(_names, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_names, value))
    return {value} if isinstance(value, str) else set()
