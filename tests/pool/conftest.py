"""What tests of the pool share: one thread, and pools of small models."""

from __future__ import annotations

import pytest
import torch

from tests.engine.pools import opened as opened
from tests.engine.pools import pair_folder as pair_folder
from tests.engine.pools import pool as pool
from tests.engine.pools import twin_pool as twin_pool


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
