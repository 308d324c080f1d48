"""The doubt of a request: any method's answer, measured, and held back where the doubt is too high."""

from __future__ import annotations

import math
from typing import Any

from decoding.uncertainty.base import make_uncertainty
from turnout.calls import GenerateCall
from turnout.errors import invalid
from turnout.registry import MethodInfo, MethodParams

METHOD = "abstain"  # measures the doubt, around the method that answers
FIELDS = ("uncertainty", "abstain_above")
LIMIT = 1e6


def check_doubt(call: GenerateCall, method: MethodInfo | None) -> None:
    """Refuse doubt that cannot be measured in what a call asks for besides it.

    Args:
        call: the call.
        method: that it names; None while a router has to choose.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT, naming the field and what is allowed.
    """
    own = method is not None and method.name == METHOD
    if own:
        for name in FIELDS:
            if getattr(call, name) is not None and name in call.params:
                raise invalid(name, f"is among the parameters of {METHOD!r}, too: give one of them")
    if call.uncertainty is not None:
        make_uncertainty(call.uncertainty, "uncertainty")
    if (limit := call.abstain_above) is not None:
        if not (math.isfinite(limit) and abs(limit) <= LIMIT):
            raise invalid("abstain_above", f"must be from {-LIMIT:g} to {LIMIT:g} (got {limit:g})")
        if call.uncertainty is None and not own:
            raise invalid("abstain_above", "needs uncertainty: what measures the doubt (`turnout parts uncertainty`)")
    if call.uncertainty is not None and call.contrast is not None:
        raise invalid("uncertainty", "not allowed with contrast")


def params_with_doubt(call: GenerateCall, method: MethodInfo, params: MethodParams) -> dict[str, Any] | None:
    """Return parameters with which `abstain` answers a call by a method; None: the call says nothing of doubt.

    Args:
        call: a call that passed `check_doubt`.
        method: that answers it.
        params: the method's.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the method writes all answers of a request together.
    """
    if call.uncertainty is None and call.abstain_above is None:
        return None
    given = params.model_dump(mode="json", exclude_unset=True)
    asked: dict[str, Any] = {"abstain_above": call.abstain_above}
    if call.uncertainty is not None:
        asked["uncertainty"] = call.uncertainty
    if method.name == METHOD:
        return given | {name: value for name, value in asked.items() if value is not None}
    if method.joint:
        raise invalid("uncertainty", f"method {method.name!r} writes all answers of a request together: not allowed")
    made = {"inner": {"name": method.name, "params": given}, "model": getattr(params, "model", "large"), **asked}
    # A structure has no room for words: nothing stands in place of the answer.
    return made if call.sampling.structure is None else {**made, "text": ""}


def refuse_doubt(call: GenerateCall, role: str, model: str) -> None:
    """Refuse what needs the models of a pool themselves, of one with an endpoint.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    for name in FIELDS:
        if getattr(call, name) is not None:
            raise invalid(name, f"needs the tokens of the models, and {model!r} ({role}) is an endpoint")
