"""API keys in files, as clients of a server read them: on a command line a key would be seen by all."""

from __future__ import annotations

from pathlib import Path

from turnout.errors import invalid


def read_api_key(path: Path | None, field: str = "api_key_file") -> str:
    """The key in a file; "" without one.

    Args:
        path: of the file.
        field: what its reader calls it.

    Raises:
        TurnoutError: it cannot be read, or has no one line of text.
    """
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise invalid(field, f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not (key.isascii() and key.isprintable()) or not key or " " in key:
        raise invalid(field, f"{path} must hold one API key")
    return key
