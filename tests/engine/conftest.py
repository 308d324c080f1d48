"""What tests of the engine share: one thread, pools of small models, and a word on ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.margin import excused
from tests.engine.pools import opened as opened
from tests.engine.pools import pair_folder as pair_folder
from tests.engine.pools import pool as pool
from tests.engine.pools import twin_pool as twin_pool


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if excused:
        terminalreporter.write_sep("-", f"{len(excused)} divergences at ties")
        for line in excused:
            terminalreporter.write_line(line)
