"""Getting an answer, event by event: from a running server, or from models loaded into this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnout.api_keys import read_api_key
from turnout.calls import ChatMessage, Chunk, Event, Failure, GenerateCall, ModelDescription, Usage, cache_class
from turnout.errors import Code, TurnoutError, invalid

if TYPE_CHECKING:
    from pool.endpoints.text_pool import TextPool
    from pool.local_pool import LocalPool
    from turnout.client import Client
    from turnout.config import TurnoutConfig
    from turnout.part_choice import PartChoice

NO_SERVER = ("failed to connect", "DNS resolution failed")  # how gRPC's message begins when no server answers

Announce = Callable[[list[ModelDescription]], None]
Show = Callable[[Chunk], None]


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask. `sampling` holds only what the user gave; the rest is the server's default."""

    text: str
    chat: bool = True
    system: str | None = None
    model: str = ""
    method: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None
    session: str = ""
    limits: dict[str, Any] = field(default_factory=dict)
    explain: bool = False
    cache: str = ""
    parse_special: bool = True
    contrast: dict[str, Any] | None = None
    context: str = ""
    uncertainty: dict[str, Any] | None = None
    abstain_above: float | None = None

    @property
    def messages(self) -> tuple[ChatMessage, ...] | None:
        """The conversation; None when the text is to be continued as it stands."""
        if not self.chat:
            return None
        system = (ChatMessage("system", self.system),) if self.system else ()
        return (*system, ChatMessage("user", self.text))


ApiKeyFile = Annotated[Path | None, typer.Option(help="File with the API key, where the server asks for one.")]


@contextmanager
def connect(address: str, api_key_file: Path | None = None) -> Iterator[Client]:
    """A client of the server at `host:port`; a server that is not there is said so in one sentence."""
    from turnout.client import Client

    with Client(address, api_key=read_api_key(api_key_file)) as client:
        try:
            yield client
        except TurnoutError as error:
            if error.message.startswith(NO_SERVER):
                raise TurnoutError(error.code, f"address: no server answers at {address}", "address") from None
            raise


def ask_server(
    question: Question, address: str, announce: Announce, show: Show, api_key_file: Path | None = None
) -> Usage:
    """Ask a running server; `announce` gets its models first, `show` each chunk as it comes."""
    with connect(address, api_key_file) as client:
        announce(client.models())
        with client.stream(
            None if question.chat else question.text,
            messages=question.messages,
            model=question.model,
            method=question.method,
            params=question.params,
            deadline_s=question.deadline_s,
            session=question.session,
            limits=question.limits,
            explain=question.explain,
            cache=cache_class(question.cache),
            parse_special=question.parse_special,
            context=question.context,
            contrast=question.contrast,
            uncertainty=question.uncertainty,
            abstain_above=question.abstain_above,
            **question.sampling,
        ) as stream:
            for chunk in stream:
                show(chunk)
            if stream.usage is None:
                raise TurnoutError(Code.INTERNAL, "the server ended the stream without its usage")
            return stream.usage


def load_here(name: str, config: TurnoutConfig) -> LocalPool | TextPool:
    """Load a pool into this process: no Ray, no server; its endpoints stay elsewhere.

    Raises:
        TurnoutError: as `LocalPool.load` and `load_text_pool`.
    """
    from pool.local_pool import LocalPool

    if not config.endpoint_roles(config.pools[name]):
        return LocalPool.load(name, config)
    from pool.endpoints.text_pool import load_text_pool

    return load_text_pool(name, config, LocalPool.load)


async def ask_here(question: Question, config: TurnoutConfig, announce: Announce, show: Show) -> Usage:
    """Load a pool's models into this process and ask them; no Ray, no server."""
    pool = load_here(pool_for(question.model, config), config)
    try:
        announce(pool.models())
        return await _finish(pool.generate(_call(question, pool.name)), show)
    finally:
        await pool.close()


async def _finish(events: AsyncIterator[Event], show: Show) -> Usage:
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, Usage):
                return event
            if isinstance(event, Chunk):
                show(event)
    raise TurnoutError(Code.INTERNAL, "the models ended the answer without its usage")


def _call(question: Question, pool: str) -> GenerateCall:
    from turnout.registry import validated
    from turnout.types import RouteLimits, SamplingParams

    return GenerateCall(
        request_id="cli",
        model=question.model or pool,
        sampling=validated(SamplingParams, question.sampling, ""),
        prompt=None if question.chat else question.text,
        messages=question.messages,
        method=question.method,
        params=question.params,
        deadline_s=question.deadline_s,
        session=question.session,
        explain=question.explain,
        cache=cache_class(question.cache),
        parse_special=question.parse_special,
        limits=validated(RouteLimits, question.limits, "limits"),
        contrast=_part(question.contrast, "contrast"),
        context=question.context,
        uncertainty=_part(question.uncertainty, "uncertainty"),
        abstain_above=question.abstain_above,
    )


def _part(given: dict[str, Any] | None, field: str) -> PartChoice | None:
    from turnout.part_choice import PartChoice
    from turnout.registry import validated

    return validated(PartChoice, given, field) if given is not None else None


def pool_for(model: str, config: TurnoutConfig) -> str:
    """The pool that answers for `model`: a pool, a member of one, or nothing where there is only one.

    Raises:
        TurnoutError: no such model, or the choice is open.
    """
    if not model and len(config.pools) == 1:
        return next(iter(config.pools))
    for name, pool in config.pools.items():
        if model in (name, *pool.members):
            return name
    allowed = ", ".join(sorted({*config.pools, *config.models}))
    raise invalid("model", f"must be one of {allowed} (got {model!r})")


def read_config(path: Path | None) -> TurnoutConfig:
    """The configuration in a file, or the demo's when none is given, checked."""
    from turnout.config import TurnoutConfig, check_resources, load_config

    if path is not None:
        return load_config(path)
    config = TurnoutConfig.demo()
    check_resources(config)
    return config
