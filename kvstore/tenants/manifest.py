"""What a store says about itself in Redis, sealed: that it is filled under this root key, and for which models."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass

from kvstore.base import ByteStore, StoreFault
from kvstore.encodings import Encodings
from kvstore.scripts import ALL_FIELDS, CLAIM, ENROL, GET
from kvstore.tenants.encrypted_document import SealBroken, Sealer
from turnout.errors import TurnoutError, invalid

ROOT = b"to1:{reg}:root"
MODELS = b"to1:{reg}:models"
PROOF = b"turnout"


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A model that some process keeps chunks of, as the command line needs to know it.

    Attributes:
        name: in that process's configuration.
        fingerprint: of the model, hexadecimal.
        chunk_tokens: tokens in a chunk.
        groups: values of a chunk.
        codecs: names of the encodings, as keys have them.
        tokenizer: digest of its tokenizer.
    """

    name: str
    fingerprint: str
    chunk_tokens: int
    groups: int
    codecs: tuple[str, ...]
    tokenizer: str


def check_root_key(store: ByteStore, sealer: Sealer, deadline: float, claims: bool = True) -> None:
    """See that Redis was filled under this root key; an empty one becomes ours.

    Args:
        store: Redis.
        sealer: of the root key.
        deadline: monotonic.
        claims: whether an empty one becomes ours.

    Raises:
        TurnoutError: it was filled under another root key.
        StoreFault: it does not answer.
    """
    if claims:
        value = store.script(CLAIM, [ROOT], [sealer.seal(ROOT, PROOF)], deadline)
    else:
        value = store.script(GET, [ROOT], [], deadline)
    if value is not None and not isinstance(value, bytes):
        raise StoreFault("broken", "the claim of the root key got an answer that no server gives")
    if value is not None and not _proves(sealer, value):
        raise wrong_root_key()


def wrong_root_key() -> TurnoutError:
    """Return the error for another root key."""
    return invalid(
        "kvstore.root_key_file",
        "this Redis was filled under another root key: use the same key file everywhere,"
        " or another Redis (or an empty database) for a new key",
    )


def enrol(store: ByteStore, sealer: Sealer, name: str, encodings: Encodings, tokenizer: str, deadline: float) -> None:
    """Record that chunks of a model are kept.

    Raises:
        StoreFault: Redis does not answer.
    """
    model = Enrolled(
        name=name,
        fingerprint=encodings.fingerprint.hex(),
        chunk_tokens=encodings.chunk_tokens,
        groups=len(encodings.groups),
        codecs=tuple(encoding.name for encoding in encodings.all),
        tokenizer=tokenizer,
    )
    tag = base64.urlsafe_b64encode(encodings.fingerprint[:8]).rstrip(b"=")
    sealed = sealer.seal(MODELS + tag, json.dumps(asdict(model)).encode())
    store.script(ENROL, [MODELS], [tag, sealed], deadline)


def enrolled(store: ByteStore, sealer: Sealer, deadline: float) -> list[Enrolled]:
    """List the models that were enrolled under this root key.

    Raises:
        StoreFault: Redis does not answer.
    """
    values = store.script(ALL_FIELDS, [MODELS], [], deadline) or []
    found = []
    for tag, sealed in zip(values[::2], values[1::2], strict=True):
        try:
            fields = json.loads(sealer.open(MODELS + tag, sealed))
            found.append(Enrolled(**{**fields, "codecs": tuple(fields["codecs"])}))
        except (SealBroken, ValueError, TypeError, KeyError):
            continue
    return sorted(found, key=lambda each: each.name)


def _proves(sealer: Sealer, value: bytes) -> bool:
    try:
        return sealer.open(ROOT, value) == PROOF
    except SealBroken:
        return False
