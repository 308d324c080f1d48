"""What the tests measured, told after the run (the hook is in conftest.py)."""

from __future__ import annotations

told: list[str] = []


def tell(line: str) -> None:
    """Have a line printed when all tests have ended."""
    told.append(line)
