"""What a process runs, and the refusal of one that runs anything else."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass

import ray

import turnout
from turnout.errors import Code, TurnoutError
from turnout.sources import sources_digest


@dataclass(frozen=True, slots=True)
class Program:
    """What a process runs. Two that differ must not work on one request.

    Attributes:
        turnout: version of this program.
        code: digest of its sources.
        python: version.
        ray: version.
        torch: version; "" where it is not installed.
    """

    turnout: str
    code: str
    python: str
    ray: str
    torch: str


def this_program() -> Program:
    """What this process runs. Neither torch nor a model is loaded for it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return Program(turnout.__version__, sources_digest(), platform.python_version(), ray.__version__, torch)


def fingerprint() -> str:
    """The `system_fingerprint` of answers: it changes with the sources, which decide numbers."""
    return f"fp_{sources_digest()[:10]}"


def compare(address: str, theirs: Program, mine: Program, whose: str = "this one") -> None:
    """Refuse a node that runs anything else.

    Args:
        address: of the node.
        theirs: what it runs.
        mine: what it is meant to run.
        whose: that is, for people.

    Raises:
        TurnoutError: UNAVAILABLE, naming the node, what differs, and what to do.
    """
    for name, value in asdict(mine).items():
        other = getattr(theirs, name)
        if other != value:
            what = "sources of Turnout" if name == "code" else f"{name} {other or 'none'}"
            here = "others than" if name == "code" else f"not {value or 'none'} as"
            raise unfit(
                address,
                f"has {what}, {here} {whose}: bring all nodes to one state (`ray up` copies yours), and serve again",
            )


def unfit(address: str, what: str) -> TurnoutError:
    """The refusal of a node."""
    return TurnoutError(Code.UNAVAILABLE, f"node {address} {what}")
