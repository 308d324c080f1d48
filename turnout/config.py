"""The configuration file: one YAML document, every field validated, every fault named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from turnout.access_config import AccessConfig
from turnout.batches_config import BatchesConfig
from turnout.checkpoint_files import check_present
from turnout.console_config import ConsoleConfig
from turnout.drafts import find_draft, layer_share
from turnout.endpoint_config import EndpointConfig as EndpointConfig
from turnout.endpoint_config import check_pool
from turnout.errors import invalid
from turnout.gguf_files import described
from turnout.kvstore_config import OFF, check_kv
from turnout.kvstore_config import KVStoreConfig as KVStoreConfig
from turnout.kvstore_config import TenantSharing as TenantSharing
from turnout.model_config import ModelConfig as ModelConfig
from turnout.model_fetching import fetch_model, find_model, pin_model
from turnout.model_location import LocalFiles, parse_location
from turnout.pool_config import SMALL
from turnout.pool_config import FailoverConfig as FailoverConfig
from turnout.pool_config import MethodChoice as MethodChoice
from turnout.pool_config import PolicyChoice as PolicyChoice
from turnout.pool_config import PoolConfig as PoolConfig
from turnout.pool_config import ReuseConfig as ReuseConfig
from turnout.pool_config import RouteLogConfig as RouteLogConfig
from turnout.pool_config import RoutingConfig as RoutingConfig
from turnout.pool_config import Section as Section
from turnout.pool_config import ShadowConfig as ShadowConfig
from turnout.pool_config import StickyConfig as StickyConfig
from turnout.registry import ALONE, explain, get_method, load
from turnout.responses_config import ResponsesConfig
from turnout.telemetry_config import TelemetryConfig

POLICIES_PACKAGE = "router.policies"


class EngineConfig(Section):
    """The batching engine, the same for every model of a pool."""

    block_size: Annotated[int, Field(ge=1, le=256, description="tokens per KV block")] = 16
    token_budget: Annotated[int, Field(ge=1, description="most tokens in one forward pass")] = 512
    max_batch: Annotated[int, Field(ge=1, description="most sequences in one forward pass")] = 64
    max_slowdown: Annotated[
        float,
        Field(
            gt=1,
            description="how many times longer a step may take for prompts fed along with running requests (more where "
            "more of them wait than run), or for the requests that another model of its device will bring it",
        ),
    ] = 1.75
    short_step_s: Annotated[
        float,
        Field(
            ge=0,
            description="a step may always take this long, seconds: tokens then come faster than a person reads",
        ),
    ] = 0.005
    order: Annotated[
        Literal["fifo", "hit_rate"],
        Field(description="prompts start as they come, or those first of which most is cached"),
    ] = "fifo"
    max_overtaken: Annotated[int, Field(ge=0, description="prompts that may start before an older one")] = 16
    shared_attention: Annotated[
        bool,
        Field(description="read the keys of a prefix that requests of a step share once for all of them (not on GPUs)"),
    ] = True
    batch_share: Annotated[
        float,
        Field(ge=0, lt=1, description="share of the time that work of batches gets while interactive requests wait"),
    ] = 0.0
    batch_slowdown: Annotated[
        float,
        Field(ge=1, description="how many times longer than one of a single token a step of batches may take"),
    ] = 4.0
    batch_slowdown_beside: Annotated[
        float, Field(ge=1, description="the same within five seconds of an interactive request")
    ] = 1.5
    threads: Annotated[
        int | None,
        Field(
            ge=1,
            description="CPU threads of a forward; absent: all cores, or one fewer where that is measured to be faster",
        ),
    ] = None
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        Field(
            description="native: compiled for this CPU; torch: runs everywhere;"
            " auto: native on a CPU and Triton on a GPU, where they can be had"
        ),
    ] = "auto"


# Calibrated for the demo pair (docs/results/ead.md): every token that the small model is unsure of is the large one's.
DEMO_METHOD = MethodChoice(
    name="entropy_adaptive",
    params={
        "threshold": 0.1,
        "window": 1,
        "min_stay": 1,
        "min_stay_small": 0,
        "effect": "current",
        "effect_back": "next",
    },
)


class ServerConfig(Section):
    """Where the endpoints listen, and their limits."""

    grpc_port: Annotated[int, Field(ge=1, le=65535, description="gRPC, on all interfaces")] = 9000
    http_port: Annotated[int, Field(ge=1, le=65535, description="HTTP, on http_host")] = 8000
    http_host: Annotated[str, Field(description="address HTTP listens on; 0.0.0.0: all interfaces")] = "127.0.0.1"
    ingress_processes: Annotated[
        int, Field(ge=0, le=256, description="processes that listen themselves; 0: one, behind Ray Serve's proxy")
    ] = 0
    cors_origins: Annotated[
        tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")], ...],
        Field(description="origins, such as https://app.example.com, whose pages may call over HTTP; *: any"),
    ] = ()
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30, description="largest request, bytes")] = 4 << 20
    request_timeout_s: Annotated[float, Field(gt=0, description="longest a request may take, seconds")] = 600.0
    shutdown_grace_s: Annotated[
        float, Field(gt=0, description="time running requests have to end when the server stops, seconds")
    ] = 5.0

    @model_validator(mode="after")
    def _check_ports(self) -> ServerConfig:
        if self.grpc_port == self.http_port:
            raise invalid("server.http_port", f"must differ from server.grpc_port (both are {self.http_port})")
        return self


class RayConfig(Section):
    """How to reach or start Ray."""

    address: Annotated[str | None, Field(description="an existing cluster; absent: a local one is started")] = None
    temp_dir: Annotated[str | None, Field(description="session files of a local cluster; keep it short")] = None
    num_cpus: Annotated[int | None, Field(ge=1, description="logical CPUs of a local cluster; absent: all")] = None
    object_store_bytes: Annotated[int, Field(ge=80 << 20, description="object store of a local cluster")] = 80 << 20
    start_timeout_s: Annotated[
        float,
        Field(gt=0, description="time without any change in its replicas after which a start is given up, seconds"),
    ] = 600.0


class TurnoutConfig(Section):
    """The whole file."""

    models: Annotated[dict[str, ModelConfig], Field(min_length=1, description="models by name")]
    pools: Annotated[dict[str, PoolConfig], Field(min_length=1, description="served endpoints by name")]
    engine: Annotated[EngineConfig, Field(description="the batching engine of every pool")] = EngineConfig()
    server: Annotated[ServerConfig, Field(description="addresses and limits")] = ServerConfig()
    ray: Annotated[RayConfig, Field(description="the Ray cluster")] = RayConfig()
    kvstore: Annotated[KVStoreConfig, Field(description="the prefix store that processes share")] = KVStoreConfig()
    telemetry: Annotated[TelemetryConfig, Field(description="traces, logs, goals, audits")] = TelemetryConfig()
    console: Annotated[ConsoleConfig, Field(description="the web page")] = ConsoleConfig()
    batches: Annotated[BatchesConfig | None, Field(description="files of many requests; absent: none are taken")] = None
    responses: Annotated[ResponsesConfig, Field(description="what /v1/responses keeps")] = ResponsesConfig()
    access: Annotated[
        AccessConfig | None, Field(description="tenants, keys, limits, usage; absent: everybody is one tenant")
    ] = None

    @model_validator(mode="after")
    def _check_references(self) -> TurnoutConfig:
        if self.server.ingress_processes > 1 and self.access is not None and self.kvstore.url == OFF:
            message = "more than 1 needs kvstore.url: the processes share the tenants' limits (access) there"
            raise invalid("server.ingress_processes", message)
        known = ", ".join(sorted(self.models))
        for pool_name, pool in self.pools.items():
            for role, name in pool.roles.items():
                if name not in self.models:
                    raise invalid(f"pools.{pool_name}.{pool.field_of(role)}", f"no model {name!r}; models: {known}")
                if self.models[name].tensor_parallel > 1 and pool.placement.models != "actors":
                    message = f"must be actors: models.{name}.tensor_parallel is more than 1"
                    raise invalid(f"pools.{pool_name}.placement.models", message)
            if pool_name in self.models:
                raise invalid(f"pools.{pool_name}", "a pool and a model cannot share a name")
            elsewhere = self.endpoint_roles(pool)
            check_pool(pool_name, pool, elsewhere)
            check_kv(pool_name, pool, self.models, self.kvstore)
            if elsewhere and "default" not in pool.model_fields_set:  # the usual one needs tokens
                pool.__dict__["default"] = MethodChoice(name=ALONE)
        return self

    @property
    def local_models(self) -> dict[str, ModelConfig]:
        """Models whose files are computed with here, by name: all but endpoints."""
        return {name: model for name, model in self.models.items() if model.endpoint is None}

    @property
    def replica_pools(self) -> dict[str, PoolConfig]:
        """Pools that run in replicas, by name: all but those of endpoints alone, which the ingress answers itself."""
        return {
            name: pool for name, pool in self.pools.items() if any(each in self.local_models for each in pool.members)
        }

    def endpoint_roles(self, pool: PoolConfig) -> dict[str, str]:
        """Models of a pool that are endpoints, by role."""
        return {role: name for role, name in pool.roles.items() if self.models[name].endpoint is not None}

    @classmethod
    def demo(cls) -> TurnoutConfig:
        """The shipped demo pair on this machine."""
        return cls(
            models={
                "demo-small": ModelConfig(path="demo:small", kv_memory_bytes=64 << 20),
                "demo-large": ModelConfig(path="demo:large", kv_memory_bytes=256 << 20),
            },
            pools={
                "demo": PoolConfig(
                    small="demo-small", large="demo-large", default=DEMO_METHOD, artifacts="demo:artifacts"
                )
            },
        )


def parse_config(values: dict[str, Any]) -> TurnoutConfig:
    """Validate plain data.

    Raises:
        TurnoutError: names the first field at fault and what is allowed there.
    """
    try:
        return TurnoutConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, "", TurnoutConfig) from None


def load_config(path: Path) -> TurnoutConfig:
    """Read and check a configuration file, the models' folders and the methods' parameters included.

    Raises:
        TurnoutError: names the first field at fault and what is allowed there.
    """
    config = with_drafts(parse_config(read_yaml(path)))
    check_resources(config)
    return config


def with_drafts(config: TurnoutConfig) -> TurnoutConfig:
    """Give each pool with `draft: auto` the draft of its large model, as a model LARGE-draft and its small one.

    Where none is found the pool stays as it is: its large model is then the small one as well. A pool's components say
    why in a note. The folder found here is the draft's path wherever the pool runs.
    """
    models, pools = dict(config.models), dict(config.pools)
    for name, pool in config.pools.items():
        if pool.draft is None:
            continue
        target = config.models[pool.large]
        place = f"models.{pool.large}"
        here = find_model(target.path, f"{place}.path").path  # nothing is downloaded to read a file
        if here is None:
            continue
        checkpoint = described(here, f"{place}.path")
        folder, _ = find_draft(checkpoint, place)
        if folder is None:
            continue
        draft = f"{pool.large}-draft"
        while draft in pools or (draft in models and models[draft].path != str(folder)):
            draft += "-"
        room = int(target.kv_memory_bytes * layer_share(folder, checkpoint))  # for as many tokens
        same = target.model_dump(include={"dtype", "kv_dtype", "device", "max_length"})
        made = ModelConfig(path=str(folder), kv_memory_bytes=max(1 << 20, room), **same)
        models.setdefault(draft, made)  # the file may configure it
        settings = pool.model_dump(exclude_unset=True, exclude={"draft"})
        pools[name] = PoolConfig.model_validate({**settings, "large": pool.large, SMALL: draft})
    return config.model_copy(update={"models": models, "pools": pools})


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds.

    Raises:
        TurnoutError: the file cannot be read, is no YAML, or is no mapping; names the line at fault.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_StrictLoader)
    except OSError as error:
        raise invalid("config", f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise invalid("config", f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        what = getattr(error, "problem", None) or str(error).replace("\n", " ")
        raise invalid("config", f"{path} is not valid YAML: {where}{what}") from None
    if not isinstance(values, dict):
        raise invalid("config", f"{path} must hold a mapping with models and pools")
    return values


class _StrictLoader(yaml.CSafeLoader):
    """Safe YAML that refuses a key given twice, where YAML readers usually keep the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key_node.value!r} is given twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def check_resources(config: TurnoutConfig) -> None:
    """Refuse folders that are no checkpoints, and methods and routing policies that do not validate.

    Nothing is downloaded: of a model of a hub or a store, which is checked when it is loaded, only the path's form is.
    """
    for name, model in config.local_models.items():
        field = f"models.{name}.path"
        location = parse_location(model.path, field)
        if isinstance(location, LocalFiles):
            check_present(described(location.path, field), field)
    for name, pool in config.pools.items():
        field = f"pools.{name}.default"
        chosen = get_method(pool.default.name, f"{field}.name")
        params = chosen.parse(pool.default.params, f"{field}.params")
        chosen.check_roles(params, pool.roles, f"{field}.name", f"{field}.params")
        chosen.check_text(params, config.endpoint_roles(pool), f"{field}.name", f"{field}.params")
        if pool.routing is not None:
            _check_routing(pool.routing, f"pools.{name}.routing")


def _check_routing(routing: RoutingConfig, field: str) -> None:
    choices = {"policy": routing.policy}
    if routing.shadow is not None:
        choices["shadow.policy"] = routing.shadow.policy
    for place, choice in choices.items():
        policy = load(POLICIES_PACKAGE, choice.name, f"{field}.{place}.name").PART
        policy.parse_params(choice.params, f"{field}.{place}.params")


def model_path(model: ModelConfig, field: str = "model", weights: bool = True) -> Path:
    """The folder of a model's checkpoint on this machine; files of a hub or a URL are fetched first, once per process.

    A GGUF file is described by a folder, see `gguf_files.described`.

    Args:
        model: the model.
        field: its place in the configuration, for messages.
        weights: whether weights are needed, and not configuration and tokenizer only.

    Raises:
        TurnoutError: they cannot be fetched, see `model_fetching.fetch_model`; or they are of a GGUF model that is not
            whole, or not supported.
    """
    return described(fetch_model(model.path, field, weights), field)


def models_here(config: TurnoutConfig) -> dict[str, Path]:
    """The folders of models on this machine, by name, some of them without weights; nothing is downloaded.

    Raises:
        TurnoutError: a path has none of the allowed forms, or a GGUF model is not whole, or not supported.
    """
    places: dict[str, Path] = {}
    for name, model in config.local_models.items():
        field = f"models.{name}.path"
        path = find_model(model.path, field).path or find_model(model.path, field, weights=False).path
        if path is not None:
            places[name] = described(path, field)
    return places


def pinned(config: TurnoutConfig) -> TurnoutConfig:
    """The configuration with each revision of a hub's repository replaced by the commit that it is now.

    All processes that get it load the same files, whenever they start.

    Raises:
        TurnoutError: a revision cannot be resolved; names the model's field.
    """
    local = config.local_models
    paths = {name: pin_model(model.path, f"models.{name}.path") for name, model in local.items()}
    models = {name: model.model_copy(update={"path": paths[name]}) for name, model in local.items()}
    return config.model_copy(update={"models": {**config.models, **models}})


def artifacts_path(pool: PoolConfig) -> Path | None:
    """The folder of a pool's artifacts, if it has one; demo:artifacts is the shipped one."""
    if pool.artifacts is None:
        return None
    location = parse_location(pool.artifacts, "artifacts")
    return location.path if isinstance(location, LocalFiles) else Path(pool.artifacts)
