from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, Self

import pytest

from turnout.calls import ChatMessage, Chunk, Event, Failure, GenerateCall, ModelDescription, Usage
from turnout.errors import Code, TurnoutError, invalid


class FakeStream:
    """The client's stream over given chunks."""

    def __init__(self, chunks: list[Chunk], usage: Usage | None) -> None:
        self._chunks = chunks
        self.usage = usage

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks = []


class FakeClient:
    """The gRPC client, with an answer made up beforehand; `asked` is what reached it."""

    answer: FakeStream
    described: list[ModelDescription]
    error: TurnoutError | None = None
    api_key = ""
    asked: tuple[str, str | None, dict[str, Any]]

    def __init__(self, address: str, api_key: str = "") -> None:
        self._address = address
        type(self).api_key = api_key

    def models(self) -> list[ModelDescription]:
        if self.error is not None:
            raise self.error
        return self.described

    def stream(self, prompt: str | None = None, **options: Any) -> FakeStream:
        type(self).asked = (self._address, prompt, options)
        return self.answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def client(
    monkeypatch: pytest.MonkeyPatch, chunks: list[Chunk], models: list[ModelDescription], usage: Usage
) -> type[FakeClient]:
    fake = type("Fake", (FakeClient,), {"answer": FakeStream(chunks, usage), "described": models})
    monkeypatch.setattr("turnout.client.Client", fake)
    return fake


def test_an_answer_is_shown_with_its_writers_and_its_cost(run: Any, client: type[FakeClient]) -> None:
    result = run("generate", "count")
    assert result.code == 0
    assert result.out.startswith("one⟦ two⟧ three\n")
    meters = {line.split()[0]: line for line in result.out.splitlines() if line.strip()}
    assert re.search(r"0\.438 +1\.000 +56%", meters["paper"])
    assert re.search(r"600 +960 +38%", meters["FLOPs"])
    assert re.search(r"0\.50 s +1\.00 s +50%", meters["wall"])
    assert "25% by the large model, 2 switches" in result.out


def test_what_is_asked_reaches_the_server(run: Any, client: type[FakeClient]) -> None:
    result = run(
        "generate", "count", "--address", "there:1", "--method", "plain", "--param", "a=0.5", "--param", "b=text",
        "--param", "c=null", "--temperature", "0", "--max-tokens", "9", "--stop", "x", "--stop", "y", "--model", "p",
        "--system", "be brief", "--deadline-s", "3", "--session", "s1", "--limit", "quality=0.9", "--explain",
            "--cache", "lossy", "--no-parse-special", "--contrast", "cad:alpha=0.5", "--context", "one two",
            "--uncertainty", "snne:samples=3", "--abstain-above", "0.5",
    )  # fmt: skip
    assert result.code == 0
    address, prompt, options = client.asked
    assert (address, prompt) == ("there:1", None)
    assert options == {
        "messages": (ChatMessage("system", "be brief"), ChatMessage("user", "count")),
        "method": "plain",
        "params": {"a": 0.5, "b": "text", "c": None},
        "model": "p",
        "deadline_s": 3.0,
        "session": "s1",
        "limits": {"quality": 0.9},
        "explain": True,
        "cache": "lossy",
        "parse_special": False,
        "contrast": {"name": "cad", "params": {"alpha": 0.5}},
        "context": "one two",
        "uncertainty": {"name": "snne", "params": {"samples": 3}},
        "abstain_above": 0.5,
        "temperature": 0.0,
        "max_tokens": 9,
        "stop": ["x", "y"],
    }


def test_a_key_is_read_from_its_file(run: Any, client: type[FakeClient], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("tk_1_2\n", encoding="utf-8")
    assert run("generate", "x", "--api-key-file", str(tmp_path / "key")).code == 0
    assert client.api_key == "tk_1_2"


def test_raw_text_is_sent_as_it_stands(run: Any, client: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("2 + 2 ="))
    assert run("generate", "-", "--raw").code == 0
    _, prompt, options = client.asked
    assert prompt == "2 + 2 ="
    assert options["messages"] is None
    assert options.keys().isdisjoint({"temperature", "seed", "max_tokens"})


def test_plain_output_is_the_text_alone(run: Any, client: type[FakeClient]) -> None:
    assert run("generate", "count", "--plain").out == "one two three\n"


def test_json_holds_every_token_with_its_source(run: Any, client: type[FakeClient]) -> None:
    document = json.loads(run("generate", "count", "--json").out)
    (choice,) = document["choices"]
    assert choice["text"] == "one two three"
    assert choice["finish_reason"] == "stop"
    assert [(token["text"], token["source"]) for token in choice["tokens"]] == [
        ("one", "s"), (" two", "l"), (" th", "s"), ("ree", "s"),
    ]  # fmt: skip
    assert document["usage"]["cost"]["spent"]["paper"] == 0.4375


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (invalid("top_p", "must be above 0 (got 0.0)"), "turnout: top_p: must be above 0 (got 0.0)\n"),
        (
            TurnoutError(Code.UNAVAILABLE, "failed to connect to all addresses; last error: refused"),
            "turnout: address: no server answers at localhost:9000\n",
        ),
        (TurnoutError(Code.UNAVAILABLE, "pool p is starting"), "turnout: pool p is starting\n"),
        (TurnoutError(Code.INTERNAL, "two\nlines"), "turnout: two lines\n"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_1(
    run: Any, client: type[FakeClient], error: TurnoutError, line: str
) -> None:
    client.error = error
    assert run("generate", "count") == (1, "", line)


def test_a_stream_without_its_usage_is_a_failure(run: Any, client: type[FakeClient], chunks: list[Chunk]) -> None:
    client.answer = FakeStream(chunks, None)
    result = run("generate", "count")
    assert (result.code, result.err) == (1, "turnout: the server ended the stream without its usage\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument"),
        (["count", "--param", "novalue"], "'novalue' must be NAME=VALUE"),
        (["count", "--param", "=1"], "must be NAME=VALUE"),
        (["count", "--param", "a=1", "--param", "a=2"], "a is given twice"),
        (["count", "--temperature", "warm"], "--temperature"),
        (["count", "--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(run: Any, arguments: list[str], says: str) -> None:
    result = run("generate", *arguments)
    assert result.code == 2
    assert says in result.err
    assert "Traceback" not in result.err


class FakePool:
    """The in-process pool, with an answer made up beforehand."""

    name = "p"

    def __init__(self, events: list[Event], described: list[ModelDescription]) -> None:
        self._events = events
        self._described = described
        self.calls: list[GenerateCall] = []
        self.closed = False

    def models(self) -> list[ModelDescription]:
        return self._described

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        self.calls.append(call)
        for event in self._events:
            yield event

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def pool(
    monkeypatch: pytest.MonkeyPatch, chunks: list[Chunk], models: list[ModelDescription], usage: Usage
) -> FakePool:
    fake = FakePool([*chunks, usage], models)
    monkeypatch.setattr("pool.local_pool.LocalPool.load", lambda name, config: fake)
    return fake


def test_local_answers_come_from_models_in_this_process(run: Any, pool: FakePool, config_file: Path) -> None:
    result = run("generate", "count", "--local", "--config", str(config_file), "--seed", "3", "--method", "plain")
    assert result.code == 0
    assert result.out.startswith("one⟦ two⟧ three\n")
    (call,) = pool.calls
    assert (call.model, call.method, call.sampling.seed) == ("p", "plain", 3)
    assert call.messages == (ChatMessage("user", "count"),)
    assert pool.closed


def test_local_failures_are_refusals_too(run: Any, pool: FakePool, config_file: Path) -> None:
    pool._events = [Failure(invalid("params.x", "unknown"))]
    result = run("generate", "count", "--local", "--config", str(config_file))
    assert (result.code, result.err) == (1, "turnout: params.x: unknown\n")
    assert pool.closed


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--top-p", "0"], "turnout: top_p: input should be greater than 0 (got 0.0)\n"),
        (["--model", "zz"], "turnout: model: must be one of l, p, s (got 'zz')\n"),
    ],
)
def test_local_values_are_checked_like_a_servers(
    run: Any, pool: FakePool, config_file: Path, arguments: list[str], line: str
) -> None:
    result = run("generate", "count", "--local", "--config", str(config_file), *arguments)
    assert (result.code, result.err) == (1, line)
