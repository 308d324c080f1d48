"""`turnout train kv-codecs`: what the shared store's codecs must know of a pool's models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.artifact_output import write_report
from cli.ask import read_config
from cli.output import print_json, print_table, shown_progress
from cli.output_paths import writing
from cli.train_options import SUFFIX, AsJson, Config, MaxTokens, Pool, Seed, Temperature
from turnout.errors import invalid, not_found

if TYPE_CHECKING:
    from training.kv_profiles import Profiles
    from turnout.config import TurnoutConfig
    from turnout.types import SamplingParams

Folder = Annotated[Path, typer.Option(help="Folder for NAME.safetensors of each codec: the pool's of artifacts.")]
Prompts = Annotated[Path | None, typer.Option(help="Text file, a question a line; absent: the demo's problems.")]
Count = Annotated[int, typer.Option(min=8, help="Questions used.")]


def register(app: typer.Typer) -> None:
    """Add the command to `turnout train`."""
    app.command("kv-codecs")(kv_codecs)


def kv_codecs(
    out: Folder,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 480,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Profile keys and values for the codecs adaquant and cachegen of the shared prefix store."""
    from turnout.types import SamplingParams

    settings = read_config(config)
    name = pool or next(iter(settings.pools))
    if name not in settings.pools:
        raise not_found("pool", name, list(settings.pools))
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    made = asyncio.run(_profiles(name, settings, _texts(prompts, count, seed), sampling, seed))
    sizes = {}
    for family, artifact in made.artifacts.items():
        place = out / f"{family}{SUFFIX}"
        with writing(place):
            artifact.save(place)
        sizes[family] = place.stat().st_size
    write_report(out / "kv-codecs", made.report)
    if as_json:
        print_json(made.report)
        return
    columns = ["model", ">layer", ">|K| / |V|", ">bits of K, V", ">variance coded, K", ">V"]
    print_table(columns, _by_layer(made.report))
    said = ", ".join(f"{family}{SUFFIX} {size / 2**10:.0f} KiB" for family, size in sizes.items())
    typer.echo(f"{made.report['tokens']} tokens in {made.report['conversations']} conversations; {said}")


def _texts(file: Path | None, count: int, seed: int) -> list[str]:
    if file is None:
        from training.demo_prompts import PYTHON, SHARES, training_prompts

        questions = {kind: share for kind, share in SHARES.items() if kind != PYTHON}
        return [prompt.text for prompt in training_prompts(count, f"kv-codecs-{seed}", questions)]
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise invalid("prompts", f"cannot read {file} as text") from None
    return [line for line in text.splitlines() if line.strip()][:count]


def _by_layer(report: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for role, found in report["models"].items():
        whole = found["variance_of_values"]
        columns = (found["key_norm_over_value_norm"], found["widths"], whole["keys"], whole["values"])
        for layer, (ratio, widths, *sides) in enumerate(zip(*columns, strict=True)):
            coded = [f"{1 / side:.1%}" for side in sides]
            rows.append([role, layer, ratio, f"{widths[0]}, {widths[1]}", *coded])
    return rows


async def _profiles(
    name: str, settings: TurnoutConfig, prompts: list[str], sampling: SamplingParams, seed: int
) -> Profiles:
    from pool.local_pool import LocalPool
    from training.kv_profiles import make_profiles

    pool = LocalPool.load(name, settings)
    try:
        with shown_progress() as advance:
            return await make_profiles(pool, prompts, sampling, seed, advance)
    finally:
        await pool.close()
