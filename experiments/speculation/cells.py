"""One cell of the comparison: what was asked, what was measured, and the file that keeps both."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.grid.code import modules, named, reached_digest
from experiments.grid.contenders import PLAIN, Contender
from experiments.speculation.tasks import TaskGroup
from turnout.atomic_files import write_whole
from turnout.cost import SpeculationMeter
from turnout.sources import ROOT

FORMAT = 4
# What every cell runs; all modules these import belong to it.
CORE = ("pool.local_pool", "experiments.speculation.grid", "experiments.speculation.measure")


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
        turns_once: number of turns after which the prompts are asked again in the same order.
        speculation: counters of the challenger's answers together.
        target_steps: forwards of the target that gave tokens, in the challenger's answers.
        target_tokens: fed to the target in them, prompts left out; through half of the layers counts one half.
        equality: see `experiments.speculation.equality.Equality`; None where other engines are compared.
        num_answers: of each side.
        agreement: share of them that are alike on both sides.
        load_average: of the machine when the cell began.
    """

    plan: Plan
    turns: list[tuple[float, int, float, int]]
    turns_once: int
    speculation: SpeculationMeter
    target_steps: int
    target_tokens: float
    equality: dict[str, int] | None
    num_answers: int
    agreement: float
    load_average: float

    def save(self, folder: Path) -> None:
        """Write the file whole or not at all."""
        path = self.plan.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(asdict(self), indent=1) + "\n").encode())

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


def code_digest(contender: Contender, root: Path = ROOT) -> str:
    """A name for the code that a contender's numbers come from: a part it does not use can change without notice."""
    known = modules(root)
    starts = {*CORE, *named(PLAIN, {}, known), *named(contender.method, contender.params or {}, known)}
    return reached_digest(frozenset(starts), root)
