"""A switching method's parameters with the knob read from a calibration, and the watch over what it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from decoding.artifacts import Artifact
from decoding.calibration import KIND, RAN, SwitchCalibration
from decoding.drift import DRIFT, DriftWatch, Tally, watch_of
from decoding.model import ModelPool, Request
from decoding.switching.base import TARGETS, CalibratedParams
from turnout.errors import invalid
from turnout.registry import explain, get_method

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
    found, position = _read(models, params, name, FIELD)
    setting = found.setting(position)
    used = {**found.fixed, found.knob: setting}
    try:
        ran = type(params).model_validate({"catch_up": params.catch_up, **used})
    except ValidationError as error:
        raise explain(error, FIELD, type(params)) from None
    listed = ", ".join(f"{key} {value}" for key, value in found.fixed.items() if value is not None)
    request.notes.append(
        f"calibration {params.calibration}, version {found.version}: {found.knob} {setting:.6g} ({listed})"
    )
    request.extra[RAN] = used
    if not found.edges:
        return ran, None
    watch = watch_of(models, params.calibration, found.version, found.drift_limit)
    return ran, Watched(watch, found.expected(position), Tally(found.edges))


def check_default(models: ModelPool, name: str, values: dict[str, Any], field: str) -> None:
    """Refuse a pool's default method whose calibration is missing, does not fit, or cannot meet its target.

    Args:
        models: the pool, with its artifacts.
        name: the method.
        values: its parameters.
        field: where the configuration sets them.

    Raises:
        TurnoutError: as `calibrated`.
    """
    params = get_method(name, f"{field}.name").parse(values, f"{field}.params")
    if isinstance(params, CalibratedParams) and params.calibration is not None:
        _read(models, params, name, f"{field}.params")


def _read(models: ModelPool, params: CalibratedParams, name: str, field: str) -> tuple[SwitchCalibration, float]:
    """The calibration that the parameters name, and the position on its curve that they ask for."""
    assert params.calibration is not None
    where = f"{field}.calibration"
    found = _opened(models, params.calibration, where)
    if found.method != name:
        raise invalid(where, f"{params.calibration!r} was made for the method {found.method!r}, not {name!r}")
    _check_fixed(found, params, field)
    target = next((each for each in TARGETS if getattr(params, each) is not None), None)
    asked = {} if target is None else {target: getattr(params, target)}
    return found, found.position_of(f"{field}.{target or 'calibration'}", **asked)


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
