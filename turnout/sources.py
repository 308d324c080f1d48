"""Which state of the sources a process runs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# All that a server is made of.
PACKAGES = ("turnout", "actors", "decoding", "deployments", "engine", "kvstore", "pool", "router", "training")
SUFFIXES = frozenset({".py", ".cpp", ".h"})  # the compiled kernels too: they decide numbers


@cache
def sources_digest(root: Path = ROOT) -> str:
    """Digest of the server's sources as they lie on this machine: 16 hexadecimal digits.

    Processes that differ in it must not work on one request. A process reads the files once.

    Args:
        root: folder of the packages.
    """
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted(path for path in (root / package).rglob("*") if path.suffix in SUFFIXES):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
