"""How many cases a property is tried on: so many in every run, ten times as many in `make search-properties`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

USUAL = 100  # cases of a property that does not say how many


def cases(count: int, **more: Any) -> settings:
    """Settings for a property whose cases take longer, or say less each, than usual ones.

    Args:
        count: in every run.
        more: of `hypothesis.settings`.
    """
    return settings(max_examples=count * settings.default.max_examples // USUAL, **more)
