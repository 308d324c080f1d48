"""`turnout task`: have a pool do what writes no answer, as compressing a file or scoring completions."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ask import ApiKeyFile, connect, load_here, pool_for, read_config
from cli.generate import VALUE, parse_params
from cli.output import print_json

if TYPE_CHECKING:
    from decoding.tasks.base import Task


def task(
    name: Annotated[str, typer.Argument(help="The task (see `turnout parts tasks`).")],
    file: Annotated[Path | None, typer.Argument(help="What it works on, where it takes a file.")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar=VALUE, help="A parameter; repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the result goes that is a file; absent: into the JSON.")
    ] = None,
    address: Annotated[str, typer.Option(help="gRPC address of a running server.")] = "localhost:9000",
    api_key_file: ApiKeyFile = None,
    local: Annotated[bool, typer.Option("--local", help="Load the models here instead of asking a server.")] = False,
    config: Annotated[Path | None, typer.Option(help="With --local: configuration file; absent: demo.")] = None,
    model: Annotated[str, typer.Option(help="Pool or model; may be left out where there is one pool.")] = "",
    deadline_s: Annotated[float | None, typer.Option(help="Seconds the task may take.")] = None,
) -> None:
    """Carry out a task by a server's models or by models that are loaded here, and print its result as JSON."""
    params = parse_params(param or [])
    if file is not None:
        _fill(params, _files_of(name, "file"), file)
    field = _files_of(name, "out").file_result if out is not None else ""
    if out is not None and not field:
        raise typer.BadParameter(f"the result of {name!r} is no file: leave it out", param_hint="--out")
    if local:
        result = asyncio.run(_here(name, params, config, model, deadline_s))
    else:
        with connect(address, api_key_file) as client:
            result = client.task(name, params, model=model, deadline_s=deadline_s)
    if out is not None:
        _write(out, str(result.pop(field)))
    print_json(result)


def _files_of(name: str, field: str) -> type[Task]:
    """The task, for what it takes of files; one that only the server knows takes none."""
    from decoding.tasks.base import PACKAGE, find_task
    from turnout.errors import invalid
    from turnout.registry import names

    if name not in names(PACKAGE):
        raise invalid(field, f"needs a task that is installed here, and {name!r} is not")
    return find_task(name)


def _fill(params: dict[str, Any], task: type[Task], file: Path) -> None:
    """Put a file's bytes into the parameter that takes them."""
    from decoding.tasks.base import to_base64

    name = task.file_param
    if not name:
        raise typer.BadParameter(f"{task.name!r} takes no file, only --param", param_hint="FILE")
    if name in params:
        raise typer.BadParameter(f"{name} is given twice, as FILE and as --param", param_hint="FILE")
    params[name] = to_base64(sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes())


def _write(out: Path, value: str) -> None:
    from decoding.tasks.base import from_base64
    from turnout.atomic_files import write_whole

    write_whole(out, from_base64(value, "result"))


async def _here(
    name: str, params: dict[str, Any], config: Path | None, model: str, deadline_s: float | None
) -> dict[str, Any]:
    from turnout.embed_calls import TaskCall

    settings = read_config(config)
    pool = load_here(pool_for(model, settings), settings)
    try:
        call = TaskCall("cli", model or pool.name, name, params, deadline_s=deadline_s)
        async with asyncio.timeout(deadline_s):
            return dict((await pool.task(call, _show if sys.stderr.isatty() else None)).result)
    except TimeoutError:
        from turnout.errors import Code, TurnoutError

        raise TurnoutError(Code.DEADLINE_EXCEEDED, f"deadline_s: {deadline_s:g} s have passed", "deadline_s") from None
    finally:
        await pool.close()


def _show(done: int, of: int) -> None:
    """Progress, in one line of the terminal."""
    typer.echo(f"\r{done}/{of}" + ("\n" if done == of else ""), nl=False, err=True)
