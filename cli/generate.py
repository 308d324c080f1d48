"""`turnout generate`: answer one prompt and show which model wrote which part."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.ask import ApiKeyFile, Question, ask_here, ask_server, read_config
from cli.output import console, print_json
from cli.provenance import Answers, Marked, print_meters, summary
from cli.route import print_route
from turnout.standard_streams import read_stdin

Rate = float | None
Count = int | None
VALUE, PART = "NAME=VALUE", "NAME:KEY=VALUE"
NEXT_PARAM = re.compile(r",(?=\w+=)")


def generate(
    prompt: Annotated[str, typer.Argument(help="The question, or with --raw the text to continue; - reads stdin.")],
    address: Annotated[str, typer.Option(help="gRPC address of a running server.")] = "localhost:9000",
    api_key_file: ApiKeyFile = None,
    local: Annotated[bool, typer.Option("--local", help="Load the models here instead of asking a server.")] = False,
    config: Annotated[Path | None, typer.Option(help="With --local: configuration file; absent: demo.")] = None,
    model: Annotated[str, typer.Option(help="Pool or model; may be left out where there is one pool.")] = "",
    method: Annotated[str | None, typer.Option(help="Decoding method (see `turnout methods`).")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar=VALUE, help="A method's parameter; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Ask as a chat message, or continue the text.")] = True,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    temperature: Annotated[Rate, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[Rate, typer.Option(help="Nucleus mass.")] = None,
    top_k: Annotated[Count, typer.Option(help="Candidates kept; 0 and -1 are off.")] = None,
    min_p: Annotated[Rate, typer.Option(help="Share of the top probability a candidate needs.")] = None,
    repetition_penalty: Annotated[Rate, typer.Option(help="Above 1 discourages seen tokens.")] = None,
    presence_penalty: Annotated[Rate, typer.Option(help="Subtracted once per generated token.")] = None,
    frequency_penalty: Annotated[Rate, typer.Option(help="Subtracted per occurrence.")] = None,
    processor: Annotated[list[str] | None, typer.Option(metavar=PART, help="Logits processor; repeatable.")] = None,
    contrast: Annotated[str | None, typer.Option(metavar=PART, help="Streams that logits are combined with.")] = None,
    context: Annotated[str, typer.Option(help="Text that the question is about; stands before it.")] = "",
    uncertainty: Annotated[str | None, typer.Option(metavar=PART, help="What measures the doubt about it.")] = None,
    abstain_above: Annotated[Rate, typer.Option(help="Doubt above which no answer is given.")] = None,
    max_tokens: Annotated[Count, typer.Option(help="Most tokens generated.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the answer; repeatable.")] = None,
    seed: Annotated[Count, typer.Option(help="Same seed, same tokens.")] = None,
    n: Annotated[Count, typer.Option("--n", "-n", help="Number of answers.")] = None,
    logprobs: Annotated[Count, typer.Option(help="Alternatives reported per token, in --json.")] = None,
    deadline_s: Annotated[Rate, typer.Option(help="Seconds the call may take.")] = None,
    session: Annotated[str, typer.Option(help="What requests are grouped by, where the pool routes.")] = "",
    limit: Annotated[list[str] | None, typer.Option(metavar=VALUE, help="max_cost, max_latency_s, quality.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the request was routed as it was.")] = False,
    cache: Annotated[str, typer.Option(help="exact, or lossy: cached prefixes that lost something may be used.")] = "",
    parse_special: Annotated[bool, typer.Option(help="With --raw: special tokens that are spelled out.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Print the text alone, without marks and meters.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print tokens, provenance and cost as JSON.")] = False,
) -> None:
    """Answer one prompt, from a server or here, and print its cost, and what the large model alone would have cost.

    What the large model wrote is coloured and underlined, or in ⟦brackets⟧ without colour; cost has several meters.
    """
    given = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "max_tokens": max_tokens,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty, "stop": stop or None,
        "frequency_penalty": frequency_penalty, "seed": seed, "n": n, "logprobs": logprobs,
        "processors": [parse_part(each, "--processor") for each in processor or ()] or None,
    }  # fmt: skip
    asked: dict[str, Any] = {
        "model": model, "method": method, "deadline_s": deadline_s, "session": session, "explain": explain,
        "cache": cache, "parse_special": parse_special, "context": context, "abstain_above": abstain_above,
        "chat": chat, "system": system, **_parse_parts(contrast=contrast, uncertainty=uncertainty),
        "params": parse_params(param or []), "limits": parse_params(limit or [], "--limit"),
    }  # fmt: skip
    question = Question(
        text=read_stdin("prompt") if prompt == "-" else prompt,
        sampling={name: value for name, value in given.items() if value is not None},
        **asked,
    )
    _answer(question, None if local else address, config, plain, as_json, api_key_file)


def _answer(
    question: Question,
    address: str | None,
    config: Path | None,
    plain: bool,
    as_json: bool,
    api_key_file: Path | None,
) -> None:
    answers = Answers()
    marked = Marked(console(), question.model, streams=question.sampling.get("n", 1) == 1, marks=not plain)
    show = answers.add if as_json else marked.show
    if address is not None:
        usage = ask_server(question, address, marked.announce, show, api_key_file)
    else:
        usage = asyncio.run(ask_here(question, read_config(config), marked.announce, show))
    if as_json:
        print_json({"choices": answers.whole(), "usage": usage})
        return
    marked.finish()
    if not plain:
        print_meters(usage)
        typer.echo(summary(usage))
    if question.explain:
        print_route(usage.route)


def parse_part(given: str, option: str) -> dict[str, Any]:
    """`name:key=value,key=value` as a choice of a part; the parameters may be left out."""
    name, _, params = given.partition(":")
    return {"name": name, "params": parse_params(NEXT_PARAM.split(params) if params else [], option)}


def _parse_parts(**given: str | None) -> dict[str, dict[str, Any]]:
    return {name: parse_part(part, f"--{name}") for name, part in given.items() if part is not None}


def parse_params(given: list[str], option: str = "--param") -> dict[str, Any]:
    """`name=value` pairs; a value is JSON where it can be, text where it cannot."""
    found: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} must be NAME=VALUE", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name} is given twice", param_hint=option)
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
