"""What a live experiment has decided: a file that names the arm which gets everything from then on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.decision import rules_version
from turnout.atomic_files import write_whole

LOOK_S = 1.0
DECIDED = "decided"  # feature of a decision that was made after the split was decided

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a split was decided: for which arm, and a name for the file that says so."""

    arm: str
    version: str


class DecidedFile:
    """A file that may not be there yet, looked at now and then; one that cannot be used changes nothing.

    Args:
        path: where it is, or will be.
        arms: that it may name.
        clock: seconds.
    """

    def __init__(self, path: Path, arms: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._arms = arms
        self._clock = clock
        self._due = clock()
        self._seen: tuple[int, int] | None = None
        self._now: Ended | None = None

    def get(self) -> Ended | None:
        """What was decided; None: nothing yet."""
        if self._clock() >= self._due:
            self._due = self._clock() + LOOK_S
            self._look()
        return self._now

    def _look(self) -> None:
        try:
            stat = self._path.stat()
            if self._seen == (stat.st_mtime_ns, stat.st_size):
                return
            self._seen = (stat.st_mtime_ns, stat.st_size)
            values = json.loads(self._path.read_text(encoding="utf-8-sig"))
            arm = values["arm"]
            if arm not in self._arms:
                raise ValueError(f"names the arm {arm!r}; there are {', '.join(self._arms)}")
        except FileNotFoundError:
            self._seen = self._now = None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be used: %s; the split stays as it was", self._path, error)
        else:
            self._now = Ended(arm, rules_version(values))


def write_decided(path: Path, values: dict[str, Any]) -> None:
    """Decide a split; what was decided before stays.

    Args:
        path: the file that the split is configured with.
        values: `arm`, and whatever a person wants to know about why.

    Raises:
        OSError: it cannot be written.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(values).encode())
