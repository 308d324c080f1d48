"""A switching method's parameters with the knob read from a calibration, and the watch over what it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from decoding.artifacts import Artifact, Kept
from decoding.calibration import KIND, RAN, SwitchCalibration
from decoding.drift import DRIFT, DriftWatch, Tally, watch_of
from decoding.model import ModelPool, Request
from decoding.switching.base import TARGETS, CalibratedParams
from turnout.errors import invalid
from turnout.registry import MethodParams, explain

FIELD = "method.params"
P = TypeVar("P", bound=CalibratedParams)


@dataclass(slots=True)
class Watched:
    """What is counted of one answer, and the pool's watch that it goes to."""

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
                f"entropies have left the range of calibration {reading.calibration}:"
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
        The parameters with the knob set, and what to count its entropies with, where it looks at entropies. Without
        a calibration, the parameters as they are.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT: no such artifact, or one for another kind, pair, method, or
            other parameters; OUT_OF_RANGE with the reachable range: no setting meets the target.
    """
    if params.calibration is None:
        return params, None
    where = f"{FIELD}.calibration"
    kept = models.artifacts.kept.get(_key(name, params))
    if kept is not None:
        ran, position, found = kept.get(models, where)[0]
    else:
        known = (KIND, params.calibration) in models.artifacts.kept
        found = (configured if known else _opened)(models, params.calibration, where)
        ran, position, found = _read(found, params, name, FIELD)
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


def check_calibration(models: ModelPool, name: str, params: MethodParams, field: str) -> None:
    """Refuse a configured method whose calibration is missing, does not fit, or cannot meet its target.

    From then on, requests with these parameters go on with the last version that fitted, whatever becomes of the file.

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
            lambda artifact: _read(SwitchCalibration.of(artifact, where), chosen, name, field),
        )
        kept.get(models, where)
        models.artifacts.kept[_key(name, params)] = kept


def configured(models: ModelPool, name: str, field: str) -> SwitchCalibration:
    """A calibration that the configuration names, as it is now or, where its file is no good any more, as it was last.

    Args:
        models: the pool, with its artifacts.
        name: the calibration's.
        field: where the configuration names it.

    Raises:
        TurnoutError: nothing usable was there yet.
    """
    kept = models.artifacts.kept.setdefault(
        (KIND, name), Kept(name, KIND, lambda artifact: SwitchCalibration.of(artifact, field))
    )
    found: SwitchCalibration = kept.get(models, field)[0]
    return found


def _key(name: str, params: CalibratedParams) -> tuple[str, str]:
    return (name, params.model_dump_json(exclude_unset=True))


def _read(found: SwitchCalibration, params: P, name: str, field: str) -> tuple[P, float, SwitchCalibration]:
    """The parameters with the knob set, the position on the curve that they ask for, and the calibration.

    Raises:
        TurnoutError: the calibration is of another method or of other parameters, or does not reach the target.
    """
    where = f"{field}.calibration"
    if found.method != name:
        raise invalid(where, f"{params.calibration!r} was made for the method {found.method!r}, not {name!r}")
    _check_fixed(found, params, field)
    target = next((each for each in TARGETS if getattr(params, each) is not None), None)
    asked = {} if target is None else {target: getattr(params, target)}
    position = found.position_of(f"{field}.{target or 'calibration'}", **asked)
    used = {**found.fixed, found.knob: found.setting(position)}
    try:
        return type(params).model_validate({"catch_up": params.catch_up, **used}), position, found
    except ValidationError as error:
        raise explain(error, field, type(params)) from None


def _opened(models: ModelPool, name: str, where: str) -> SwitchCalibration:
    """The calibration in an artifact, read once for each version of the file."""
    artifact = models.artifacts.open(name, KIND, models, where)
    kept: dict[str, tuple[Artifact, SwitchCalibration]] = models.small.stores.open(KIND, "", dict)
    if name not in kept or kept[name][0] is not artifact:
        kept[name] = (artifact, SwitchCalibration.of(artifact, where))
    return kept[name][1]


def _check_fixed(found: SwitchCalibration, params: CalibratedParams, field: str) -> None:
    """What the request sets itself must be what was calibrated with; what it leaves open is taken from there."""
    asked: dict[str, Any] = params.model_dump(mode="json", include=params.model_fields_set)
    for key, value in found.fixed.items():
        if key in asked and asked[key] != value:
            raise invalid(
                f"{field}.{key}", f"is {asked[key]}, but calibration {params.calibration!r} was made with {value}"
            )
