"""Ray in this process without authentication, whatever it was before."""

from __future__ import annotations

import pytest
from ray._raylet import (  # type: ignore[attr-defined]
    AuthenticationTokenLoader,
    Config,
)


def read_again() -> None:
    """Let Ray read its mode and its token again: importing it has read the one, an earlier cluster the other.

    A process that keeps a token asks for it, and a cluster without one then takes the process for dead.
    """
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def without_authentication(patch: pytest.MonkeyPatch) -> None:
    """For clusters that are started until the patch is undone; call `read_again` after it."""
    patch.setenv("RAY_AUTH_MODE", "disabled")
    patch.delenv("RAY_AUTH_TOKEN", raising=False)
    read_again()
