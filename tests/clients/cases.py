"""What OpenAI's clients are asked to do: one list, for the client of every language.

A result is what a client made of the answer, as plain data: `value` of a whole answer, `chunks` of a stream, `error` of
a refusal, `freed` of a request that was given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
from tokenizers import Tokenizer

Result = dict[str, Any]
# A check gets a result, and those of the cases before it by name.
Check = Callable[[Result, dict[str, Result]], None]

QUESTION = "What is 69*9-32*6+44?"
OTHER = "What is 12+30?"
NO_ANSWER = "wait"
ROUNDING = 0.1  # nats, in bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        then: read the answer; go on: send it back, the same messages after it, as the next turn, and read that one's;
            close the stream after its first chunk; or give up after half a second.
    """

    name: str
    call: str
    arguments: dict[str, Any]
    check_result: Check
    tenant: str = "acme"
    then: str = "read"


@cache
def tokenizer() -> Tokenizer:
    """Of the demo pair."""
    return Tokenizer.from_file(str(files("turnout").joinpath("demo/large/tokenizer.json")))


def ids(text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


@dataclass
class Choice:
    """One answer, whole or put together from a stream."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    role: str | None = None


def choices(got: Result) -> list[Choice]:
    """The answers in order; a refusal is a failure."""
    assert "error" not in got, got["error"]
    found: dict[int, Choice] = {}
    for part in [got["value"]] if "value" in got else got["chunks"]:
        for each in part["choices"]:
            _add(found.setdefault(each["index"], Choice()), each)
    assert list(found) == sorted(found) or "chunks" in got, "choices come in order"
    return [found[index] for index in sorted(found)]


def _add(choice: Choice, part: dict[str, Any]) -> None:
    said = part.get("message") or part.get("delta") or {}
    choice.text += part.get("text") or said.get("content") or ""
    choice.role = said.get("role") or choice.role
    for call in said.get("tool_calls") or ():
        if call.get("index", len(choice.calls)) == len(choice.calls):
            choice.calls.append((call["function"]["name"], ""))
        name, arguments = choice.calls[-1]
        choice.calls[-1] = (name, arguments + call["function"]["arguments"])
    if part.get("finish_reason"):
        choice.reasons.append(part["finish_reason"])
    told = part.get("logprobs") or {}
    if told.get("content") is not None:
        choice.tokens += [each["token"] for each in told["content"]]
        choice.logprobs += [each["logprob"] for each in told["content"]]
    elif told.get("tokens") is not None:
        choice.tokens += told["tokens"]
        choice.logprobs += told["token_logprobs"]


def texts(got: Result) -> list[str]:
    """The answers' texts."""
    return [each.text for each in choices(got)]


def usage(got: Result) -> dict[str, Any]:
    """Counts of a whole answer, or of a stream's last chunk."""
    told: dict[str, Any] = got["value"]["usage"] if "value" in got else got["chunks"][-1]["usage"]
    assert told["total_tokens"] == told["prompt_tokens"] + told["completion_tokens"]
    return told


def completion(name: str, check: Check, tenant: str = "acme", then: str = "read", **arguments: Any) -> Case:
    """A case of /v1/completions."""
    body = {"model": "demo", "prompt": QUESTION, "max_tokens": 12, "temperature": 0, **arguments}
    return Case(f"completions: {name}", "completions.create", body, check, tenant, then)


def chat(name: str, check: Check, tenant: str = "acme", then: str = "read", **arguments: Any) -> Case:
    """A case of /v1/chat/completions."""
    turns = [{"role": "user", "content": QUESTION}]
    body = {"model": "demo", "messages": turns, "max_tokens": 12, "temperature": 0, **arguments}
    return Case(f"chat: {name}", "chat.completions.create", body, check, tenant, then)


def refused(kind: str, status: int, param: str | None = None, code: str | None = None) -> Check:
    """The client raises this exception, with the server's reason in it."""

    def check(got: Result, _: dict[str, Result]) -> None:
        error = got.get("error")
        assert error is not None, got
        assert (error["class"], error["status"]) == (kind, status), error
        assert error["message"], error
        if param is not None:
            assert (error["param"] or "").startswith(param), error
        if code is not None:
            assert error["code"] == code, error

    return check


def same_as(name: str) -> Check:
    """The same texts, reasons, tokens and log-probabilities as another case."""

    def check(got: Result, others: dict[str, Result]) -> None:
        mine, other = choices(got), choices(others[name])
        assert [each.text for each in mine] == [each.text for each in other]
        assert [each.reasons for each in mine] == [each.reasons for each in other]
        assert [each.calls for each in mine] == [each.calls for each in other]
        assert [each.tokens for each in mine] == [each.tokens for each in other]
        # Requests that ran beside others have logits that are rounded otherwise.
        for one, two in zip(mine, other, strict=True):
            assert one.logprobs == pytest.approx(two.logprobs, abs=ROUNDING)

    return check


def both(*checks: Check) -> Check:
    """All of these."""

    def check(got: Result, others: dict[str, Result]) -> None:
        for each in checks:
            each(got, others)

    return check


def freed(got: Result, _: dict[str, Result]) -> None:
    """The client left, and the pool was empty at once, long before the answer would have ended."""
    assert got["freed"] is True, got
