"""The capability of a pool to run programs that models wrote, apart from everything else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Execution:
    """End of a program.

    Attributes:
        finished: whether it came to its last line within its limits.
        reason: why it did not; for people.
        result: its global `RESULT`, plain data; None without.
    """

    finished: bool
    reason: str = ""
    result: Any = None


class CodeExecutor(Protocol):
    """Runner of untrusted Python programs, in a sandbox with limits.

    Attributes:
        cpu_s: processor time that a program may take, seconds.
    """

    @property
    def cpu_s(self) -> float:
        """See the class."""
        ...

    async def run(self, program: str, given: Any, tenant: str) -> Execution:
        """Run a program, with plain data as its global `GIVEN`, as one of a tenant's.

        Raises:
            TurnoutError: UNAVAILABLE: nothing can be run here; says nothing of the program.
        """
        ...


def code_of(answer: str) -> str:
    """Return the fenced pieces of an answer, one after the other; the whole answer where there are none."""
    found = FENCED.findall(answer)
    return "\n".join(found) if found else answer
