"""`turnout train knn_lm` and `turnout train caad`: datastores of contrasts, from texts and from truthful answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.artifact_output import keep
from cli.output import print_json, shown_progress
from cli.train_options import AsJson, Config, Out, check_artifact, configured_model
from turnout.errors import invalid

if TYPE_CHECKING:
    from training.head_runs import Advance, Target, Trained

    Work = Callable[[Target, Advance], Awaitable[Trained]]

ModelName = Annotated[
    str,
    typer.Option(
        help="The model that will answer: large of the first pool, a configured name, or a path as in models.NAME.path."
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(help="Tenant that alone may use it: it goes into tenants/NAME in the folder of --out."),
]
Layer = Annotated[
    int,
    typer.Option(
        min=-2,
        help="Layer whose output is the key; -1: after the last norm; -2: what goes into the last feed-forward block.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to `turnout train`."""
    app.command("knn_lm")(knn_lm)
    app.command("caad")(caad)


def knn_lm(
    out: Out,
    texts: Annotated[Path, typer.Option(help="Text file, blank lines between texts; every eighth is held out.")],
    model: ModelName = "large",
    config: Config = None,
    tenant: Tenant = None,
    layer: Layer = -1,
    most: Annotated[int, typer.Option(min=1, max=10_000_000, help="Tokens of the texts that it holds.")] = 100_000,
    window: Annotated[int, typer.Option(min=4, help="Tokens of the longest context that is read.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Make the datastore of the contrast knn_lm: what followed each context of the texts."""
    from training.datastores import Settings, build_tokens, texts_of

    place, found = _place(out, tenant), texts_of(texts)
    settings = Settings(layer, most, window)

    def work(target: Target, advance: Advance) -> Awaitable[Trained]:
        return build_tokens(target.model, target.tokenizer, found, settings, advance)

    _run(work, model, config, place, as_json)


def caad(
    out: Out,
    answers: Annotated[Path, typer.Option(help="JSON objects, one a line, with `question` and a truthful `answer`.")],
    model: ModelName = "large",
    config: Config = None,
    tenant: Tenant = None,
    layer: Layer = -1,
    most: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens of the answers that it holds.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Make the datastore of the contrast caad: the model's logits along truthful answers."""
    from training.datastores import Settings, answers_of, build_logits

    place, found = _place(out, tenant), answers_of(answers)
    settings = Settings(layer, most)

    def work(target: Target, advance: Advance) -> Awaitable[Trained]:
        return build_logits(target.model, target.tokenizer, found, settings, advance)

    _run(work, model, config, place, as_json)


def _place(out: Path, tenant: str | None) -> Path:
    """Return where the artifact goes.

    Raises:
        TurnoutError: INVALID_ARGUMENT: nothing can be written there, or no tenant can be called that.
    """
    from decoding.artifacts import TENANTS
    from turnout.access_config import TENANT_NAME, TENANT_PATTERN

    if tenant is not None and not TENANT_PATTERN.fullmatch(tenant):
        raise invalid("tenant", f"must match {TENANT_NAME}, got {tenant!r}")
    place = out if tenant is None else out.parent / TENANTS / tenant / out.name
    check_artifact(place)
    return place


def _run(work: Work, model: str, config: Path | None, out: Path, as_json: bool) -> None:
    """Do the work, write the artifact and NAME.report.json, and say what was measured."""

    async def made() -> Trained:
        from training.head_runs import Target

        chosen, settings = configured_model(model, config)
        target = Target.load(chosen, settings.engine)
        try:
            with shown_progress() as advance:
                return await work(target, advance)
        finally:
            await target.close()

    trained = asyncio.run(made())
    report = keep(trained.artifact, trained.report, out)
    if as_json:
        print_json(report)
        return
    about = ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in trained.report.items())
    typer.echo(f"{out.name}: {out.stat().st_size / 2**20:.1f} MiB; {about}")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
