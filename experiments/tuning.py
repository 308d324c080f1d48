"""Search over a method's parameters for a target, with Optuna; a knob's setting ends as the artifact serving reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from decoding.calibrated_params import CalibratedParams
from training.calibration_data import QuestionSet
from training.knob_calibration import Calibrator, Outcome, Target
from training.question_runs import Bench, Run, paper_cost
from turnout.errors import Code, TurnoutError, invalid
from turnout.registry import get_method

# Of a setting that the method would refuse again; all else says something about the machine.
REFUSED = {Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.NOT_FOUND}
Meter = Literal["paper", "flops", "wall"]
# What the figures of a trial mean: those of a journal of another version are not compared with them.
FIGURES = 3
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Range:
    """Values of one parameter that are tried: a range, or a list.

    Attributes:
        low: least; with `choices`: unused.
        high: most.
        whole: whether only whole numbers are.
        logarithmic: whether steps are by ratio.
        choices: a list instead.
    """

    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    logarithmic: bool = False
    choices: tuple[Any, ...] = ()

    @classmethod
    def parse(cls, name: str, text: str) -> Range:
        """`1:8`, `0.001:0.5:log`, or `next,current`.

        Raises:
            TurnoutError: INVALID_ARGUMENT.
        """
        if ":" not in text:
            return cls(choices=tuple(_plain(each) for each in text.split(",")))
        low, high, *scale = text.split(":")
        try:
            found = cls(float(low), float(high), low.lstrip("-").isdigit() and high.lstrip("-").isdigit(), bool(scale))
        except ValueError:
            raise invalid(f"search.{name}", f"must be LOW:HIGH, LOW:HIGH:log or A,B,C (got {text!r})") from None
        if scale not in ([], ["log"]) or not found.low < found.high or (found.logarithmic and found.low <= 0):
            raise invalid(f"search.{name}", f"must be LOW:HIGH, LOW:HIGH:log or A,B,C (got {text!r})")
        return found

    def suggest(self, trial: Trial, name: str) -> Any:
        """A value of a trial."""
        if self.choices:
            return trial.suggest_categorical(name, self.choices)
        if self.whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.logarithmic)
        return trial.suggest_float(name, self.low, self.high, log=self.logarithmic)


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting: its parameters, quality relative to the large model's, and cost relative to it by meter."""

    params: dict[str, Any]
    retained: float
    costs: dict[str, float]


class _Journal(JournalFileBackend):
    """Names its file where a trial cannot be written to it, as on a full disk."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with _kept(Path(self._file_path)):
            super().append_logs(logs)


@contextmanager
def _kept(journal: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise invalid("journal", f"cannot write {journal}: {error.strerror or error}") from None


@dataclass(slots=True)
class Tuner:
    """One search. It may be cut off: with a journal, the next one resumes it.

    Args:
        bench: asks.
        asked: what.
        method: registered name.
        fixed: parameters that stay the same.
        space: values of the others.
        journal: file in which trials are kept; None: nowhere.
        tell: called with (what is tried, trials done, trials in all).

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT: the method, or a parameter it does not have.
    """

    bench: Bench
    asked: QuestionSet
    method: str
    fixed: dict[str, Any]
    space: dict[str, Range]
    journal: Path | None = None
    tell: Tell = lambda what, done, total: None
    _large: Run | None = None
    _refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        fields = get_method(self.method).params.model_fields
        for name in (*self.fixed, *self.space):
            if name not in fields:
                raise invalid(f"search.{name}", f"unknown; {self.method} has: {', '.join(sorted(fields))}")
        if not self.space:
            raise invalid("search", "give at least one parameter to search over")

    async def search(self, target: Target, trials: int, seed: int = 0) -> Tried:
        """The best setting of those tried: the cheapest that keeps the quality, or the best within the budget.

        Args:
            target: quality (cost is then minimised on `target.meter`), or budget (quality is maximised).
            trials: settings tried, earlier ones in the journal counted in.
            seed: of the search.

        Raises:
            TurnoutError: no setting meets the target, none could be run, or the journal cannot be written.
        """
        if target.large_share is not None:
            raise invalid("target", "a search aims at --target-quality or --budget")
        study = self._study(target, seed)  # first: a journal that cannot be written costs nothing yet
        self._large = await self.bench.run(self.asked.questions, "plain", {"model": "large"})
        while (done := len([each for each in study.trials if each.state.is_finished()])) < trials:
            trial = study.ask()
            params = {**self.fixed, **{name: each.suggest(trial, name) for name, each in self.space.items()}}
            self.tell(f"trials, {params}", done, trials)
            await self._try(study, trial, params, target)
        self.tell("trials", trials, trials)
        return self._best(study, target)

    def _study(self, target: Target, seed: int) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = None
        if self.journal is not None:
            with _kept(self.journal):
                self.journal.parent.mkdir(parents=True, exist_ok=True)
                storage = JournalStorage(_Journal(str(self.journal)))
        # What is searched for is part of the name: another search in the same file does not mix with it.
        name = json.dumps(
            [self.method, self.fixed, {name: asdict(each) for name, each in sorted(self.space.items())}, asdict(target),
             self.asked.digest, self.bench.seed, self.bench.at_once, self.bench.sampling.model_dump(mode="json"),
             [self.bench.models.by_role(role).digest for role in ("small", "large")], FIGURES]
        )  # fmt: skip
        study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
        # A resumed search must not draw again what it drew at first.
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
        return study

    async def _try(self, study: optuna.Study, trial: Trial, params: dict[str, Any], target: Target) -> None:
        try:
            get_method(self.method).parse(params, "search")
            run = await self.bench.run(self.asked.questions, self.method, params)
        except TurnoutError as error:
            if error.code not in REFUSED:
                raise  # an outage says nothing about the setting: run again, the search resumes from its journal
            # A combination the method refuses; the search goes round it.
            self._refused.append(error.message)
            study.tell(trial, state=TrialState.FAIL)
            return
        tried = self._measured(params, run)
        cost = tried.costs[target.meter]
        lacking = target.quality - tried.retained if target.quality is not None else cost - target.aim
        trial.set_user_attr("tried", {"params": params, "retained": tried.retained, "costs": tried.costs})
        trial.set_user_attr("lacking", lacking)
        trial.set_constraint("target", lacking)
        study.tell(trial, cost if target.quality is not None else -tried.retained)

    def _measured(self, params: dict[str, Any], run: Run) -> Tried:
        large = self._large
        assert large is not None
        if not large.quality.sum():
            raise invalid("data", "the large model answers none of it well: quality relative to its own is not defined")
        costs = {
            "paper": paper_cost(run, self.bench.models.large.num_parameters, self.bench.seed).value,
            "flops": float(run.flops.sum() / large.flops.sum()),
            "wall": float(run.wall_s.sum() / large.wall_s.sum()),
        }
        return Tried(params, float(run.quality.sum() / large.quality.sum()), costs)

    def _best(self, study: optuna.Study, target: Target) -> Tried:
        done = [each for each in study.trials if each.state == TrialState.COMPLETE]
        if not done:
            raise invalid(
                "search", f"no setting could be run: {self._refused[-1] if self._refused else 'none was tried'}"
            )
        meeting = [each for each in done if each.user_attrs["lacking"] <= 0]
        if not meeting:
            nearest = min(float(each.user_attrs["lacking"]) for each in done)
            raise invalid("target", f"is met by none of {len(done)} settings; the nearest lacks {nearest:.3f}")
        best = min(meeting, key=lambda each: float(each.value if each.value is not None else np.inf))
        return Tried(**best.user_attrs["tried"])

    async def calibrate(self, best: Tried, target: Target, points: int = 7) -> Outcome | None:
        """The curve of the method's knob with the other parameters of the best setting; None: it has no knob."""
        info = get_method(self.method)
        if not issubclass(info.params, CalibratedParams):
            return None
        knob = info.params.knob
        fixed = {name: value for name, value in best.params.items() if name != knob.name}
        calibrator = Calibrator(self.bench, self.asked, self.method, fixed, points, self.tell, self._large)
        return await calibrator.measure(target)
