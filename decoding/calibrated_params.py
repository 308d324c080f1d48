"""Parameters of methods with a knob, the knob read from a calibration, and the watch over what the method sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field, FiniteFloat, ValidationError, model_validator

from decoding.artifacts import Artifact, ArtifactName, Kept
from decoding.calibration import KIND, RAN, KnobCalibration, TunableParam
from decoding.drift import DRIFT, TALLY, DriftWatch, Recorder, Tally, watch_of
from decoding.model import ModelPool, Request
from turnout.errors import TurnoutError, invalid
from turnout.registry import MethodParams, explain

FIELD = "method.params"
TARGETS = ("large_share", "quality")


class CalibratedParams(MethodParams):
    """Parameters of a method with a knob for the large model's part: set by hand, or read from a calibration.

    Attributes:
        knob: which parameter a calibration sets, and which it holds for.
    """

    knob: ClassVar[TunableParam]

    calibration: Annotated[
        ArtifactName | None,
        Field(description="the pool's calibration to read the setting from, without .safetensors; absent: by hand"),
    ] = None
    large_share: Annotated[
        FiniteFloat | None,
        Field(
            ge=0.0,
            le=1.0,
            description="with calibration: share of tokens written by the large model to aim at",
        ),
    ] = None
    quality: Annotated[
        FiniteFloat | None,
        Field(gt=0.0, le=2.0, description="with calibration: quality to aim at, relative to the large model's own"),
    ] = None

    @model_validator(mode="after")
    def _check_calibration(self) -> Self:
        targets = [name for name in TARGETS if getattr(self, name) is not None]
        if self.calibration is None and targets:
            raise ValueError(f"{targets[0]} is read from a calibration: name one in calibration, or leave it out")
        if len(targets) > 1:
            raise ValueError("give large_share or quality, not both")
        if self.calibration is not None and self.by_hand:
            raise ValueError(f"give {self.knob.name} or calibration, not both")
        return self

    @property
    def beyond_text(self) -> str:
        """See `MethodParams.beyond_text`."""
        return "calibration" if self.calibration is not None else ""

    @property
    def by_hand(self) -> bool:
        """True if the knob was set by the caller."""
        return self.knob.name in self.model_fields_set

    @property
    def knob_range(self) -> tuple[float, float]:
        """Settings of a knob that is a share or a chance, from least to most of the large model."""
        return 0.0, 1.0

    @property
    def soft(self) -> str:
        """Name of a parameter that makes the knob random or unused, so that nothing can be calibrated; or empty."""
        return ""

    @property
    def always(self) -> float | None:
        """For a threshold, a setting at which the large model writes all that it may; None: the last value seen."""
        return None

    @classmethod
    def over(cls, defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """See `MethodParams.over`: a knob set by hand replaces a pool's calibration, and the other way round.

        A calibration named by the request brings what it was made with; it replaces what the pool sets by hand.
        """
        dropped: set[str] = set()
        if given.get(cls.knob.name) is not None:
            dropped = {"calibration", *TARGETS}
        elif given.get("calibration") is not None:
            dropped = {cls.knob.name, *cls.knob.fixed, *TARGETS}
        elif set(TARGETS) & set(given):
            dropped = set(TARGETS)
        return {**{name: value for name, value in defaults.items() if name not in dropped}, **given}


P = TypeVar("P", bound=CalibratedParams)


@dataclass(slots=True)
class Watched:
    """Counts of one answer's values, and the pool's drift watch that they go to."""

    watch: DriftWatch
    expected: list[float]
    tally: Tally

    def finish(self, request: Request, counts: list[int]) -> None:
        """Hand a finished answer's counts to the watch; the answer says where they have drifted."""
        reading = self.watch.add(counts, self.expected)
        if reading is None:
            return
        request.extra[DRIFT] = reading
        if reading.index > reading.limit:
            request.notes.append(
                f"what is seen has left the range of calibration {reading.calibration}:"
                f" stability index {reading.index:.2f}, at most {reading.limit:.2f} is expected"
            )


def calibrated(request: Request, models: ModelPool, params: P, name: str) -> tuple[P, Watched | None]:
    """The parameters a request runs with.

    The artifact is opened anew for every request, so that one replaced on disk holds from the next request on. Its
    name, version and setting are noted in the answer.

    Args:
        request: notes and `extra` are added to.
        models: with the pool's artifacts.
        params: as asked.
        name: the method's.

    Returns:
        The parameters with the knob set, and what to count with, where the knob is a threshold. Without a
        calibration, the parameters as they are.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT: no such artifact, or one for another kind, pair, method, or
            other parameters; OUT_OF_RANGE with the reachable range: no setting meets the target.
    """
    if params.calibration is None:
        return params, None
    ran, position, found = _current(models, params, params.calibration, name)
    setting = getattr(ran, found.knob)
    listed = ", ".join(f"{key} {value}" for key, value in found.fixed.items() if value is not None)
    request.notes.append(
        f"calibration {params.calibration}, version {found.version}: {found.knob} {setting:.6g} ({listed})"
    )
    request.extra[RAN] = {**found.fixed, found.knob: setting}
    if not found.edges:
        return ran, None
    watch = watch_of(models, params.calibration, found.version, found.drift_limit)
    return ran, Watched(watch, found.expected(position), Tally(found.edges))


def check_current(models: ModelPool, name: str, params: MethodParams) -> None:
    """Refuse a method that was chosen earlier and cannot be run any more as its calibration is now.

    Args:
        models: the pool, with its artifacts.
        name: the method.
        params: its parameters.

    Raises:
        TurnoutError: as `calibrated`.
    """
    if isinstance(params, CalibratedParams) and params.calibration is not None:
        _current(models, params, params.calibration, name)


def recorder(request: Request, watched: Watched | None) -> Recorder | None:
    """Return the recorder of the values that a threshold is compared with; None: they are not recorded."""
    return watched.tally if watched is not None else request.extra.get(TALLY)


def finish(request: Request, watched: Watched | None, recorded: Recorder | None) -> None:
    """Hand a finished answer's counts to the pool's drift watch, or to the caller that asked for them.

    Args:
        request: the answer's.
        watched: as `calibrated` gave it.
        recorded: the recorder as it is now; a rule that ran in another process came back with another.
    """
    if watched is not None and isinstance(recorded, Tally):
        watched.finish(request, recorded.counts)
    elif recorded is not None:
        request.extra[TALLY] = recorded


def check_method(models: ModelPool, name: str, params: MethodParams, field: str) -> None:
    """Refuse a configured method that no request could use.

    Its calibration, or that of a method inside it, is missing, does not fit, or cannot meet its target; or one of its
    parts refuses the pool, as for want of what was trained for it. From then on, requests with these parameters go on
    with the last version of a calibration that fitted, whatever becomes of the file.

    Args:
        models: the pool, with its artifacts.
        name: the method.
        params: its parameters.
        field: where the configuration sets them.

    Raises:
        TurnoutError: as `calibrated`.
    """
    if isinstance(params, CalibratedParams) and params.calibration is not None:
        chosen, where = params, f"{field}.calibration"
        kept = Kept(
            params.calibration,
            KIND,
            lambda artifact: _read(KnobCalibration.of(artifact, where), chosen, name, field),
        )
        kept.get(models, where)
        models.artifacts.kept[_key(name, params)] = kept
        configured(models, params.calibration, where)  # for requests that ask something else of it
    try:
        params.check_parts(models)
    except TurnoutError as error:
        raise _placed(error, field) from None


def _placed(error: TurnoutError, field: str) -> TurnoutError:
    """A refusal of a request, as one of the place where the configuration says the same."""
    if error.field is None or not error.field.startswith(FIELD):
        return error
    message = error.message.removeprefix(FIELD)
    same = message == error.message
    return TurnoutError(error.code, message if same else field + message, field + error.field.removeprefix(FIELD))


def configured(models: ModelPool, name: str, field: str) -> KnobCalibration:
    """A calibration that the configuration names, as it is now or, where its file is no good any more, as it was last.

    Args:
        models: the pool, with its artifacts.
        name: the calibration's.
        field: where the configuration names it.

    Raises:
        TurnoutError: nothing usable was there yet.
    """
    kept = models.artifacts.kept.setdefault(
        (KIND, name), Kept(name, KIND, lambda artifact: KnobCalibration.of(artifact, field))
    )
    found: KnobCalibration = kept.get(models, field)[0]
    return found


def _key(name: str, params: CalibratedParams) -> tuple[str, str]:
    """Return the key of a calibration reading: what it depends on; a request may set other parameters as well."""
    include = {"calibration", *TARGETS, *params.knob.fixed}
    return (name, params.model_dump_json(include=include, exclude_unset=True))


def _current(models: ModelPool, params: P, calibration: str, name: str) -> tuple[P, float, KnobCalibration]:
    """Read the calibration for a request: as it is now or, if it is configured, as it fitted last.

    Raises:
        TurnoutError: as `calibrated`.
    """
    where = f"{FIELD}.calibration"
    kept: Kept[tuple[P, float, KnobCalibration]] | None = models.artifacts.kept.get(_key(name, params))
    if kept is not None:
        _, position, found = kept.get(models, where)[0]
        _check_fixed(found, params, FIELD)
        return _set(found, params, position, FIELD), position, found
    known = (KIND, calibration) in models.artifacts.kept
    found = (configured if known else _opened)(models, calibration, where)
    return _read(found, params, name, FIELD)


def _read(found: KnobCalibration, params: P, name: str, field: str) -> tuple[P, float, KnobCalibration]:
    """The parameters with the knob set, the position on the curve that they ask for, and the calibration.

    Raises:
        TurnoutError: the calibration is of another method or of other parameters, or does not reach the target.
    """
    if found.method != name:
        said = f"{params.calibration!r} was made for the method {found.method!r}, not {name!r}"
        raise invalid(f"{field}.calibration", said)
    _check_fixed(found, params, field)
    target = next((each for each in TARGETS if getattr(params, each) is not None), None)
    asked = {} if target is None else {target: getattr(params, target)}
    position = found.position_of(f"{field}.{target or 'calibration'}", **asked)
    return _set(found, params, position, field), position, found


def _set(found: KnobCalibration, params: P, position: float, field: str) -> P:
    """The parameters with the knob set as it is at a position of the curve."""
    used = {**found.fixed, found.knob: found.setting(position)}
    free = params.model_fields_set - {"calibration", *TARGETS, *used}
    try:
        return type(params).model_validate({**{name: getattr(params, name) for name in free}, **used})
    except ValidationError as error:
        raise explain(error, field, type(params)) from None


def _opened(models: ModelPool, name: str, where: str) -> KnobCalibration:
    """The calibration in an artifact, read once for each version of the file."""
    artifact = models.artifacts.open(name, KIND, models, where)
    kept: dict[str, tuple[Artifact, KnobCalibration]] = models.small.stores.open(KIND, "", dict)
    if name not in kept or kept[name][0] is not artifact:
        kept[name] = (artifact, KnobCalibration.of(artifact, where))
    return kept[name][1]


def _check_fixed(found: KnobCalibration, params: CalibratedParams, field: str) -> None:
    """Refuse parameters that differ from those calibrated with; unset ones are taken from the calibration."""
    asked: dict[str, Any] = params.model_dump(mode="json", include=params.model_fields_set)
    defaults = {name: type(params).model_fields[name].default for name in params.knob.fixed}
    for key, value in {**defaults, **found.fixed}.items():  # older calibrations do not name newer parameters
        if key in asked and asked[key] != value:
            raise invalid(
                f"{field}.{key}", f"is {asked[key]}, but calibration {params.calibration!r} was made with {value}"
            )
