"""Keyed choices: the same key gives the same choice everywhere, different keys independent ones."""

from __future__ import annotations

import hashlib


def share_of(seed: int, purpose: str, *unit: str) -> float:
    """A number in [0, 1), uniform over units.

    Args:
        seed: another seed gives an independent number.
        purpose: what it decides; numbers for different purposes are independent.
        unit: what is to be decided about: a session's name, a request's id.
    """
    key = seed.to_bytes(16, "little", signed=True)
    text = "\x00".join((purpose, *unit)).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53
