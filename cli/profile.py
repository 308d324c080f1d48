"""`turnout profile`: what a model's forwards and requests cost on this machine, and how many users fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import read_config
from cli.output import print_json, print_table
from turnout.errors import not_found

if TYPE_CHECKING:
    from engine.costs.report import ModelProfile
    from turnout.config import TurnoutConfig


def profile(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file; without one, the shipped demo models are profiled.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, fitted coefficients included.")] = False,
) -> None:
    """Measure models on this machine, each alone and loaded in this process.

    Forwards and requests are shown with what the engine's cost models predict for them, contexts with the
    bounds that memory and arithmetic set.
    """
    settings = read_config(config)
    if model is not None and model not in settings.models:
        raise not_found("model", model, list(settings.models))
    from engine.costs.report import profile_model

    names = [model] if model is not None else list(settings.models)
    if not as_json:
        for name in names:
            _show_memory(name, settings)
    profiles = [asyncio.run(profile_model(name, settings)) for name in names]
    if as_json:
        print_json(profiles)
        return
    for found in profiles:
        _show(found)


def _show_memory(name: str, settings: TurnoutConfig) -> None:
    """What the model takes, before it is loaded."""
    from engine.costs.limits import available_memory, described_needs, predict_memory

    [(device, needs)] = predict_memory({name: settings.models[name]}, settings.engine).items()
    line, _ = described_needs(needs, device)
    typer.echo(f"{line}; {available_memory(device) / 2**20:,.1f} MiB are available")


def _show(found: ModelProfile) -> None:
    machine, shape = found.machine, found.shape
    typer.echo(
        f"{found.name}: {shape.weight_bytes / 2**20:,.0f} MiB of weights,"
        f" {shape.kv_bytes_per_token:,} bytes of KV cache per token"
    )
    typer.echo(
        f"machine: {machine.memory_bytes / 2**30:.1f} GiB, reads {machine.read_bytes_per_s / 1e9:.1f} GB/s,"
        f" copies {machine.copy_bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:,.0f} GFLOP/s"
    )
    print_table(
        [">fed", ">attended", ">sequences", ">measured ms", ">predicted ms", ">bound ms"],
        [[f.fed, f.attended, f.sequences, *map(_ms, (f.measured_s, f.predicted_s, f.bound_s))] for f in found.forwards],
    )
    print_table(
        [">prompt", ">output", ">measured ms", ">idealised ms", ">difference", ">bound ms"],
        [
            [
                r.prompt,
                r.output,
                *map(_ms, (r.measured_s, r.idealised_s)),
                f"{r.idealised_s / r.measured_s - 1:+.1%}",
                _ms(r.bound_s),
            ]
            for r in found.requests
        ],
    )
    print_table(
        [">context", ">KV MiB", ">users", ">prefill ms", ">bound ms", ">token ms", ">bound ms", ">switch ms"],
        [
            [
                c.context,
                f"{c.kv_bytes / 2**20:.1f}",
                c.users,
                *map(_ms, (c.prefill_s, c.prefill_bound_s, c.decode_s, c.decode_bound_s, c.switch_s)),
            ]
            for c in found.contexts
        ],
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f}"
