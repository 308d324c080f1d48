"""Attempt log: how often a block, or the loading of models, was begun, and which lines were asked alone.

A process that is killed says nothing. What it was about to do it has written down, so that the next one knows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

TOGETHER = 2  # times a block is begun with many lines at once; after that its lines are asked one by one
ALONE = 2  # times a line may end the process that asks nothing but it
GIVEN_UP = 8  # such lines of a block, without one that was answered: then it is not the lines
LOADS = 4  # times models are loaded, for each process that loads them, until none is done
LOADING = "models"

_BEGUN = b"begun"


class AttemptLog:
    """Attempt log of one block, in a file that survives the process.

    Attributes:
        begun: times it was begun.
        alone: times each line was asked while its process asked nothing else, by number.

    Args:
        path: absent until something is noted.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        noted = list[bytes]()
        with suppress(FileNotFoundError):
            noted = path.read_bytes().split()
        self.begun = noted.count(_BEGUN)
        self.alone = Counter(int(each) for each in noted if each != _BEGUN)

    def begin(self) -> None:
        """Note that it is begun.

        Raises:
            OSError: it cannot be written.
        """
        self._note(_BEGUN)
        self.begun += 1

    def ask(self, number: int) -> None:
        """Note that a line is asked alone.

        Raises:
            OSError: it cannot be written.
        """
        self._note(str(number).encode())
        self.alone[number] += 1

    def end(self) -> None:
        """Forget the attempt: it completed, or its failure was observed."""
        self._path.unlink(missing_ok=True)

    def _note(self, word: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(word + b"\n")
