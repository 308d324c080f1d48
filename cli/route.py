"""`turnout route`: why a request was routed as it was, and what the route log says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ask import load_here, pool_for, read_config
from cli.output import print_json, print_table
from turnout.errors import TurnoutError, invalid

if TYPE_CHECKING:
    from router.decision import Decision
    from turnout.calls import GenerateCall
    from turnout.config import TurnoutConfig

app = typer.Typer(help="Explain routing decisions, and summarise the route log.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(help="An HTTP body as JSON, or a route log with texts.", metavar="REQUEST")],
    config: Annotated[Path | None, typer.Option(help="Configuration file with the pool's routing.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="The answer to it, as JSON: its decision is compared with today's.")
    ] = None,
    request: Annotated[str, typer.Option(help="In a log of several requests: the id of the one meant.")] = "",
    tenant: Annotated[str, typer.Option(help="Whose request it is, where the file does not say.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Decide about a request again, here, with the models and artifacts as they are now.

    Exit code 0 where there is nothing to compare with or the decision is the recorded one, 1 where it is not.
    """
    from router.replay import compare

    asked = _read_asked(file, request)
    if against is not None:
        asked = _read_answer(against, asked)
    decided = asyncio.run(_decide(_call_of(asked, tenant), read_config(config)))
    if asked["decision"] is None:
        if as_json:
            print_json({"decision": decided})
        else:
            print_route(decided.as_json())
        return
    replay = compare(asked["decision"], decided)
    if as_json:
        print_json({"decision": decided, "recorded": replay.recorded, "same": replay.same,
                    "differences": replay.differences, "notes": replay.notes})  # fmt: skip
    else:
        print_route(decided.as_json())
        typer.echo("the recorded decision: the same" if replay.same else "the recorded decision was another one:")
        for line in (*replay.differences, *replay.notes):
            typer.echo(f"  {line}")
    if not replay.same:
        raise typer.Exit(1)


@app.command()
def show(
    logs: Annotated[list[Path], typer.Argument(help="Files of the route log.", metavar="LOG...")],
    as_json: AsJson = False,
) -> None:
    """Summarise the route log: shares, costs and times by policy, version, arm and method."""
    from router.summary import read_log, summarise

    groups = summarise(entry for path in logs for entry in read_log(path))
    if as_json:
        print_json(groups)
        return
    print_table(
        ["kind", "pool", "policy", "version", "arm", "method", ">requests", ">share", ">answered", ">large share",
         ">paper", ">FLOPs", ">p50", ">p95", ">same text"],
        [
            [each.kind, each.pool, each.policy or "none", each.version, each.arm, each.method, each.requests,
             f"{each.share:.1%}", each.answered, _shown(each.large_share, "{:.1%}"), _shown(each.paper, "{:.3f}"),
             _shown(each.flops, "{:.3f}"), _shown(each.wall_p50_s, "{:.2f} s"), _shown(each.wall_p95_s, "{:.2f} s"),
             _shown(each.same_text, "{:.1%}")]
            for each in groups
        ],
    )  # fmt: skip


def print_route(route: dict[str, Any] | None) -> None:
    """Write a decision, field by field."""
    if route is None:
        typer.echo("not routed: the request named its method, or the pool has no routing")
        return
    rows = [("method", _with_params(route["method"], route["params"])), ("why", route["reason"])]
    rows.append(("policy", f"{route['policy']}, version {route['version']}"))
    rows += [(name, route[name]) for name in ("arm", "suffix", "kept_from") if route[name]]
    for name in ("sampling", "features", "scores", "limits"):
        if route[name]:
            rows.append((name, ", ".join(f"{key} {_number(value)}" for key, value in route[name].items())))
    print_table(["routing", ""], rows)


def _with_params(method: str, params: dict[str, Any]) -> str:
    return f"{method} {json.dumps(params)}" if params else method


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _read_json(path: Path, field: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(field, f"cannot read {path}: {error}") from None
    except json.JSONDecodeError as error:
        raise invalid(field, f"{path} is no JSON: {error.msg} at line {error.lineno}") from None


def _read_asked(path: Path, request_id: str) -> dict[str, Any]:
    """A body, and what is known of how it was answered."""
    from router.decision import Decision
    from router.summary import read_log

    unknown: dict[str, Any] = {"request_id": "", "tenant": None, "seed": None, "decision": None}
    try:
        found = _read_json(path, "request")
    except TurnoutError:
        found = None
    if isinstance(found, dict) and "decision" not in found:
        return {**unknown, "request": found}
    entries = [entry for entry in read_log(path, "request") if request_id in ("", entry["request_id"])]
    entries = [entry for entry in entries if entry["kind"] == "request"]
    if found is None and not entries and not request_id:
        raise invalid("request", f"{path} is neither a JSON object nor a route log")
    if len(entries) != 1:
        raise invalid("request", f"{path} holds {len(entries)} such requests; name one with --request ID")
    [entry] = entries
    if "request" not in entry:
        raise invalid("request", f"{path} holds no texts: set routing.log.texts, or give the request itself")
    decision = Decision.of_json(entry["decision"]) if entry["decision"] is not None else None
    return {**entry, "decision": decision}


def _read_answer(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The same with what an answer says: over HTTP, or of `turnout generate --json`."""
    from router.decision import Decision

    answer = _read_json(path, "against")
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get("turnout", usage) if isinstance(usage, dict) else None
    if not isinstance(details, dict) or not isinstance(details.get("route"), dict):
        raise invalid("against", f"{path} is no answer to a routed request: it has no usage with a route")
    decision = Decision.of_json(details["route"], "against")
    known = {"request_id": answer.get("id", asked["request_id"]), "seed": details.get("seed", asked["seed"])}
    return {**asked, **known, "decision": decision}


def _call_of(asked: dict[str, Any], tenant: str) -> GenerateCall:
    from deployments.schemas import chat_job, completion_job

    body = {name: value for name, value in asked["request"].items() if name not in ("stream", "stream_options")}
    job = chat_job(body) if "messages" in body else completion_job(body)
    if len(job.calls) != 1:
        raise invalid("prompt", f"one prompt at a time (got {len(job.calls)})")
    call = job.calls[0]
    seed = asked["seed"] if call.sampling.seed is None else call.sampling.seed
    sampling = call.sampling.model_copy(update={"seed": seed})
    named = asked["request_id"] or call.request_id
    return replace(call, request_id=named, tenant=asked["tenant"] or tenant, sampling=sampling)


async def _decide(call: GenerateCall, config: TurnoutConfig) -> Decision:
    name = pool_for(call.model, config)
    settings = config.pools[name]
    if settings.routing is None:
        raise invalid(f"pools.{name}.routing", "is absent: this pool routes nothing")
    # What explains writes no log and runs no shadow.
    quiet = settings.routing.model_copy(update={"log": None, "shadow": None})
    pools = {**config.pools, name: settings.model_copy(update={"routing": quiet})}
    pool = load_here(name, config.model_copy(update={"pools": pools}))
    try:
        return await pool.explain(replace(call, model=call.model or name))
    finally:
        await pool.close()
