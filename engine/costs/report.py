"""The profile of one model on this machine: forwards, requests and contexts, measured, predicted and bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.costs.ideal_latency import IdealisedRuntime, denoised, measure, request_timer
from engine.costs.limits import check_memory, read_shape
from engine.costs.machine import measure_machine
from engine.costs.probe import Group, Probe, Shape
from engine.costs.resources import Machine, ModelShape, Planner, Request
from engine.costs.step_time import StepCost
from engine.device import Device
from engine.loading import load_checkpoint
from engine.model import EngineModel
from turnout.config import TurnoutConfig, model_path

# Forwards that the step time was not fitted to.
FORWARDS: tuple[Shape, ...] = (
    (Group(1, 1, 100),),
    (Group(6, 1, 300),),
    (Group(24, 1, 200),),
    (Group(48, 1, 100),),
    (Group(4, 5, 200),),
    (Group(1, 96, 300),),
    (Group(12, 1, 200), Group(1, 48, 800)),
    (Group(1, 400, 0),),
)
# (prompt, output) that the idealised runtime was not fitted to.
REQUESTS = ((100, 20), (300, 12), (400, 64), (700, 25), (900, 50))
CONTEXTS = (512, 1024, 1536, 2048, 4096, 8192, 16384, 32768)
REPEATS = 7


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One forward: the arguments of a step time, and seconds measured, predicted, and the least possible."""

    fed: int
    attended: int
    sequences: int
    measured_s: float
    predicted_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request alone: tokens, and seconds measured, by the idealised runtime, and the least possible."""

    prompt: int
    output: int
    measured_s: float
    idealised_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class ContextRow:
    """Cost of a context length: users that fit, and seconds, ideal ones with their bounds.

    `prefill_s` is None beyond the prompts that were measured.
    """

    context: int
    kv_bytes: int
    users: int
    prefill_s: float | None
    prefill_bound_s: float
    decode_s: float
    decode_bound_s: float
    switch_s: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Everything `turnout profile` shows of a model."""

    name: str
    shape: ModelShape
    machine: Machine
    step_cost: StepCost
    runtime: IdealisedRuntime
    forwards: tuple[ForwardRow, ...]
    requests: tuple[RequestRow, ...]
    contexts: tuple[ContextRow, ...]


async def profile_model(name: str, config: TurnoutConfig) -> ModelProfile:
    """Load a configured model alone and measure it; a few seconds on an idle machine.

    Raises:
        TurnoutError: it cannot be loaded, or does not fit into memory.
    """
    settings, engine = config.models[name], config.engine
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    check_memory({name: settings}, engine)
    _, shape = read_shape(name, settings)
    device = Device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    machine = measure_machine(dtype, device.torch_device)
    kernels = (engine.kernels, engine.shared_attention, f"models.{name}.path", settings.weights, settings.kv_dtype)
    checkpoint = load_checkpoint(model_path(settings), dtype, device.torch_device, *kernels)
    model = EngineModel(name, checkpoint, settings, engine, device)
    probe = Probe(model.batcher.runner, model.pool.num_blocks, model.max_length, engine.max_batch, engine.token_budget)
    forwards = _forwards(model, probe, shape, machine)
    timer = request_timer(model, model.vocab_size)
    runtime = await measure(timer, model.max_length)
    fitting = [pair for pair in REQUESTS if sum(pair) <= model.max_length]
    measured = await denoised(timer, fitting)
    requests = tuple(
        RequestRow(*pair, seconds, runtime.seconds(*pair), _least_s(Request(*pair), shape, machine))
        for pair, seconds in measured.items()
    )
    lengths = [length for length in CONTEXTS if length < model.max_length] + [model.max_length]
    contexts = tuple(_context(length, Planner(shape, machine), runtime) for length in lengths)
    await model.close()
    device.close()
    return ModelProfile(name, shape, machine, model.step_time.cost, runtime, forwards, requests, contexts)


def _forwards(model: EngineModel, probe: Probe, shape: ModelShape, machine: Machine) -> tuple[ForwardRow, ...]:
    rows = []
    for forward in filter(None, map(probe.clipped, FORWARDS)):
        sample = probe.sample(forward, REPEATS)
        read = sum(group.sequences * group.context for group in forward)
        flops = shape.flops(sample.fed, sample.attended, sample.sequences)
        bound = machine.least_s(flops, shape.bytes_moved(sample.fed, read))
        predicted = model.step_time.seconds(sample.fed, sample.attended, sample.sequences)
        rows.append(ForwardRow(sample.fed, sample.attended, sample.sequences, sample.seconds, predicted, bound))
    return tuple(rows)


def _least_s(request: Request, shape: ModelShape, machine: Machine) -> float:
    return machine.least_s(request.flops(shape), request.bytes_moved(shape))


def _context(context: int, planner: Planner, runtime: IdealisedRuntime) -> ContextRow:
    return ContextRow(
        context=context,
        kv_bytes=round(planner.kv_bytes(context)),
        users=planner.users(context),
        prefill_s=runtime.prefill_s(context) if context <= runtime.prompts[-1] else None,
        prefill_bound_s=planner.prefill_s(context),
        decode_s=runtime.decode_s(context - 1, 1),
        decode_bound_s=planner.decode_s(context),
        switch_s=planner.switch_s(context),
    )
