"""Which pools and methods a call asks for, and whether its tenant may have them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from decoding.parts import PartChoice
from turnout.access_config import TenantLimits
from turnout.calls import GenerateCall, ScoreCall
from turnout.config import PoolConfig
from turnout.errors import Code, TurnoutError
from turnout.registry import ALONE


def check_permission(call: GenerateCall | ScoreCall, pool: str, settings: PoolConfig, limits: TenantLimits) -> None:
    """Refuse what a tenant may not ask for.

    Raises:
        TurnoutError: PERMISSION_DENIED.
    """
    if not limits.allows_pool(pool):
        message = f"model: tenant {call.tenant!r} may not ask pool {pool!r}; allowed: {', '.join(limits.pools)}"
        raise TurnoutError(Code.PERMISSION_DENIED, message, "model")
    if isinstance(call, GenerateCall):
        for method in _methods_of(call, pool, settings):
            if not limits.allows_method(method):
                allowed = ", ".join(limits.methods)
                message = f"method: tenant {call.tenant!r} may not use {method!r}; allowed: {allowed}"
                raise TurnoutError(Code.PERMISSION_DENIED, message, "method")


def _methods_of(call: GenerateCall, pool: str, settings: PoolConfig) -> list[str]:
    """The methods a call asks for: by name, by default, and those that its method is to run."""
    if call.method is not None:
        name = call.method
    elif call.model not in ("", pool):
        name = ALONE
    else:
        name = "auto" if settings.routing is not None else settings.default.name
    return [name, *_methods_within(call.params)]


def _methods_within(params: Any) -> list[str]:
    """Methods that run inside one another, as parameters name them."""
    inner = params.get("inner") if isinstance(params, dict) else None
    try:
        # Read as the method reads it: the short forms name methods, too.
        choice = PartChoice.model_validate(inner)
    except ValidationError:
        return []  # there is none, or one that the pool refuses
    return [choice.name, *_methods_within(choice.params)]
