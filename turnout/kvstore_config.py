"""The shared prefix store's part of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from turnout.errors import invalid
from turnout.types import SharingPolicy

if TYPE_CHECKING:
    from turnout.model_config import ModelConfig
    from turnout.pool_config import PoolConfig

EXACT = "raw"  # the codec that keeps any numbers, rounded ones too
OFF, EMBEDDED = "off", "embedded"
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


class _Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TenantSharing(SharingPolicy):
    """With whom a tenant shares its cache if the tenants file does not say; with everybody, only public prefixes."""

    policy: Annotated[
        Literal["private", "group"], Field(description="private: no other tenant; group: all of its group")
    ] = "private"
    quota_bytes: Annotated[
        int | None,
        Field(ge=0, description="most bytes it may hold in Redis; 0: it may not write; absent: kvstore.quota_bytes"),
    ] = None


class KVStoreConfig(_Section):
    """The store of prefixes that processes share; see docs/kvstore.md."""

    url: Annotated[
        str,
        Field(
            description="off; embedded: a Valkey server of the run's own; or an address of a Valkey or Redis:"
            " redis://, rediss://, unix://,"
            " redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT,HOST:PORT"
        ),
    ] = EMBEDDED
    root_key_file: Annotated[
        str | None,
        Field(description="file with 32 random bytes as 64 hex digits or base64, mode 600; needed with an address"),
    ] = None
    epoch: Annotated[
        int,
        Field(ge=0, le=2**32 - 1, description="raised, the same everywhere: all values get new names and new keys"),
    ] = 0
    password_file: Annotated[str | None, Field(description="file with the password of Redis; absent: the URL's")] = None
    tls_ca_file: Annotated[str | None, Field(description="who signs the server's certificate; absent: as usual")] = None
    tls_cert_file: Annotated[str | None, Field(description="our certificate, where the server asks for one")] = None
    tls_key_file: Annotated[str | None, Field(description="its key")] = None
    host_memory_bytes: Annotated[int, Field(ge=0, description="kept in this process's memory, bytes; 0: nothing")] = (
        256 << 20
    )
    redis_memory_bytes: Annotated[int, Field(ge=16 << 20, description="memory of the embedded server, bytes")] = (
        512 << 20
    )
    ttl_s: Annotated[float, Field(gt=0, description="how long a value lives after its last use, seconds")] = 3600.0
    chunk_tokens: Annotated[
        int | None,
        Field(ge=1, le=256, description="tokens of a value: engine.block_size times a power of 2; absent: by its size"),
    ] = None
    codecs: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="how values are written; only exact ones serve exact requests"),
    ] = (EXACT,)
    residual_tokens: Annotated[
        int, Field(ge=0, description="at a prompt's end, computed where only a lossy codec's values are there")
    ] = 32
    admission: Annotated[
        Literal["second", "always"], Field(description="write what was computed a second time, or everything")
    ] = "second"
    admission_window_s: Annotated[float, Field(gt=0, description="time within which it must be, seconds")] = 600.0
    fetch_timeout_s: Annotated[float, Field(gt=0, description="longest a request waits for its prefix, seconds")] = 2.0
    connections: Annotated[int, Field(ge=1, le=64, description="to each node, for values")] = 2
    write_queue: Annotated[int, Field(ge=1, description="values waiting to be written; more are dropped")] = 64
    breaker_errors: Annotated[int, Field(ge=1, description="errors in a row after which a node is left alone")] = 3
    breaker_cooldown_s: Annotated[float, Field(gt=0, description="how long, seconds; then it is tried again")] = 1.0
    quota_bytes: Annotated[
        int | None,
        Field(ge=0, description="most bytes of a tenant or group in Redis; 0: writes are off; absent: no limit"),
    ] = None
    tenants: Annotated[dict[str, TenantSharing], Field(description="tenants by name; others are private")] = {}

    @property
    def has_address(self) -> bool:
        """Whether it names a server, which others may use too."""
        return self.url not in (OFF, EMBEDDED)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        # The address is not shown: it may hold a password.
        if url not in (OFF, EMBEDDED) and url.partition("://")[0] not in SCHEMES:
            schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise invalid("kvstore.url", f"must be {OFF}, {EMBEDDED} or an address that begins with one of {schemes}")
        return url

    @model_validator(mode="after")
    def _check_files(self) -> KVStoreConfig:
        if self.has_address and self.root_key_file is None:
            raise invalid("kvstore.root_key_file", "is needed with an address in kvstore.url (openssl rand -hex 32)")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise invalid("kvstore.tls_key_file", "goes together with kvstore.tls_cert_file")
        return self


def check_kv(name: str, pool: PoolConfig, models: Mapping[str, ModelConfig], store: KVStoreConfig) -> None:
    """Refuse what cannot be done with the cache of a pool's model that keeps its keys and values in bytes.

    Args:
        name: the pool's.
        pool: its configuration.
        models: all models, by name.
        store: the prefix store of all pools.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    rounded = next((each for each in pool.members if models[each].kv_dtype != "auto"), None)
    if rounded is None:
        return
    why = f"models.{rounded}.kv_dtype is {models[rounded].kv_dtype}"
    if pool.reuse is not None:
        raise invalid(f"pools.{name}.reuse", f"must be absent: {why}, and rounded keys cannot be moved")
    lossy = [each for each in store.codecs if each != EXACT]
    if lossy and store.url != OFF:
        raise invalid("kvstore.codecs", f"{', '.join(lossy)}: {why}, which is stored exactly; allowed here: {EXACT}")
