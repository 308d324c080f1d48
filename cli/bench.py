"""`turnout bench`: comparisons on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.output import console, print_error, print_json, print_table
from turnout.errors import invalid, not_found

if TYPE_CHECKING:
    from experiments.speculation.bench import Report
    from experiments.speculation.grid import Axes, Setting

QUICK = {"prompts": 2, "max_tokens": 16, "turns": 1}
RESULTS = Path("docs/results")
AUTOMATIC = "automatic"

app = typer.Typer(help="Compare ways of decoding on this machine.", no_args_is_help=True)

Methods = Annotated[
    str | None,
    typer.Option(
        help="Only these, by commas: plain, DRAFTER, DRAFTER+VERIFIER, DRAFTER+LENGTH, SELECTOR;"
        f" {AUTOMATIC}: all that choose by themselves whether to draft."
    ),
]
Groups = Annotated[str | None, typer.Option(help="Only these kinds of text, separated by commas.")]
Temperatures = Annotated[
    str | None, typer.Option(help="Separated by commas, 0 is greedy; absent: 0,1, 0 with --quick.")
]
Batches = Annotated[str | None, typer.Option(help="Prompts answered at once, by commas; absent: 1,8, 1 with --quick.")]
Prompts = Annotated[int | None, typer.Option(min=1, help="Of each kind of text; absent: 40, 2 with --quick.")]
MaxTokens = Annotated[int | None, typer.Option(min=2, max=256, help="Longest answer; absent: 64, 16 with --quick.")]
Turns = Annotated[
    int | None,
    typer.Option(min=1, help="Of a cell, at least: prompts are asked again until then; absent: 15, 1 with --quick."),
]
Target = Annotated[
    str,
    typer.Option(
        help="widened: the demo's large model at the cost of 200 M parameters; demo;"
        " real (fetched by `make real`); or a path as of models.NAME.path."
    ),
]
Draft = Annotated[
    str | None, typer.Option(help="Path of the draft model, as of models.NAME.path; absent: the demo's, or real's.")
]
Trained = Annotated[
    Path | None, typer.Option(help="Folder of what was trained for the two; absent: the demo's; real: none.")
]
Precision = Annotated[Literal["bfloat16", "float32", "float16"], typer.Option(help="Of weights and arithmetic.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of a forward; absent: all cores.")]
Where = Annotated[str, typer.Option("--device", help="Where both models live: cpu, cuda or cuda:N.")]
Out = Annotated[Path, typer.Option(help="Folder of the cells; what it holds is not measured again.")]
Cache = Annotated[Path, typer.Option(help="Where the widened target is kept.")]
Results = Annotated[
    Path | None, typer.Option(help="Folder of the target's page; absent: docs/results, nowhere with --quick.")
]
Peers = Annotated[bool, typer.Option(help="Measure Hugging Face generate as well.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few prompts and short answers: to see that it works.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _group() -> None:
    """Compare ways of decoding on this machine."""


@app.command()
def speculation(
    methods: Methods = None,
    groups: Groups = None,
    temperatures: Temperatures = None,
    batches: Batches = None,
    prompts: Prompts = None,
    max_tokens: MaxTokens = None,
    turns: Turns = None,
    target: Target = "widened",
    draft: Draft = None,
    artifacts: Trained = None,
    dtype: Precision = "bfloat16",
    threads: Threads = None,
    device: Where = "cpu",
    out: Out = Path(".runs/speculation/cells"),
    cache: Cache = Path(".runs/speculation/targets"),
    results: Results = None,
    peers: Peers = True,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare every speculative method with plain decoding: speed, tokens of a forward, acceptance, equal text.

    Each combination of method, kind of text, temperature and batch is a cell, saved when it is measured: a run that
    was cut off continues, and a later one adds to it. The page shows all cells of the same models, code and machine.

    Exit code 1 when an answer is not plain decoding's where it must be.
    """
    warm, sizes = temperatures or ("0" if quick else "0,1"), batches or ("1" if quick else "1,8")
    axes = _axes(methods, groups, warm, sizes, peers)
    from experiments.speculation.grid import Setting
    from experiments.speculation.page import save  # before hours of measuring, in which the code may change

    given = {"prompts": prompts, "max_tokens": max_tokens, "turns": turns}
    chosen = (QUICK if quick else {}) | {key: value for key, value in given.items() if value is not None}
    setting = Setting(target, draft, artifacts, cache, dtype, threads=threads, device=device, **chosen)
    report = _run(setting, axes, out)
    folder = results or (None if quick else RESULTS)
    if folder is not None:
        save(report, folder)
    _show(report, as_json)
    if report.wrong:
        print_error(f"{report.wrong} answers differ from plain decoding's where they must not")
        raise typer.Exit(1)


def _axes(methods: str | None, groups: str | None, temperatures: str, batches: str, peers: bool) -> Axes:
    """The cells that are asked for, each name and number checked."""
    from experiments.grid.contenders import automatic_names, contenders
    from experiments.speculation.grid import Axes
    from experiments.speculation.tasks import GROUPS

    try:
        warm = tuple(float(each) for each in temperatures.split(","))
        sizes = tuple(int(each) for each in batches.split(","))
    except ValueError:
        raise invalid("temperatures, batches", f"must be numbers, got {temperatures!r} and {batches!r}") from None
    if any(not 0 <= each <= 2 for each in warm) or any(not 1 <= each <= 64 for each in sizes):
        raise invalid("temperatures, batches", "must be 0 to 2, and 1 to 64")
    names = _names("methods", methods, list(contenders()), {AUTOMATIC: automatic_names()})
    return Axes(names, _names("groups", groups, list(GROUPS), {}), warm, sizes, peers)


def _names(field: str, given: str | None, known: list[str], sets: dict[str, list[str]]) -> tuple[str, ...]:
    """What was given by commas, each name once; a set's name stands for those in it."""
    words = [each.strip() for each in given.split(",")] if given is not None else known
    names = list(dict.fromkeys(name for word in words for name in sets.get(word, [word])))
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise not_found(field, unknown, [*known, *sets])
    return tuple(names)


def _run(setting: Setting, axes: Axes, out: Path) -> Report:
    import uvloop

    from experiments.speculation.bench import run

    stderr = console(stderr=True)
    return uvloop.run(run(setting, axes, out, stderr.print))


def _show(report: Report, as_json: bool) -> None:
    """All texts together, a table for each temperature and batch, then ours over Hugging Face's."""
    from experiments.speculation.page import as_dict, condition, interval

    if as_json:
        print_json(as_dict(report))
        return
    columns = ["method", ">over plain", ">tokens", ">kept", ">drafting", "text"]
    for temperature, batch in report.conditions():
        typer.echo(condition(temperature, batch))
        found = [mine[""] for mine in report.figures(temperature, batch).values()]
        rows = [
            [
                each.contender,
                interval(each.speedup),
                f"{each.tokens_per_step:.2f}",
                f"{each.acceptance:.0%}",
                f"{each.draft_share:.0%}",
                each.equality,
            ]
            for each in sorted(found, key=lambda each: -each.speedup.value)
        ]
        print_table(columns, rows)
    peers = {name: mine[""] for name, mine in report.peers().items()}
    if peers:
        print_table(["ours over Hugging Face's", ">ratio"], [[n, interval(e.speedup)] for n, e in peers.items()])
    for name, why in report.grid.missing.items():
        typer.echo(f"not run: {name}: {why}")
