"""Names of models and pools, which may contain slashes (`org/name`), as one part of a path."""

from __future__ import annotations


def one_part(name: str) -> str:
    """Escape a name for use within a file's name or a key: no slash, and different names stay different.

    Names without a slash and a percent sign stay as they are; the others read like URLs (`org%2Fname`).
    """
    return name.replace("%", "%25").replace("/", "%2F")
