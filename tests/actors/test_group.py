"""The transport group of a replica, whatever its members do."""

from __future__ import annotations

import pytest

from actors.group import Group
from turnout.errors import Interrupted


class Faulty:
    """A member whose successor nobody can name."""

    name = "large"

    async def present(self) -> object:
        raise KeyError("no such actor")


async def test_an_error_that_nobody_foresaw_reaches_who_waits() -> None:
    group = Group("pair", [Faulty()], 1.0, 3)
    group.changed()
    with pytest.raises(Interrupted, match="'pair': forming a group failed: KeyError"):
        await group.wait_recovered(3, 5.0)
    assert group.generation is None
    await group.close()
