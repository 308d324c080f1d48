"""API keys: made once, shown once, and kept as a salted hash.

A key is `tk_ID_SECRET`: the id finds its record, the secret has 256 random bits. It cannot be guessed, so
the hash may be a fast one; the salt keeps equal secrets of two files from being seen to be equal.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

PREFIX = "tk"
SECRET_BYTES = 32
ID_BYTES = 6
MAX_LENGTH = 128  # a longer one is no key


class KeyRecord(BaseModel):
    """What is kept of a key. Times are aware; the hash is 32 bytes, the salt 16, both in hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", repr=False)]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    label: Annotated[str, Field(max_length=100)] = ""

    def opened_by(self, secret: str) -> bool:
        """Whether a secret is this key's; takes the same time for every wrong one."""
        return hmac.compare_digest(_digest(secret, self.salt), self.hash)

    def ended(self, now: datetime) -> str | None:
        """Why the key is good no longer; None: it is."""
        if self.revoked is not None and self.revoked <= now:
            return "revoked"
        if self.expires is not None and self.expires <= now:
            return "expired"
        return None


def make_key(expires: datetime | None = None, label: str = "") -> tuple[str, KeyRecord]:
    """Make a new key, which cannot be shown again, and the record of it that is kept."""
    key_id, secret, salt = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES), secrets.token_hex(16)
    now = datetime.now(UTC).replace(microsecond=0)
    record = KeyRecord(
        id=key_id, hash=_digest(secret, salt), salt=salt, created=now, expires=expires, revoked=None, label=label
    )
    return f"{PREFIX}_{key_id}_{secret}", record


def is_key(credential: str) -> bool:
    """Whether a credential has the form of a key, and not of a signed token."""
    return credential.startswith(f"{PREFIX}_")


def parse_key(key: str) -> tuple[str, str] | None:
    """Id and secret; None where it has not the form of a key."""
    parts = key.split("_", 2)
    if len(key) > MAX_LENGTH or len(parts) != 3 or parts[0] != PREFIX or not key.isascii():
        return None
    return parts[1], parts[2]


def _digest(secret: str, salt: str) -> str:
    return hashlib.blake2b(secret.encode(), salt=bytes.fromhex(salt), digest_size=32, person=b"turnout-key").hexdigest()
