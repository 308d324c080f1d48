"""Responses that are kept: encrypted under a key of their tenant's, by id, until they expire or are deleted."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deployments.responses.places import FolderPlace, Place, RedisPlace, namespace_of
from kvstore.keys import Keyring, load_root_key
from kvstore.opening import connect_store, open_keyring
from kvstore.tenants.encrypted_document import SealBroken, Sealer
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError

RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})[0-9a-f]{4}")
MAX_HISTORY = 1000  # responses before one
INPUT_ITEMS = 0x8000  # numbers of a request's own items, which lie apart from those of its answer
TENANTS = 1024

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and what it followed.

    Attributes:
        response: as it was answered.
        input: items of its request, without those before them.
        history: ids of the responses it followed, the oldest first.
    """

    response: dict[str, Any]
    input: tuple[dict[str, Any], ...]
    history: tuple[str, ...]

    @property
    def id(self) -> str:
        """Of the response."""
        return str(self.response["id"])

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """What it adds to the conversation: the request's items, and the answer's."""
        return (*self.input, *self.response["output"])


def item_id(kind: str, response_id: str, number: int) -> str:
    """Name an item so that the response it belongs to can be found.

    Args:
        kind: msg, rs, fc or fco.
        response_id: of its response.
        number: of the item, below 65,536.
    """
    return f"{kind}_{response_id.removeprefix('resp_')}{number:04x}"


class ResponseStore:
    """Kept responses of all tenants. Every method blocks, and raises TurnoutError (UNAVAILABLE) where the place fails.

    An `owner` is a tenant as `Caller.owner` names it.

    Args:
        place: where they lie.
        keyring: makes the tenants' keys.
    """

    def __init__(self, place: Place, keyring: Keyring) -> None:
        self.place = place
        self._sealer = lru_cache(TENANTS)(lambda owner: Sealer(keyring, "responses", namespace_of(owner)))

    def save(self, owner: str, kept: KeptResponse) -> None:
        """Keep a response."""
        document = {"response": kept.response, "input": kept.input, "history": kept.history}
        text = zlib.compress(json.dumps(document, ensure_ascii=False).encode(), 1)
        self.place.put(owner, kept.id, self._sealer(owner).seal(kept.id.encode(), text))

    def load(self, owner: str, response_id: str, field: str = "response_id") -> KeptResponse:
        """Return a response of the tenant's.

        Args:
            owner: the tenant.
            response_id: its id.
            field: what the caller calls the id.

        Raises:
            TurnoutError: NOT_FOUND, also where it is another tenant's.
        """
        value = self.place.get(owner, response_id) if RESPONSE_ID.fullmatch(response_id) else None
        if value is None:
            raise absent(field, response_id)
        try:
            found = json.loads(zlib.decompress(self._sealer(owner).open(response_id.encode(), value)))
        except (SealBroken, zlib.error, ValueError):
            log.error("%s was kept under another root key, or was changed; it is taken for gone", response_id)
            raise absent(field, response_id) from None
        return KeptResponse(found["response"], tuple(found["input"]), tuple(found["history"]))

    def conversation(self, owner: str, response_id: str, field: str) -> list[KeptResponse]:
        """Return a response and all that it followed, the oldest first.

        Raises:
            TurnoutError: NOT_FOUND: it, or one of those, is gone; INVALID_ARGUMENT: it followed too many.
        """
        last = self.load(owner, response_id, field)
        if len(last.history) >= MAX_HISTORY:
            message = f"{field}: {response_id} follows {len(last.history)} others; at most {MAX_HISTORY - 1}"
            raise TurnoutError(Code.INVALID_ARGUMENT, message, field)
        return [*(self.load(owner, each, field) for each in last.history), last]

    def referenced(self, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return items by id, as far as their responses are kept."""
        found: dict[str, dict[str, Any]] = {}
        for each in dict.fromkeys(ids):
            match = ITEM_ID.fullmatch(each)
            if match is None or each in found:
                continue
            try:
                kept = self.load(owner, f"resp_{match[1]}")
            except TurnoutError as error:
                if error.code is not Code.NOT_FOUND:
                    raise
                continue
            found |= {item["id"]: item for item in kept.items}
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Those that follow it can be read, but not be followed any more.

        Raises:
            TurnoutError: NOT_FOUND, also where it is another tenant's.
        """
        if not (RESPONSE_ID.fullmatch(response_id) and self.place.delete(owner, response_id)):
            raise absent("response_id", response_id)


def absent(field: str, response_id: str) -> TurnoutError:
    """A response that is not kept, or not any more."""
    message = f"{field}: there is no response {response_id[:100]!r}, or it is not kept any more"
    return TurnoutError(Code.NOT_FOUND, message, field)


def open_responses(config: TurnoutConfig) -> ResponseStore | None:
    """Open what the configuration names; None: responses are not kept.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a key file or the folder cannot be used.
    """
    wanted = config.responses
    if not wanted.keep:
        return None
    if wanted.folder is not None and wanted.root_key_file is not None:
        keyring = Keyring(load_root_key(wanted.root_key_file, "responses.root_key_file"))
        return ResponseStore(FolderPlace(wanted.folder, wanted), keyring)
    if not config.kvstore.has_address:
        return None
    keyring = open_keyring(config.kvstore)
    return ResponseStore(RedisPlace(connect_store(config.kvstore), keyring, wanted), keyring)
