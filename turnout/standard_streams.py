"""Standard input and output in whatever encoding the surroundings have set."""

from __future__ import annotations

import codecs
import sys
from io import TextIOWrapper
from typing import IO

from turnout.errors import invalid


def replace_unencodable() -> None:
    """Let standard output and error show `?`, or an escape, for what their encoding lacks, instead of failing.

    Called at the entry of every command, before anything is written. Lone surrogates, which UTF-8 lacks, are included.
    """
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def shows(stream: IO[str], text: str) -> bool:
    """Whether a stream's encoding has every character of a text; a stream without an encoding shows all."""
    try:
        codecs.encode(text, getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_stdin(field: str) -> str:
    """Read all of standard input, without a byte order mark.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it is not text in the encoding that is set.
    """
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        allowed = "give text in that encoding, or set PYTHONIOENCODING=utf-8"
        raise invalid(field, f"standard input is no {error.encoding} text (byte {error.start}); {allowed}") from None
