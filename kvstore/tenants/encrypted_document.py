"""Documents under keys of the store: encrypted, and bound to the place they lie in."""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.keys import Keyring
from turnout.types import Namespace

NONCE_BYTES = 12


class SealBroken(Exception):  # noqa: N818
    """The document was not written under this root key for this place."""


class Sealer:
    """Encryption of documents under a key that only holders of the root key can make.

    Args:
        keyring: the store's keys.
        purpose: of the documents, see `Keyring.derive`.
        namespace: whose they are; None: the store's own.
    """

    def __init__(self, keyring: Keyring, purpose: str = "documents", namespace: Namespace | None = None) -> None:
        self._cipher = AESGCM(keyring.derive(purpose, namespace, 0))

    def seal(self, place: bytes, text: bytes) -> bytes:
        """Encrypt by AES-256-GCM with a random nonce, bound to the place."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, text, place)

    def open(self, place: bytes, value: bytes) -> bytes:
        """Decrypt what was sealed for the place.

        Raises:
            SealBroken: it was not, or under another root key, or was changed.
        """
        try:
            return self._cipher.decrypt(value[:NONCE_BYTES], value[NONCE_BYTES:], place)
        except (InvalidTag, ValueError):
            raise SealBroken from None
