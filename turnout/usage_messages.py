"""Messages of what a call used, for the Python clients."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from turnout.calls import DriftReading, Usage
from turnout.candidate_messages import candidate_set, doubt
from turnout.cost import Cost, CostReport, ModelMeter, SpeculationMeter
from turnout.proto import generation_pb2 as pb

METER_COUNTS = tuple(field.name for field in fields(ModelMeter))


def usage(message: pb.Usage) -> Usage:
    """Tokens and cost of a call."""
    models = {
        meter.model: ModelMeter(**{count: getattr(meter, count) for count in METER_COUNTS}) for meter in message.models
    }
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        models=models,
        speculation=_speculation(message.speculation),
        switches=message.switches,
        cost=CostReport(_cost(message.spent), _cost(message.large_only), message.large_share, message.large_kept_share),
        method=message.method,
        params=struct_values(message.params),
        seed=message.seed,
        ttft_s=message.ttft_s,
        wall_s=message.wall_s,
        notes=tuple(message.notes),
        drift=_drift(message.drift) if message.HasField("drift") else None,
        route=_route(message.route) if message.HasField("route") else None,
        queue_s=message.queue_s,
        sampling=struct_values(message.sampling),
        reasoning_tokens=message.reasoning_tokens,
        measures=dict(message.measures),
        candidates=tuple(candidate_set(each) for each in message.candidates),
        doubts=tuple(doubt(each) for each in message.doubts),
    )


def _drift(message: pb.Drift) -> DriftReading:
    return DriftReading(message.calibration, message.version, message.index, message.limit, message.answers)


def _route(message: pb.Route) -> dict[str, Any]:
    texts = ("method", "policy", "version", "reason", "suffix", "arm", "kept_from")
    return {
        **{name: getattr(message, name) for name in texts},
        **{name: dict(getattr(message, name)) for name in ("features", "scores", "limits")},
        "params": struct_values(message.params),
        "sampling": struct_values(message.sampling),
    }


def _speculation(message: pb.Speculation) -> SpeculationMeter:
    return SpeculationMeter(
        rounds=message.rounds,
        emitted_tokens=message.emitted_tokens,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        drafted_at=list(message.drafted_at),
        accepted_at=list(message.accepted_at),
        draft_s=message.draft_s,
        verify_s=message.verify_s,
    )


def _cost(message: pb.Cost) -> Cost:
    return Cost(message.paper, message.flops, message.wall_s, message.usd)


def struct_values(message: Struct) -> dict[str, Any]:
    """Values of a Struct."""
    values: dict[str, Any] = MessageToDict(message)
    return values
