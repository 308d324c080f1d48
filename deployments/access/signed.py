"""Signed tokens (JWT) of an identity provider: whose key signed, what it says, and for which tenant."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from deployments.access.fetched_keys import COOLDOWN_S, FetchedKeys
from deployments.access.reloading_file import POLL_S, ReloadingFile
from turnout.access_config import TENANT_PATTERN, JwtConfig
from turnout.errors import Code, TurnoutError, invalid

MAX_LENGTH = 8192  # of a token, characters
KEY_TYPES = {"RSA": ("RS", "PS"), "EC": ("ES",), "OKP": ("EdDSA",)}
CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
CLASSES = {
    "RSA": (rsa.RSAPublicKey,),
    "EC": (ec.EllipticCurvePublicKey,),
    "OKP": (ed25519.Ed25519PublicKey, ed448.Ed448PublicKey),
}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key; `algorithms` are those it can verify."""

    id: str
    key: Any
    algorithms: frozenset[str]


def read_keys(path: Path, jwks: bool, algorithms: tuple[str, ...]) -> tuple[SigningKey, ...]:
    """The public keys of a file: a JSON Web Key Set, or one as PEM.

    Raises:
        TurnoutError: it cannot be read, a key is secret or of no kind that `algorithms` need.
    """
    field = "access.jwt.jwks_file" if jwks else "access.jwt.key_file"
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise invalid(field, f"cannot read {path}: {error.strerror}") from None
    return _verifying(_jwks(data, algorithms, field) if jwks else (_pem(data, algorithms, field),), algorithms, field)


def fetched_keys(document: dict[str, Any], algorithms: tuple[str, ...]) -> tuple[SigningKey, ...]:
    """Return the public keys of a JSON Web Key Set that was fetched.

    A key of another kind is left out, so that a provider which adds one does not lock out everybody.

    Raises:
        TurnoutError: there is no key that `algorithms` can use.
    """
    found: list[SigningKey] = []
    entries = document.get("keys")
    for entry in entries if isinstance(entries, list) else ():
        try:
            found += _key_of(entry, algorithms, "access.jwt.jwks_url")
        except (TurnoutError, ValueError, KeyError, TypeError, AttributeError, jwt.PyJWTError):
            continue
    return _verifying(tuple(found), algorithms, "access.jwt.jwks_url")


def _verifying(keys: tuple[SigningKey, ...], algorithms: tuple[str, ...], field: str) -> tuple[SigningKey, ...]:
    if not any(key.algorithms for key in keys):
        raise invalid(field, f"no key in it verifies one of {', '.join(algorithms)}")
    return keys


def _pem(data: bytes, algorithms: tuple[str, ...], field: str) -> SigningKey:
    try:
        key = load_pem_public_key(data)
    except (ValueError, TypeError):
        raise invalid(field, "must be one public key as PEM") from None
    found = next((kind for kind, classes in CLASSES.items() if isinstance(key, classes)), "")
    return SigningKey("", key, _of_curve(key, _fitting(found, algorithms)))


def _jwks(data: bytes, algorithms: tuple[str, ...], field: str) -> tuple[SigningKey, ...]:
    try:
        return tuple(key for entry in json.loads(data)["keys"] for key in _key_of(entry, algorithms, field))
    except (ValueError, KeyError, TypeError, AttributeError, jwt.PyJWTError):
        raise invalid(field, "is no JSON Web Key Set of public keys") from None


def _key_of(entry: dict[str, Any], algorithms: tuple[str, ...], field: str) -> Iterable[SigningKey]:
    """Return the key of an entry; none where it is for other algorithms, or not for signatures."""
    kind = entry["kty"]
    # A symmetric key signs as well as it verifies; a private one has no business here.
    if kind not in KEY_TYPES or "d" in entry:
        raise invalid(field, f"key {str(entry.get('kid', ''))[:60]!r} must be public (RSA, EC or OKP)")
    fitting = _fitting(kind, algorithms)
    if "alg" in entry:
        fitting &= {entry["alg"]}
    if not fitting or entry.get("use", "sig") != "sig":
        return ()
    parsed = jwt.PyJWK(entry, algorithm=min(fitting))
    return (SigningKey(str(entry.get("kid", "")), parsed.key, _of_curve(parsed.key, fitting)),)


def _fitting(kind: str, algorithms: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in algorithms if name.startswith(KEY_TYPES.get(kind, ())))


def _of_curve(key: Any, algorithms: frozenset[str]) -> frozenset[str]:
    """An elliptic curve goes with one algorithm only."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return algorithms
    return algorithms & {CURVES.get(key.curve.name, "")}


class SignedTokens:
    """Verifies tokens as the configuration says.

    Args:
        config: the section.
        poll_s: how often its file is looked at, in seconds.
        cooldown_s: shortest time between two fetches of its address, in seconds.

    Raises:
        TurnoutError: its file is broken.
    """

    def __init__(self, config: JwtConfig, poll_s: float = POLL_S, cooldown_s: float = COOLDOWN_S) -> None:
        self._config = config
        self._keys: ReloadingFile[tuple[SigningKey, ...]] | FetchedKeys[tuple[SigningKey, ...]]
        if config.jwks_url is not None:
            times = (config.jwks_refresh_s, config.jwks_timeout_s, cooldown_s)
            self._keys = FetchedKeys(config.jwks_url, lambda found: fetched_keys(found, config.algorithms), *times)
        else:
            path = Path(config.jwks_file or config.key_file or "").expanduser()
            self._keys = ReloadingFile(
                path, lambda at: read_keys(at, config.jwks_file is not None, config.algorithms), poll_s
            )

    async def settle(self, token: str) -> None:
        """Let a key set at an address be fetched again if none of its keys has the id that a token names."""
        if not isinstance(self._keys, FetchedKeys) or len(token) > MAX_LENGTH:
            return
        try:
            head = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, TypeError):
            return
        known = self._keys.value
        unknown = known is None or (bool(head.get("kid")) and all(key.id != str(head["kid"]) for key in known))
        if unknown and head.get("alg") in self._config.algorithms:
            await self._keys.look_again()

    def tenant_of(self, token: str) -> tuple[str, str]:
        """The tenant that a token names, and the id of the key that signed it.

        Raises:
            TurnoutError: UNAUTHENTICATED; says what is wrong with the token, and nothing that is in it. UNAVAILABLE:
                no key was ever fetched.
        """
        if len(token) > MAX_LENGTH:
            raise refused(f"a token has at most {MAX_LENGTH} characters")
        config = self._config
        try:
            head = jwt.get_unverified_header(token)
            key, claims = self._verified(token, self._candidates(str(head.get("kid", "")), str(head.get("alg", ""))))
        except jwt.ExpiredSignatureError:
            raise refused("the token has expired") from None
        except jwt.InvalidAudienceError:
            raise refused("the token is for another audience") from None
        except jwt.InvalidIssuerError:
            raise refused("the token is of another issuer") from None
        except jwt.ImmatureSignatureError:
            raise refused("the token is not valid yet") from None
        except jwt.MissingRequiredClaimError as error:
            raise refused(f"the token has no {error.claim}") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise refused("the token is malformed, or its signature is wrong") from None
        tenant = claims.get(config.tenant_claim)
        if not isinstance(tenant, str) or not TENANT_PATTERN.fullmatch(tenant):
            raise refused(f"the token's claim {config.tenant_claim!r} names no tenant")
        return tenant, key.id or "jwt"

    def _verified(self, token: str, keys: list[SigningKey]) -> tuple[SigningKey, dict[str, Any]]:
        """The key that signed a token, and what the token says; without an id, each that could have is tried."""
        config = self._config
        for key in keys:
            try:
                claims: dict[str, Any] = jwt.decode(
                    token,
                    key.key,
                    algorithms=sorted(key.algorithms),
                    audience=config.audience,
                    issuer=config.issuer,
                    leeway=config.leeway_s,
                    options={"require": ["exp", "iss", "aud"]},
                )
            except jwt.InvalidSignatureError:
                if key is keys[-1]:
                    raise
            else:
                return key, claims
        raise refused("no key is known that could have signed the token")

    def _candidates(self, key_id: str, algorithm: str) -> list[SigningKey]:
        if algorithm not in self._config.algorithms:
            raise refused(f"a token must be signed with one of {', '.join(self._config.algorithms)}")
        known = self._keys.value
        if known is None:
            message = "authorization: the identity provider's keys cannot be fetched now; try again later"
            raise TurnoutError(Code.UNAVAILABLE, message, "authorization")
        return [key for key in known if algorithm in key.algorithms and (key.id == key_id or not key.id or not key_id)]

    @property
    def fault(self) -> str | None:
        """Why its file, or what is at its address, is not used as it is now."""
        return self._keys.fault

    def close(self) -> None:
        """Look at the file, or the address, no more."""
        self._keys.close()


def refused(reason: str) -> TurnoutError:
    """Return the refusal of an unknown caller; the reason shows nothing of the credential."""
    return TurnoutError(Code.UNAUTHENTICATED, f"authorization: {reason}", "authorization")
