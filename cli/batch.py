"""`turnout batch`: answer a file of requests, here or on a running server, and go on after a crash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ask import pool_for, read_config
from cli.generate import parse_params
from cli.output import console, print_error, print_json
from turnout.api_keys import read_api_key
from turnout.errors import invalid

if TYPE_CHECKING:
    from deployments.batches.inputs import Defaults
    from deployments.batches.offline import Job, Progress
    from router.policies.adaptive_best_of import AdaptiveBestOfParams

Source = Annotated[
    str,
    typer.Argument(
        metavar="IN", help="OpenAI batch lines or prompts (.jsonl, .txt), or .parquet: a path, or a URL as s3://."
    ),
]
Server = Annotated[
    str | None, typer.Option(metavar="URL", help="Let a running server answer in its idle time, over HTTP.")
]
Params = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A method's parameter; repeatable.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests that one copy answers at once; absent: 64.")]
BlockRows = Annotated[int | None, typer.Option(min=1, help="Requests that are handed out together; absent: 256.")]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Plain prompts are messages, or texts to continue.")]
Cancel = Annotated[
    bool, typer.Option("--cancel", help="With --server: end what an earlier run sent, and fetch what was answered.")
]
BestOf = Annotated[
    float | None,
    typer.Option(
        metavar="AVERAGE",
        min=1,
        help="Samples a line, over the whole file: more where they are predicted to help (the pool needs a router's"
        " artifact); --param: as of the routing policy adaptive_best_of.",
    ),
]
Work = Annotated[
    Path | None, typer.Option(help="Folder of the job, kept until --fresh; absent: OUT.work, or the like.")
]
Cluster = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Use a running Ray cluster; the folder must be shared by it.")
]


def batch(
    source: Source,
    target: Annotated[str, typer.Argument(metavar="OUT", help="Where answers go: .jsonl or .parquet.")],
    errors: Annotated[str | None, typer.Option(help="Where failed lines go; absent: next to OUT.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo's.")] = None,
    server: Server = None,
    key_file: Annotated[Path | None, typer.Option(help="With --server: file with the key to send.")] = None,
    window: Annotated[str, typer.Option(help="With --server: the longest it may take.")] = "24h",
    model: Annotated[str, typer.Option(help="Pool or model; may be left out where there is one pool.")] = "",
    method: Annotated[str | None, typer.Option(help="Decoding method (see `turnout methods`).")] = None,
    best_of: BestOf = None,
    param: Params = None,
    chat: Chat = True,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Lines that name no seed get theirs from it.")] = 0,
    concurrency: Concurrency = None,
    actors: Annotated[int | None, typer.Option(min=1, help="Copies of the pool; absent: one.")] = None,
    block_rows: BlockRows = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first LIMIT lines.")] = None,
    work: Work = None,
    cluster: Cluster = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever an earlier run did.")] = False,
    cancel: Cancel = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Answer every line of a file. Run again after a crash, it continues where it was: each line is written once.

    Lines that are no requests are reported with their number, and the others served.
    """
    samples = _samples(best_of, method, server, param)
    defaults = _defaults(chat, model, temperature, max_tokens, method, None if samples is not None else param)
    places = (target, errors or f"{target}.errors.jsonl", work or _work_folder(target))
    if server is not None:
        _refuse_with_server(cluster=cluster, concurrency=concurrency, actors=actors, block_rows=block_rows)
        _serve(source, places, server, key_file, defaults, window, limit, seed, fresh, cancel, as_json)
        return
    if cancel:
        raise invalid("cancel", "goes together with --server; a job without one ends with its command")
    from deployments.batches.offline import Job

    settings = read_config(config)
    job = Job(
        source=source,
        target=target,
        errors=places[1],
        work=places[2].absolute(),
        config=settings,
        pool=pool_for(model, settings),
        defaults=defaults,
        seed=seed,
        actors=actors or 1,
        concurrency=concurrency or 64,
        block_rows=block_rows or 256,
        limit=limit,
        best_of=samples,
        address=cluster,
    )
    _work(job, fresh, as_json)


def _samples(
    average: float | None, method: str | None, server: str | None, param: list[str] | None
) -> AdaptiveBestOfParams | None:
    if average is None:
        return None
    for name, value in (("method", method), ("server", server)):
        if value is not None:
            raise invalid("best-of", f"does not go together with --{name}")
    from deployments.batches.best_of import best_of_params

    return best_of_params(average, parse_params(param or []))


def _refuse_with_server(**given: Any) -> None:
    """Options that only a job without a server uses."""
    for name, value in given.items():
        if value is not None:
            raise invalid(name.replace("_", "-"), "does not go together with --server")


def _defaults(
    chat: bool,
    model: str,
    temperature: float | None,
    max_tokens: int | None,
    method: str | None,
    param: list[str] | None,
) -> Defaults:
    from deployments.batches.inputs import Defaults

    given = {"model": model or None, "temperature": temperature, "max_tokens": max_tokens}
    decoding = {"method": method, "params": parse_params(param or []) or None}
    body = {name: value for name, value in given.items() if value is not None}
    asked = {name: value for name, value in decoding.items() if value is not None}
    return Defaults(chat, {**body, **({"decoding": asked} if asked else {})})


def _work(job: Job, fresh: bool, as_json: bool) -> None:
    from deployments.batches.offline import run

    # What Ray has to say of nodes that end is no part of the output.
    with (
        redirect_stdout(sys.stderr),
        _if_interrupted(lambda: f"what is done is kept in {job.work}: run it again"),
        _bar() as show,
    ):
        summary = run(job, lambda progress: show(progress.done, progress.rows, _figures(progress)), fresh)
    if as_json:
        print_json(summary)
        return
    out = console()
    out.print(f"{summary.answered} answers in {summary.output}")
    if summary.failed:
        out.print(f"{summary.failed} lines failed: {summary.errors}")
    used = _used(summary.completion_tokens, summary.cached_share, summary.cost_of_large)
    # of embeddings, scores and rankings no work is counted
    out.print(", ".join([f"{summary.rate:.1f} lines/s", *([used] if summary.cost_of_large else [])]))


def _figures(progress: Progress) -> list[str]:
    figures = _pace(progress.rate, progress.left_s) + _cost(progress.spent.cost_of_large)
    # Its process has ended meanwhile.
    return figures + ([f"a block was begun {progress.tries} times"] if progress.tries > 1 else [])


def _pace(rate: float, left_s: float | None) -> list[str]:
    return [*([f"{rate:.1f}/s"] if rate else []), *([f"{_clock(left_s)} left"] if left_s is not None else [])]


def _cost(of_large: float | None) -> list[str]:
    return [f"cost {of_large:.2f} x large"] if of_large is not None else []


def _used(completion_tokens: int, cached_share: float, cost_of_large: float) -> str:
    cached = f"{cached_share:.0%} of the prompts cached"
    return f"{completion_tokens} tokens, {cached}, FLOPs {cost_of_large:.2f} x the large model alone"


def _serve(
    source: str,
    places: tuple[str, str, Path],
    server: str,
    key_file: Path | None,
    defaults: Defaults,
    window: str,
    limit: int | None,
    seed: int,
    fresh: bool,
    cancel: bool,
    as_json: bool,
) -> None:
    from cli.batch_client import ServedJob, left_behind, run
    from deployments.batches.eta import ProgressRate, left_s

    key = read_api_key(key_file, "key_file")
    url = server.rstrip("/").removesuffix("/v1")
    job = ServedJob(source, *places, server=url, defaults=defaults, window=window, key=key, limit=limit, seed=seed)
    with _if_interrupted(lambda: left_behind(job, cancel)), _bar() as show:
        pace = ProgressRate()

        def tell(batch: dict[str, Any]) -> None:
            done, total = _counted(batch["request_counts"])
            rate = pace.rate(done)
            used = batch["usage"]["turnout"]
            cost = used["flops"] / used["flops_large_only"] if used["flops_large_only"] else None
            show(done, total, [*_pace(rate, left_s(done, total, rate)), *_cost(cost)])

        found = run(job, tell, fresh, cancel)
    if as_json:
        print_json(found)
    else:
        done, failed, used = found["request_counts"]["completed"], found["request_counts"]["failed"], found["turnout"]
        console().print(f"{found['id']} {found['status']}: {done} answers, {failed} lines failed")
        if used["cost_of_large"] is not None:
            console().print(_used(**used))
    if found["status"] not in ("completed", "cancelled" if cancel else "completed"):
        raise typer.Exit(1)


def _counted(counts: dict[str, int]) -> tuple[int, int]:
    return counts["completed"] + counts["failed"], counts["total"]


def _work_folder(target: str) -> Path:
    """The folder of a local output; this folder for a remote one."""
    return Path(f"{target.rpartition('/')[2]}.work") if "://" in target else Path(f"{target}.work")


@contextmanager
def _if_interrupted(behind: Callable[[], str]) -> Iterator[None]:
    """Say what becomes of a job whose user stops waiting for it."""
    try:
        yield
    except KeyboardInterrupt:
        print_error(behind())
        raise


@contextmanager
def _bar() -> Iterator[Callable[[int, int, list[str]], None]]:
    """Progress bar on standard error: lines done, lines in all, other figures."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("batch"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}"))
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("batch", total=None, more="")

        def show(done: int, total: int, more: list[str]) -> None:
            bar.update(task, completed=done, total=total or None, more=", ".join(more))

        yield show


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
