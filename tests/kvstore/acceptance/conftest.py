"""Prints what these tests measured."""

from __future__ import annotations

from typing import Any

from tests.kvstore.acceptance.figures import told


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each figure."""
    if told:
        terminalreporter.write_sep("-", "figures of the shared prefix store")
        for line in told:
            terminalreporter.write_line(line)
