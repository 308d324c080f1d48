"""Where a pool's models run and how many copies there are: placement and autoscaling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnout.errors import FieldError


class PlacementConfig(BaseModel):
    """Where the models of one replica of a pool run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[
        Literal["colocated", "actors"],
        Field(description="colocated: in the replica's own process; actors: each in a process of its own"),
    ] = "colocated"
    cpus: Annotated[float, Field(gt=0, description="logical CPUs reserved for each model actor")] = 1.0
    threads: Annotated[
        int | None, Field(ge=1, description="CPU threads of each actor's forwards; absent: engine.threads, or all")
    ] = None
    strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        Field(description="how a replica's actors lie on nodes, as in Ray's placement groups"),
    ] = "PACK"
    resources: Annotated[
        dict[str, dict[str, Annotated[float, Field(gt=0)]]],
        Field(description="custom resources by role (small, large, ..., prefill), as cluster nodes offer them"),
    ] = {}
    prefill: Annotated[
        int, Field(ge=0, le=64, description="more actors of the large model that only compute prompts")
    ] = 0
    prefill_tokens: Annotated[
        int, Field(ge=1, description="shortest uncached part of a prompt that goes to a prefill actor, tokens")
    ] = 256
    start_timeout_s: Annotated[float, Field(gt=0, description="time an actor has to load its model, seconds")] = 300.0
    join_timeout_s: Annotated[
        float, Field(gt=0, description="time all actors of a replica have to join a process group, seconds")
    ] = 30.0
    silence_s: Annotated[
        float, Field(gt=0, description="time without a sign of life after which an actor is ended and replaced")
    ] = 10.0
    forward_timeout_s: Annotated[
        float, Field(gt=0, description="time one forward may take; a process that is at it for longer is replaced")
    ] = 300.0
    max_restarts: Annotated[
        int, Field(ge=0, description="restarts of one actor within ten minutes before the replica gives up")
    ] = 10

    @model_validator(mode="after")
    def _check(self) -> PlacementConfig:
        if self.prefill and self.models != "actors":
            raise FieldError("prefill", "needs placement.models: actors")
        return self


class AutoscalingConfig(BaseModel):
    """How many copies of a pool there are, by what its replicas are busy with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: Annotated[int, Field(ge=0, description="fewest; 0: none while there are no requests")] = 1
    max_replicas: Annotated[int, Field(ge=1, description="most")] = 4
    target_requests: Annotated[
        float, Field(gt=0, description="requests in progress that a replica is meant to have")
    ] = 16.0
    target_waiting_s: Annotated[
        float, Field(gt=0, description="work that waits for a replica's devices, by its own forecast, seconds")
    ] = 1.0
    target_kv: Annotated[
        float, Field(gt=0, le=1, description="share of a model's KV blocks in use that a replica is meant to have")
    ] = 0.7
    upscale_delay_s: Annotated[float, Field(ge=0, description="time more must be wanted before it is started")] = 5.0
    downscale_delay_s: Annotated[float, Field(ge=0, description="time fewer must be enough before one is ended")] = 60.0
    idle_s: Annotated[
        float, Field(ge=0, description="time without a request before the last replica is ended, with min_replicas 0")
    ] = 300.0

    @model_validator(mode="after")
    def _check(self) -> AutoscalingConfig:
        if self.max_replicas < max(self.min_replicas, 1):
            raise FieldError("max_replicas", f"must be at least min_replicas ({self.min_replicas})")
        return self
