"""Names in the store: what a chunk is called, under keys that only those who hold the root key can make.

A chunk's digest is chained: it stands for the model, everything before the chunk, and the chunk itself (KVSTORE 4.2).
It is keyed by the namespace, so that one tenant's names say nothing about another's, and a reader of Redis without
the root key can neither tell what a name stands for nor try a guessed prompt.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hmac
import json
import logging
import os
import secrets
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from turnout.errors import TurnoutError, invalid
from turnout.types import Namespace, Sharing

if TYPE_CHECKING:
    from _hashlib import HASH

ROOT_KEY_BYTES = 32
MAX_EPOCH = 2**32 - 1
NAMESPACES_KEPT = 1024  # derived keys are kept for this number; others are derived again

log = logging.getLogger(__name__)


def fingerprint(parts: Mapping[str, str | int]) -> bytes:
    """Digest what KV depends on besides the tokens: 32 bytes, equal for equal parts in any order, and only then.

    Args:
        parts: digests of the model's configuration, weights and tokenizer, dtype, layout version, numerics class,
            tokens of a chunk: contents, never names or paths.

    Raises:
        ValueError: there are no parts, or one is neither text nor an integer (floats have no one text).
    """
    if not parts:
        raise ValueError("a fingerprint of nothing")
    for name, part in parts.items():
        if not isinstance(part, str | int):
            raise ValueError(f"{name} of a fingerprint must be text or an integer, not {type(part).__name__}")
    return sha256(json.dumps(dict(parts), sort_keys=True, separators=(",", ":")).encode()).digest()


def load_root_key(path: str | os.PathLike[str], field: str = "kvstore.root_key_file") -> bytes:
    """Load the store's root key: 32 bytes, in a file as 64 hexadecimal digits or as base64; blanks are ignored.

    A file that every user of the machine may read gets a warning in the log.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the file cannot be read or holds something else. What it holds is not shown.
    """
    try:
        with Path(path).open("rb") as file:
            is_open_to_all = bool(os.fstat(file.fileno()).st_mode & 0o004)
            text = file.read(1024).removeprefix(codecs.BOM_UTF8).strip()
    except OSError as error:
        raise invalid(field, f"cannot read {os.fspath(path)}: {error.strerror}") from None
    key = _parse_root_key(text)
    if key is None or len(key) != ROOT_KEY_BYTES:
        raise _not_a_key(field, path)
    if is_open_to_all:
        log.warning("%s: every user of this machine may read the root key %s; chmod 600 it", field, os.fspath(path))
    return key


def write_root_key(path: str | os.PathLike[str]) -> bytes:
    """Make a random root key and write it to a new file that only its owner may read; the key.

    Raises:
        FileExistsError: there is such a file; a root key is never overwritten.
    """
    key = secrets.token_bytes(ROOT_KEY_BYTES)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(key.hex() + "\n")
    return key


def _parse_root_key(text: bytes) -> bytes | None:
    try:
        if len(text) == 2 * ROOT_KEY_BYTES:
            return bytes.fromhex(text.decode("ascii"))
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None


def _not_a_key(field: str, path: str | os.PathLike[str]) -> TurnoutError:
    return invalid(
        field,
        f"{os.fspath(path)} must hold {ROOT_KEY_BYTES} random bytes, as {2 * ROOT_KEY_BYTES} hexadecimal digits or"
        f" as base64 (openssl rand -hex {ROOT_KEY_BYTES})",
    )


class Keyring:
    """Every key of the store, derived from the root key; usable from several threads.

    A new epoch renames and re-encrypts everything: what was written before is not found any more and lives out its
    time. With random nonces one key is good for 2**32 values, so the epoch is to be raised before a namespace was
    sent that number.

    Args:
        root: the root key, 32 bytes.
        epoch: 0 to 2**32 - 1.

    Raises:
        ValueError: the root key or the epoch is not such.
    """

    def __init__(self, root: bytes, epoch: int = 0) -> None:
        if len(root) != ROOT_KEY_BYTES:
            raise ValueError(f"a root key has {ROOT_KEY_BYTES} bytes, not {len(root)}")
        if not 0 <= epoch <= MAX_EPOCH:
            raise ValueError(f"an epoch is between 0 and {MAX_EPOCH}, not {epoch}")
        self.epoch = epoch
        self._root = root
        self._namespace_id = lru_cache(NAMESPACES_KEPT)(self._make_namespace_id)
        self._chain_states = lru_cache(NAMESPACES_KEPT)(self._make_chain_states)
        self._value_key = lru_cache(NAMESPACES_KEPT)(self._make_value_key)

    def namespace_id(self, namespace: Namespace) -> bytes:
        """Return the namespace's name in the store, 16 bytes; the same in every epoch."""
        return self._namespace_id(namespace)

    def chain_key(self, namespace: Namespace) -> bytes:
        """Return the key of the namespace's digests in this epoch, 32 bytes."""
        return self.derive("chain", namespace, self.epoch)

    def chain_states(self, namespace: Namespace) -> tuple[HASH, HASH]:
        """Return SHA-256 after the inner and the outer pad of HMAC (RFC 2104) with `chain_key`: copy, do not update."""
        return self._chain_states(namespace)

    def value_key(self, namespace: Namespace, epoch: int) -> AESGCM:
        """Return the key that encrypts the namespace's values of an epoch."""
        return self._value_key(namespace, epoch)

    def derive(self, purpose: str, namespace: Namespace | None, epoch: int) -> bytes:
        """Derive a key of 32 bytes for another purpose, unrelated to every other one.

        Args:
            purpose: what it is for; "chain" and "value" are taken.
            namespace: whose it is; None: the store's own.
            epoch: of the key.
        """
        whose = namespace.key if namespace is not None else b""
        info = b"%d:%s|%d|%s" % (len(purpose), purpose.encode(), epoch, whose)
        return HKDF(SHA256(), length=32, salt=b"turnout kvstore 1", info=info).derive(self._root)

    def _make_namespace_id(self, namespace: Namespace) -> bytes:
        return hmac.digest(self._root, b"namespace|" + namespace.key, "sha256")[:16]

    def _make_chain_states(self, namespace: Namespace) -> tuple[HASH, HASH]:
        key = self.chain_key(namespace).ljust(64, b"\0")
        return sha256(bytes(byte ^ 0x36 for byte in key)), sha256(bytes(byte ^ 0x5C for byte in key))

    def _make_value_key(self, namespace: Namespace, epoch: int) -> AESGCM:
        return AESGCM(self.derive("value", namespace, epoch))


@dataclass(frozen=True, slots=True)
class Link:
    """One full chunk of a sequence.

    Attributes:
        index: of the chunk; its first token is index * chunk_tokens.
        namespace: whose it is.
        digest: 32 bytes that stand for the model and all tokens up to the chunk's end, in this namespace.
    """

    index: int
    namespace: Namespace
    digest: bytes


class Chain:
    """Links of one growing sequence, computed as far as they are asked for. Not for several threads at once.

    h_i = HMAC-SHA256(chain key of the namespace of chunk i, h_(i-1) || F || u32 n || n tokens as u32), all
    little-endian, n the tokens of a chunk and h_(-1) 32 zero bytes. A rope length other than 0 follows n as u64, and
    SHA-256 of the sharing's salt, if it has one, follows that.

    Args:
        keyring: the store's keys.
        fingerprint: of the model.
        chunk_tokens: of a chunk.
        sharing: whose the tokens are.
        rope_length: a number that the keys of the sequence depend on besides its tokens; 0: on none.

    Raises:
        ValueError: a chunk without tokens.
    """

    __slots__ = ("_head", "_keyring", "_links", "chunk_tokens", "sharing")

    def __init__(
        self, keyring: Keyring, fingerprint: bytes, chunk_tokens: int, sharing: Sharing, rope_length: int = 0
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"a chunk has at least one token, not {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self.sharing = sharing
        self._keyring = keyring
        self._head = fingerprint + chunk_tokens.to_bytes(4, "little")
        if rope_length:
            self._head += rope_length.to_bytes(8, "little")
        self._head += sharing.salt_key
        self._links: list[Link] = []

    def links(self, tokens: Sequence[int], count: int) -> list[Link]:
        """Return links of the sequence's leading full chunks, at least the first `count` if it has that many.

        Args:
            tokens: the sequence so far; those of earlier calls must stand unchanged at its start.
            count: chunks asked for.

        Returns:
            The chain's own list: not to be changed.

        Raises:
            OverflowError: a token is negative or beyond 32 bits.
        """
        links, size = self._links, self.chunk_tokens
        first, end = len(links), min(count, len(tokens) // size)
        if first >= end:
            return links
        packed = array("I", tokens[first * size : end * size])
        if sys.byteorder == "big":
            packed.byteswap()
        content, step = packed.tobytes(), 4 * size
        digest = links[-1].digest if links else bytes(32)
        owner: Namespace | None = None
        for index in range(first, end):
            namespace = self.sharing.namespace((index + 1) * size)
            if namespace is not owner:
                owner, (inner, outer) = namespace, self._keyring.chain_states(namespace)
            start = (index - first) * step
            # HMAC from the states after its pads: half the time of the library's, which makes them for every message
            message, mac = inner.copy(), outer.copy()
            message.update(digest + self._head + content[start : start + step])
            mac.update(message.digest())
            digest = mac.digest()
            links.append(Link(index, namespace, digest))
        return links


def redis_key(keyring: Keyring, fingerprint: bytes, link: Link, codec: str, group: int) -> bytes:
    """Return the key of a chunk's value: `to1:<namespace>:<model>:<codec>:<layer group>:<digest>`.

    `codec` is what `kvstore.value.encoding_name` calls it.

    No {hash tag}: a cluster spreads the values over its nodes.
    """
    return b"%s%s:%d:%s" % (key_prefix(keyring, fingerprint, link.namespace), codec.encode(), group, _b64(link.digest))


def key_prefix(keyring: Keyring, fingerprint: bytes, namespace: Namespace) -> bytes:
    """Return the beginning of the keys of all of a namespace's values for a model."""
    return b"to1:%s:%s:" % (_b64(keyring.namespace_id(namespace)), _b64(fingerprint[:8]))


def _b64(value: bytes) -> bytes:
    return base64.urlsafe_b64encode(value).rstrip(b"=")
