"""Prefixes that an operator shares with a group or with all tenants, or keeps: one sealed document in Redis.

Only who holds the root key can register: a document written by anybody else is refused, and so is one that is older
than what this process has read already. One that was begun on an empty Redis is no older for that, as the first number
is a time; who knew prefixes before adds them to it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any

from kvstore.base import ByteStore, StoreFault
from kvstore.scripts import GET, SWAP
from kvstore.tenants.encrypted_document import SealBroken, Sealer
from turnout.errors import invalid, not_found
from turnout.types import Namespace, SharingPolicy

PLACE = b"to1:{reg}:doc"
VERSION = b"to1:{reg}:ver"
ATTEMPTS = 8
MOST_PREFIXES = 10_000


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A registered prefix.

    Attributes:
        name: chosen by the operator.
        policy: public; group: for the group `id`; private: not shared, only kept, for the tenant `id`.
        id: group or tenant; "" for public.
        tokens: token ids, by tokenizer digest.
        text: that the tokens stand for, where that is known: another tokenizer's ids are made from it.
        sharing: of a private one, with whom the tenants file has the tenant share; None: as kvstore.tenants says.
    """

    name: str
    policy: str
    id: str
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    text: str | None = None
    sharing: SharingPolicy | None = None

    @property
    def shares(self) -> bool:
        """Whether it makes a prompt's head visible beyond the tenant."""
        return self.policy != "private"


class Registry:
    """The registered prefixes, as last read. Any thread may call; what does I/O takes a deadline.

    Args:
        store: where the document lies.
        sealer: of documents.
        encode: text -> token ids of the local tokenizer; None: entries without its tokens are not used.
        tokenizer: digest of the local tokenizer.
    """

    def __init__(
        self,
        store: ByteStore,
        sealer: Sealer,
        tokenizer: str = "",
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self._store = store
        self._sealer = sealer
        self._tokenizer = tokenizer
        self._encode = encode
        self._lock = Lock()
        self._version = 0
        self._refused: int | None = None  # the number of a document that was of no use: logged once
        self._prefixes: tuple[Prefix, ...] = ()
        self._tokens: dict[str, list[int]] = {}

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """As last read."""
        return self._prefixes

    def tokens_of(self, prefix: Prefix) -> list[int]:
        """Return its tokens for the local tokenizer; none where they are not known."""
        return self._tokens.get(prefix.name, [])

    def refresh(self, deadline: float) -> bool:
        """Read the document if it has changed; whether it had.

        Raises:
            StoreFault: the store does not answer.
        """
        version = _number(self._store.script(GET, [VERSION], [], deadline))
        if version == self._refused:
            return False
        self._refused = None
        if version == self._version:
            return False
        changed = self._read(deadline)
        if not changed and version != self._version:
            self._refused = version
        return changed

    def put(self, prefix: Prefix, deadline: float) -> None:
        """Register, or replace what has this name.

        Raises:
            TurnoutError: there are too many prefixes.
            StoreFault: the store does not answer, or others write all the time.
        """

        def change(old: tuple[Prefix, ...]) -> tuple[Prefix, ...]:
            others = tuple(each for each in old if each.name != prefix.name)
            if len(others) >= MOST_PREFIXES:
                raise invalid("name", f"{MOST_PREFIXES} prefixes are registered; remove some")
            return (*others, prefix)

        self._swap(change, deadline)

    def remove(self, name: str, deadline: float) -> Prefix:
        """Take a prefix out; what it was.

        Raises:
            TurnoutError: NOT_FOUND: nothing has this name.
            StoreFault: the store does not answer, or others write all the time.
        """
        removed: list[Prefix] = []

        def change(old: tuple[Prefix, ...]) -> tuple[Prefix, ...]:
            removed[:] = [each for each in old if each.name == name]
            if not removed:
                raise not_found("name", name, [each.name for each in old])
            return tuple(each for each in old if each.name != name)

        self._swap(change, deadline)
        return removed[0]

    def _swap(self, change: Callable[[tuple[Prefix, ...]], tuple[Prefix, ...]], deadline: float) -> None:
        for _ in range(ATTEMPTS):
            seen = _number(self._store.script(GET, [VERSION], [], deadline))
            if seen != self._version:
                self._read(deadline)
            new = change(self._prefixes)
            begins = seen == self._version == 0
            version = time.time_ns() // 1000 if begins else max(seen, self._version) + 1
            if self._write(seen, version, new, begins, deadline):
                self._take(version, new)
                return
        raise StoreFault("refused", "the registry is being written by others all the time")

    def _read(self, deadline: float) -> bool:
        value = self._store.script(GET, [PLACE], [], deadline)
        if value is None:
            if self._prefixes:  # removing a prefix leaves a document without it
                log.warning("prefix store: the registered prefixes were gone from Redis; they are put back")
                self._put_back(deadline)
            return False
        try:
            version, prefixes, begins = _unpack(self._sealer.open(PLACE, value))
        except (SealBroken, ValueError, KeyError, TypeError):
            log.error("prefix store: the registered prefixes in Redis were not written under this root key; ignored")
            return False
        if version < self._version:
            log.error("prefix store: the registered prefixes in Redis were older than before; they are put back")
            self._put_back(deadline)
            return False
        if version == self._version:
            return False
        names = {each.name for each in prefixes}
        if begins and (lost := tuple(each for each in self._prefixes if each.name not in names)):
            log.warning("prefix store: registered prefixes were gone from Redis; they are added to the new ones")
            prefixes = (*prefixes, *lost)
            if not self._write(version, version + 1, prefixes, False, deadline):
                return False  # another process did
            version += 1
        self._take(version, prefixes)
        return True

    def _put_back(self, deadline: float) -> None:
        seen = self._store.script(GET, [VERSION], [], deadline) or b"0"
        self._write(seen, self._version, self._prefixes, False, deadline)
        self._refused = None

    def _write(
        self, seen: bytes | int, version: int, prefixes: tuple[Prefix, ...], begins: bool, deadline: float
    ) -> bool:
        """Write the document, unless its number is not the one that was seen any more."""
        document = self._sealer.seal(PLACE, _pack(version, prefixes, begins))
        args = [seen if isinstance(seen, bytes) else str(seen), str(version), document]
        return bool(self._store.script(SWAP, [VERSION, PLACE], args, deadline))

    def _take(self, version: int, prefixes: tuple[Prefix, ...]) -> None:
        tokens = {each.name: ids for each in prefixes if (ids := self._local_tokens(each))}
        with self._lock:
            self._version, self._prefixes, self._tokens = version, prefixes, tokens
            self._refused = None

    def _local_tokens(self, prefix: Prefix) -> list[int]:
        ids = prefix.tokens.get(self._tokenizer)
        if ids is not None:
            return list(ids)
        if prefix.text is not None and self._encode is not None:
            return self._encode(prefix.text)
        return []


def namespace_of(prefix: Prefix) -> Namespace:
    """Return the namespace of a prefix's chunks."""
    if prefix.policy == "public":
        return PUBLIC
    return Namespace("group" if prefix.policy == "group" else "private", prefix.id)


PUBLIC = Namespace("public", "registered")  # one for all registered prefixes: what two have in common is stored once


def _pack(version: int, prefixes: tuple[Prefix, ...], begins: bool) -> bytes:
    document = {"version": version, "begins": begins, "prefixes": [_packed(each) for each in prefixes]}
    return json.dumps(document).encode()


def _packed(prefix: Prefix) -> dict[str, Any]:
    sharing = prefix.sharing.model_dump() if prefix.sharing is not None else None
    return {**asdict(prefix), "sharing": sharing}


def _unpack(text: bytes) -> tuple[int, tuple[Prefix, ...], bool]:
    """Parse number, prefixes, and whether it is the first on an empty Redis."""
    document = json.loads(text)
    prefixes = tuple(
        Prefix(
            str(each["name"]), str(each["policy"]), str(each["id"]),
            {str(name): tuple(int(i) for i in ids) for name, ids in each["tokens"].items()}, each["text"],
            SharingPolicy(**each["sharing"]) if each.get("sharing") else None,  # absent: an older process wrote it
        )
        for each in document["prefixes"]
    )  # fmt: skip
    return int(document["version"]), prefixes, bool(document.get("begins"))


def _number(value: bytes | None) -> int:
    try:
        return int(value or 0)
    except ValueError:
        return -1  # another process's: the document decides
