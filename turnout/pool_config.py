"""One pool of the configuration: its models by role, its default method, its routing, its replicas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from turnout.chat_template import RESERVED
from turnout.cluster_config import AutoscalingConfig, PlacementConfig
from turnout.errors import FieldError
from turnout.tool_formats import tool_formats
from turnout.types import SamplingParams

SMALL, LARGE = "small", "large"
USUAL_ROLES = (SMALL, LARGE)
PREFILL = "prefill"  # placement's name for the actors that only compute prompts

RoleName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MethodChoice(Section):
    """A decoding method by name, with its parameters."""

    name: Annotated[str, Field(description="as in `turnout methods`")]
    params: Annotated[dict[str, Any], Field(description="as in `turnout methods NAME`; absent ones: defaults")] = {}


class PolicyChoice(Section):
    """A routing policy by name, with its parameters."""

    name: Annotated[str, Field(description="as in docs/routing.md")]
    params: Annotated[dict[str, Any], Field(description="as in docs/routing.md; absent ones: defaults")] = {}


class StickyConfig(Section):
    """How long a session keeps its first decision, on every replica."""

    seconds: Annotated[float, Field(gt=0, description="since the session's last request, seconds")] = 600.0
    max_sessions: Annotated[
        int, Field(ge=1, description="sessions remembered; the tenant with the most loses its least recently used one")
    ] = 10_000


class RouteLogConfig(Section):
    """A file with one JSON line per routed request."""

    path: Annotated[str, Field(min_length=1, description="the file; several replicas on a node add their process id")]
    max_bytes: Annotated[int, Field(ge=4096, description="size at which a new file is begun, bytes")] = 64 << 20
    backups: Annotated[int, Field(ge=1, le=1000, description="full files kept: PATH.1 is the newest")] = 5
    texts: Annotated[bool, Field(description="write prompts and answers too")] = False


class ShadowConfig(Section):
    """Requests run a second time in the background, in another way, for comparison only."""

    share: Annotated[float, Field(ge=0, le=1, description="share of the routed requests")]
    policy: Annotated[PolicyChoice, Field(description="what decides how they are run")]
    beside: Annotated[int, Field(ge=0, description="shadows run while at most this many requests are in progress")] = 0
    max_running: Annotated[int, Field(ge=1, description="shadows begun and not finished")] = 1
    max_waiting: Annotated[int, Field(ge=0, description="shadows that wait; more are dropped")] = 16
    timeout_s: Annotated[float, Field(gt=0, description="time from its begin at which one is dropped, seconds")] = 300.0


class RoutingConfig(Section):
    """How requests that name no method, or the method auto, are answered."""

    policy: Annotated[PolicyChoice, Field(description="what decides")]
    sticky: Annotated[StickyConfig | None, Field(description="sessions keep a decision; absent: they do not")] = None
    log: Annotated[RouteLogConfig | None, Field(description="where decisions are written; absent: nowhere")] = None
    shadow: Annotated[ShadowConfig | None, Field(description="comparison in the background; absent: none")] = None


class ReuseConfig(Section):
    """Spans of other prompts that a request with `cache: lossy` takes over at other positions (paper #222, KVShare)."""

    recompute: Annotated[float, Field(ge=0, le=1, description="largest share of these that is computed again")] = 0.15
    threshold: Annotated[
        float, Field(ge=0, description="smallest deviation worth it, in means of the norms of keys and values")
    ] = 0.02
    check_layers: Annotated[int, Field(ge=1, description="first layers that all tokens go through")] = 2
    decode_tokens: Annotated[int, Field(ge=0, description="tokens computed again with each new one")] = 2
    min_similarity: Annotated[float, Field(ge=0, le=1, description="share of a prompt that a source must have")] = 0.1
    min_run: Annotated[int | None, Field(ge=1, description="shortest span, tokens; absent: a block")] = None
    max_prompts: Annotated[int, Field(ge=1, description="prompts remembered for each tenant or group")] = 256
    max_sources: Annotated[int, Field(ge=1, description="prompts that one request takes spans from")] = 4


class SamplingConfig(Section):
    """Sampling parameters of requests that name none, over those of the large model's generation_config.json."""

    temperature: Annotated[float | None, Field(description="0 is greedy")] = None
    top_p: Annotated[float | None, Field(description="nucleus mass; 1 is off")] = None
    top_k: Annotated[int | None, Field(description="candidates kept; 0 and -1 are off")] = None
    min_p: Annotated[float | None, Field(description="share of the top probability; 0 is off")] = None
    repetition_penalty: Annotated[float | None, Field(description="divides positive logits of seen tokens")] = None
    presence_penalty: Annotated[float | None, Field(description="subtracted once per token already generated")] = None
    frequency_penalty: Annotated[float | None, Field(description="subtracted per occurrence already generated")] = None

    @model_validator(mode="after")
    def _check_ranges(self) -> SamplingConfig:
        """Refuse what no request may have either."""
        try:
            SamplingParams.model_validate(self.given)
        except ValidationError as error:
            first = error.errors()[0]
            raise FieldError(str(first["loc"][0]), first["msg"]) from None
        return self

    @property
    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class ReasoningMarkers(Section):
    """Texts that enclose the thinking in an answer."""

    begin: Annotated[str, Field(min_length=1, max_length=256, description="begins the thinking")]
    end: Annotated[str, Field(min_length=1, max_length=256, description="ends the thinking")]

    @model_validator(mode="after")
    def _check_text(self) -> ReasoningMarkers:
        for name in ("begin", "end"):
            if not getattr(self, name).strip():
                raise FieldError(name, "must not be blank")
        return self


class FailoverConfig(Section):
    """Models of a pool that answer in place of an endpoint that cannot be asked just now."""

    roles: Annotated[
        tuple[RoleName, ...],
        Field(description="whose models answer for each other, the first that can before the others; empty: all roles"),
    ] = ()
    continue_elsewhere: Annotated[
        bool,
        Field(
            description="whether an answer that broke off continues with another model from its text; otherwise it ends"
            " in an error"
        ),
    ] = False


class SandboxConfig(Section):
    """Limits of programs that the pool's models write and requests have run, each in a process of its own."""

    timeout_s: Annotated[float, Field(gt=0, le=600, description="time on the clock, seconds")] = 10.0
    cpu_s: Annotated[int, Field(ge=1, le=600, description="processor time, seconds")] = 4
    memory_bytes: Annotated[int, Field(ge=64 << 20, description="address space, bytes")] = 512 << 20
    file_bytes: Annotated[int, Field(ge=0, description="largest file it writes, bytes; all are deleted")] = 1 << 20
    max_running: Annotated[int, Field(ge=1, le=256, description="programs that a replica runs at once")] = 2
    walls: Annotated[
        tuple[Literal["network", "processes", "writes", "reads", "tcp", "signals"], ...],
        Field(description="what the kernel must keep programs from; where it cannot, none is run"),
    ] = ("network", "processes", "writes", "reads")


class PoolConfig(Section):
    """A served endpoint: models that answer together, each by its role. At least one of small and large is given."""

    small: Annotated[str, Field(description="name of the small model, in models; absent: the large one")] = ""
    large: Annotated[str, Field(description="name of the large model, in models; absent: the small one")] = ""
    models: Annotated[
        dict[RoleName, str],
        Field(description="names of models by role, such as judge; small and large may stand here instead"),
    ] = {}
    draft: Annotated[
        Literal["auto"] | None,
        Field(
            description="auto: the draft model that `turnout train draft` made for the large model is the small one;"
            " where there is none, the large model alone, with a note; absent: small says"
        ),
    ] = None
    default: Annotated[MethodChoice, Field(description="method used when a request names none")] = MethodChoice(
        name="entropy_adaptive"
    )
    artifacts: Annotated[
        str | None,
        Field(
            description="folder of what was trained for the pair (NAME.safetensors); demo:artifacts: the demo pair's;"
            " absent: none"
        ),
    ] = None
    routing: Annotated[
        RoutingConfig | None, Field(description="chooses a method for each request; absent: the default method")
    ] = None
    failover: Annotated[
        FailoverConfig | None,
        Field(description="models that answer in place of an endpoint that is down; absent: the request fails"),
    ] = None
    reuse: Annotated[
        ReuseConfig | None, Field(description="spans of other prompts for requests with cache lossy; absent: none")
    ] = None
    sandbox: Annotated[
        SandboxConfig | None,
        Field(description="where requests may have programs of the models run; absent: such requests are refused"),
    ] = None
    sampling: Annotated[SamplingConfig, Field(description="sampling parameters of requests that name none")] = (
        SamplingConfig()
    )
    max_answer_tokens: Annotated[
        int | None,
        Field(ge=1, description="most tokens of an answer whose request names no max_tokens; absent: all that fit"),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="variables of the chat template, such as enable_thinking; a request's win")
    ] = {}
    reasoning_effort: Annotated[
        dict[str, dict[str, Any]],
        Field(description="variables of the chat template by reasoning_effort; absent: those that model families know"),
    ] = {}
    tool_format: Annotated[
        str,
        Field(
            description="how the models write calls of tools, as in docs/structured-output.md; empty: as their chat"
            " template or vocabulary shows"
        ),
    ] = ""
    reasoning: Annotated[
        Literal["auto", "off"] | ReasoningMarkers,
        Field(
            description="markers of the thinking that answers are split at: auto: those of the large model's template"
            " and tokens; off: answers are not split; or an object of begin and end"
        ),
    ] = "auto"
    embedding_pooling: Annotated[
        Literal["mean", "last"],
        Field(description="embeddings whose request names no pooling: mean of all tokens' states, or the last one's"),
    ] = "mean"
    placement: Annotated[PlacementConfig, Field(description="where a copy's models run")] = PlacementConfig()
    replicas: Annotated[int, Field(ge=1, description="copies of the pair; with autoscaling: to begin with")] = 1
    autoscaling: Annotated[
        AutoscalingConfig | None, Field(description="copies come and go with the load; absent: they do not")
    ] = None
    choice: Annotated[
        Literal["prefix", "load"],
        Field(
            description="which copy answers: prefix: by cached prompts and load; load: the less busy of two, as in Ray"
            " itself; sessions do not stick"
        ),
    ] = "prefix"
    max_ongoing_requests: Annotated[int, Field(ge=1, description="requests a replica works on at once")] = 64
    max_queued_requests: Annotated[int, Field(ge=1, description="requests waiting before new ones are refused")] = 256

    @model_validator(mode="after")
    def _fill_roles(self) -> PoolConfig:
        """Give `small` and `large` their models, wherever these are named."""
        given: dict[str, str] = {role: getattr(self, role) for role in USUAL_ROLES if getattr(self, role)}
        for role in USUAL_ROLES:
            name = self.models.get(role, "")
            if name and given.setdefault(role, name) != name:
                raise FieldError(f"models.{role}", f"is {name!r}, and {role} is {given[role]!r}: name one of them")
        if self.draft is not None and SMALL in given:
            raise FieldError("draft", f"is the small model, and {SMALL} is {given[SMALL]!r}: name one of them")
        if not given:
            raise FieldError(LARGE, "required: a pool has at least a large model (large: NAME, or models.large: NAME)")
        alone = next(iter(given.values()))
        for role in USUAL_ROLES:
            self.__dict__[role] = given.get(role, alone)
        return self

    @model_validator(mode="after")
    def _check_template(self) -> PoolConfig:
        named = {"chat_template_kwargs": self.chat_template_kwargs}
        named |= {f"reasoning_effort.{effort}": kwargs for effort, kwargs in self.reasoning_effort.items()}
        for place, kwargs in named.items():
            if taken := sorted(RESERVED & kwargs.keys()):
                raise FieldError(f"{place}.{taken[0]}", "is set by the server, or by a field of a request")
        return self

    @model_validator(mode="after")
    def _check_tool_format(self) -> PoolConfig:
        if self.tool_format and self.tool_format not in tool_formats():
            raise FieldError("tool_format", f"must be one of {', '.join(tool_formats())}")
        return self

    @model_validator(mode="after")
    def _check_roles(self) -> PoolConfig:
        if PREFILL in self.models:
            raise FieldError(f"models.{PREFILL}", "is reserved for actors that compute prompts: choose another name")
        unknown = set(self.placement.resources) - {*self.roles, PREFILL}
        if unknown:
            known = ", ".join(sorted({*self.roles, PREFILL}))
            raise FieldError(f"placement.resources.{min(unknown)}", f"no such role; roles: {known}")
        return self

    @property
    def roles(self) -> dict[str, str]:
        """The model of each role: small, large, then the others as they are given."""
        return {SMALL: self.small, LARGE: self.large} | self.models

    @property
    def members(self) -> list[str]:
        """Names of the models, each once, in the order of `roles`."""
        return list(dict.fromkeys(self.roles.values()))

    def field_of(self, role: str) -> str:
        """The field that names the model of a role: where the pool has one model alone, the one that is given."""
        if role in self.models:
            return f"models.{role}"
        if role in self.model_fields_set:
            return role
        return self.field_of(SMALL if role == LARGE else LARGE)
