"""Who may use the server, and how much: the configuration's section, and the limits of a tenant."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from turnout.calls import Priority
from turnout.errors import FieldError, invalid
from turnout.types import SharingPolicy

TENANT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
TENANT_PATTERN = re.compile(TENANT_NAME)

TenantName = Annotated[str, Field(pattern=TENANT_NAME)]
Globs = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=128)], ...], Field(max_length=64)]
# An HMAC is verified with the key that signs it, so none of these is one.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class _Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Section):
    """What a tenant may spend in a day or a month, by UTC."""

    amount: Annotated[FiniteFloat, Field(gt=0, description="most that is spent in one period")]
    unit: Annotated[
        Literal["tokens", "flops", "seconds"],
        Field(description="tokens of prompts and answers; FLOPs; or seconds of answering"),
    ] = "tokens"
    per: Annotated[Literal["day", "month"], Field(description="the period, by UTC")] = "month"


class TenantLimits(_Section):
    """What a tenant may do. Absent: no limit."""

    requests_per_minute: Annotated[FiniteFloat | None, Field(gt=0, description="requests; as many at once")] = None
    tokens_per_minute: Annotated[
        FiniteFloat | None, Field(gt=0, description="tokens of prompts and answers; as many at once")
    ] = None
    concurrency: Annotated[int | None, Field(ge=1, description="requests in progress")] = None
    pools: Annotated[Globs, Field(description="pools it may ask, as patterns")] = ("*",)
    methods: Annotated[Globs, Field(description="decoding methods it may ask for, as patterns")] = ("*",)
    priority: Annotated[Priority, Field(description="of requests that do not say")] = "interactive"
    max_priority: Annotated[Priority, Field(description="highest that a request may ask for")] = "interactive"
    budget: Annotated[Budget | None, Field(description="what it may spend")] = None
    sharing: Annotated[
        SharingPolicy | None, Field(description="with whom it shares cached prefixes; absent: as kvstore.tenants says")
    ] = None
    operator: Annotated[bool, Field(description="whether it may see the other tenants and what they used")] = False

    @model_validator(mode="after")
    def _check_priority(self) -> TenantLimits:
        if self.max_priority == "batch" and self.priority == "interactive":
            raise FieldError("priority", "must be batch: max_priority is")
        return self

    def allows_pool(self, name: str) -> bool:
        """Whether one of the patterns fits a pool's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.pools)

    def allows_method(self, name: str) -> bool:
        """Whether one of the patterns fits a method's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.methods)


UNLIMITED = TenantLimits(operator=True)


class JwtConfig(_Section):
    """Signed tokens of an identity provider instead of keys of our own."""

    issuer: Annotated[str, Field(min_length=1, description="must be the token's iss")]
    audience: Annotated[str, Field(min_length=1, description="must be in the token's aud")]
    algorithms: Annotated[
        tuple[Algorithm, ...], Field(min_length=1, description="how a token may be signed; never none, never an HMAC")
    ] = ("RS256", "ES256", "EdDSA")
    jwks_file: Annotated[str | None, Field(description="public keys as a JSON Web Key Set; read again on change")] = (
        None
    )
    jwks_url: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[^@\s]+$", description="where the identity provider has its key set, instead of a file"
        ),
    ] = None
    jwks_refresh_s: Annotated[
        float,
        Field(
            ge=1,
            description="time after which jwks_url is fetched again, seconds; a token with an unknown key asks sooner",
        ),
    ] = 300.0
    jwks_timeout_s: Annotated[float, Field(gt=0, le=60, description="longest wait for jwks_url, seconds")] = 5.0
    key_file: Annotated[str | None, Field(description="one public key as PEM, instead of a key set")] = None
    tenant_claim: Annotated[str, Field(min_length=1, description="the claim that names the tenant")] = "tenant"
    leeway_s: Annotated[float, Field(ge=0, le=300, description="by how much clocks may differ, seconds")] = 10.0

    @model_validator(mode="after")
    def _check_keys(self) -> JwtConfig:
        if sum(each is not None for each in (self.jwks_file, self.jwks_url, self.key_file)) != 1:
            raise invalid("access.jwt.jwks_file", "give exactly one of jwks_file, jwks_url and key_file")
        return self


class UsageConfig(_Section):
    """One JSON line for every request that is billed."""

    folder: Annotated[str, Field(min_length=1, description="each server process writes files of its own into it")]
    max_bytes: Annotated[int, Field(ge=4096, description="size at which a new file is begun, bytes")] = 64 << 20
    sync: Annotated[
        Literal["always", "never"],
        Field(description="always: what is written is on the disk before more is; never: the system decides when"),
    ] = "always"
    max_waiting: Annotated[
        int, Field(ge=1, description="records not written yet, those of running requests included; more are refused")
    ] = 10_000


class AccessConfig(_Section):
    """Who may use the server; see docs/tenants.md. Without this section everybody may, as one tenant."""

    tenants_file: Annotated[
        str | None, Field(description="tenants, their keys and limits: `turnout tenants`; read again on change")
    ] = None
    anonymous: Annotated[
        TenantName | None, Field(description="tenant of requests without credentials; absent: they are refused")
    ] = None
    jwt: Annotated[JwtConfig | None, Field(description="signed tokens; absent: none are accepted")] = None
    usage: Annotated[UsageConfig | None, Field(description="where usage is recorded; absent: nowhere")] = None

    @model_validator(mode="after")
    def _check_callers(self) -> AccessConfig:
        if self.tenants_file is None and self.jwt is None and self.anonymous is None:
            raise invalid(
                "access.tenants_file", "is needed: without it, jwt and anonymous no client could use the server"
            )
        return self
