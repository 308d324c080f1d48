"""A model that is a server elsewhere: where it is, how it is asked, and what its tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, StringConstraints, model_validator

from turnout.errors import FieldError, invalid
from turnout.pool_config import PoolConfig, Section

Dialect = Literal["openai", "vllm", "llama.cpp"]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_|~-]+$", max_length=128)]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\t\x20-\x7e]*$", max_length=4096)]
# Set by the client, or by the key file, which is not printed with the configuration.
RESERVED_HEADERS = frozenset({"authorization", "content-length", "content-type", "host", "accept", "connection"})


class PriceConfig(Section):
    """Price of a model's tokens, in US dollars per million."""

    input_usd_per_mtok: Annotated[FiniteFloat, Field(ge=0, description="tokens of prompts")] = 0.0
    output_usd_per_mtok: Annotated[FiniteFloat, Field(ge=0, description="tokens of answers")] = 0.0
    cached_input_usd_per_mtok: Annotated[
        FiniteFloat | None,
        Field(ge=0, description="tokens of prompts that the model's cache held; absent: as other tokens of prompts"),
    ] = None

    def of(self, prompt: float, cached: float, written: float) -> float:
        """Price in US dollars of tokens that were read, found in a cache and written."""
        found = self.input_usd_per_mtok if self.cached_input_usd_per_mtok is None else self.cached_input_usd_per_mtok
        return (prompt * self.input_usd_per_mtok + cached * found + written * self.output_usd_per_mtok) / 1e6


FREE = PriceConfig()


class EndpointConfig(Section):
    """An OpenAI-compatible server that answers for a model: vLLM, SGLang, llama.cpp, Ollama, a cloud."""

    url: Annotated[
        str,
        Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", description="base of its API, such as http://host:8000/v1"),
    ]
    model: Annotated[str, Field(min_length=1, max_length=256, description="what its requests put in `model`")]
    key_file: Annotated[
        str | None, Field(min_length=1, description="file that holds its API key, read again when it changes")
    ] = None
    headers: Annotated[
        dict[HeaderName, HeaderValue],
        Field(default_factory=dict, max_length=32, description="sent with each request; no secrets"),
    ]
    dialect: Annotated[
        Dialect,
        Field(
            description="which fields it knows: openai, those of OpenAI's API; vllm, also those of vLLM and SGLang;"
            " llama.cpp, those of llama.cpp and Ollama"
        ),
    ] = "openai"
    timeout_s: Annotated[
        float, Field(gt=0, description="longest wait for a connection, and for the next bytes of an answer, seconds")
    ] = 60.0
    max_concurrency: Annotated[int, Field(ge=1, description="requests that a replica has there at once")] = 64
    retries: Annotated[
        int, Field(ge=0, le=10, description="tries after the first one, as long as nothing of the answer has come")
    ] = 2
    breaker_failures: Annotated[
        int, Field(ge=1, description="failures in a row after which it is not asked for a while")
    ] = 5
    breaker_open_s: Annotated[float, Field(gt=0, description="that while; then one request tries it, seconds")] = 10.0
    num_parameters: Annotated[
        int, Field(ge=0, description="of its model, for the meters of cost that count them; 0: not known")
    ] = 0
    max_length: Annotated[
        int, Field(ge=0, description="longest sequence of its model, tokens, for clients that ask; 0: not known")
    ] = 0

    @model_validator(mode="after")
    def _check_headers(self) -> EndpointConfig:
        for name in self.headers:
            if name.lower() in RESERVED_HEADERS:
                raise FieldError(f"headers.{name}", "is set by the client; a key stands in key_file")
        return self


def check_pool(name: str, pool: PoolConfig, elsewhere: Mapping[str, str]) -> None:
    """Refuse settings of a pool that mean nothing where some of its models are endpoints, or where none is.

    Args:
        name: the pool's.
        pool: its configuration.
        elsewhere: its models that are endpoints, by role.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    place = f"pools.{name}"
    if not elsewhere:
        if pool.failover is not None:
            raise invalid(f"{place}.failover", "must be absent: none of the pool's models is an endpoint")
        return
    role, model = next(iter(elsewhere.items()))
    why = f"{model!r} ({role}) is an endpoint"
    if pool.placement.models == "actors":
        message = (
            f"must be colocated: {why}; serve a model in actors by a pool of its own, and name that as an endpoint"
        )
        raise invalid(f"{place}.placement.models", message)
    if len(elsewhere) == len(pool.roles):
        alone = "the pool's models are endpoints alone, and the ingress answers it"
        if pool.autoscaling is not None:
            raise invalid(f"{place}.autoscaling", f"must be absent: {alone}")
        if pool.replicas != 1:
            raise invalid(f"{place}.replicas", f"must be 1: {alone}; see max_ongoing_requests and max_concurrency")
    for field in ("reuse", "draft"):
        if getattr(pool, field) is not None:
            raise invalid(f"{place}.{field}", f"must be absent: it needs the tokens of the pool's models, and {why}")
    if pool.failover is not None:
        for given in pool.failover.roles:
            if given not in pool.roles:
                raise invalid(f"{place}.failover.roles", f"no such role: {given!r}; roles: {', '.join(pool.roles)}")
