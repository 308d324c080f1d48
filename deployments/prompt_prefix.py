"""Prompts by their beginnings: how replicas say what they hold, and how callers find out who holds most of a prompt."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from contextlib import suppress

from turnout.call_context import with_context
from turnout.calls import GenerateCall
from turnout.errors import TurnoutError

DIGEST_BYTES = 6
# Where prefixes end: each about 1.4 times as long as the one before. 64 bytes are about 16 tokens of text, and exactly
# 16 token ids.
MARKS = tuple(int(64 * 2 ** (step / 2)) for step in range(29))
BYTES_PER_TOKEN = 4


def prompt_bytes(call: GenerateCall) -> bytes:
    """A prompt as bytes, four to a token id, and about four to a token of text."""
    with suppress(TurnoutError):  # a context that stands before nothing is refused later, by name
        call = with_context(call)
    if call.messages is not None:
        return "".join(f"{turn.role}\x1f{turn.content}\x1e" for turn in call.messages).encode(errors="replace")
    if isinstance(call.prompt, str):
        return call.prompt.encode(errors="replace")
    # Ids that do not fit are refused later, by name.
    return array("I", [token & 0xFFFFFFFF for token in call.prompt or ()]).tobytes()


def prefixes(call: GenerateCall) -> list[tuple[int, bytes]]:
    """Ever longer beginnings of a call's prompt, as (length in bytes, digest).

    Equal digests mean equal beginnings, of calls to one model by one tenant, or by those of its group where the tenants
    file names it: caches of others are another matter.
    """
    data = prompt_bytes(call)
    whose = call.tenant.encode(errors="replace") if call.sharing is None else call.sharing.home(call.tenant).key
    digest = hashlib.blake2b(b"\x1f".join((whose, call.model.encode(errors="replace"), b"")), digest_size=DIGEST_BYTES)
    found = []
    start = 0
    for mark in MARKS:
        if mark > len(data):
            break
        digest.update(data[start:mark])
        found.append((mark, digest.copy().digest()))
        start = mark
    return found


class Held:
    """Beginnings of prompts that were computed somewhere lately; the longest unused are forgotten first.

    Args:
        max_bytes: of prompts, each shared beginning counted once: about what the caches have room for.
        max_digests: most that are remembered.
    """

    def __init__(self, max_bytes: int, max_digests: int = 512) -> None:
        self._max_bytes = max_bytes
        self._max_digests = max_digests
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = 0

    def note(self, beginnings: list[tuple[int, bytes]]) -> None:
        """A prompt was computed: the result of `prefixes`."""
        before = [0, *(length for length, _ in beginnings)]
        # Backwards: of one prompt, what is longest is forgotten first.
        for (length, digest), start in reversed(list(zip(beginnings, before, strict=False))):
            self._bytes += length - start - self._sizes.pop(digest, 0)
            self._sizes[digest] = length - start
        while self._sizes and (self._bytes > self._max_bytes or len(self._sizes) > self._max_digests):
            self._bytes -= self._sizes.popitem(last=False)[1]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def packed(self) -> bytes:
        """All digests, one after the other."""
        return b"".join(self._sizes)


def unpacked(digests: bytes) -> frozenset[bytes]:
    """What `Held.packed` made, to look things up in."""
    return frozenset(digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES))
