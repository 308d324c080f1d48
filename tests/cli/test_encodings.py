"""The command line on standard streams of any encoding: replacements and escapes, never a traceback."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cli.demo
from cli.main import main
from turnout.errors import TurnoutError, invalid
from turnout.standard_streams import read_stdin, replace_unencodable, shows

ROOT = Path(__file__).parents[2]
TEXT = "é日本 😀 \ud83d."  # the last is half of a pair, which no encoding has
ENCODINGS = ["ascii", "latin-1", "cp1252", "utf-8"]
# Without Python's own remedies for a bare locale.
BARE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
SURROUNDINGS = [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "cp1252"}, {"LC_ALL": "C"}, BARE]
GENERATE = """
    import sys
    import cli.generate
    from cli.main import main
    from turnout.calls import Chunk, ModelDescription, TokenOut, Usage
    from turnout.cost import Cost, CostReport, ModelMeter, SpeculationMeter
    from turnout.types import TokenKind

    def ask_server(question, address, announce, show, key):
        announce([ModelDescription("p", "A", 50, 100, 64, {"small": "s", "large": LARGE}, "plain")])
        for source in ("s", LARGE):
            show(Chunk(0, TEXT, (TokenOut(1, TEXT, source, TokenKind.DECODED),)))
        return Usage(
            prompt_tokens=5, completion_tokens=2, cached_tokens=0,
            models={LARGE: ModelMeter(10, generated_tokens=3)}, speculation=SpeculationMeter(), switches=2,
            cost=CostReport(Cost(0.4, 600.0, 0.5), Cost(1.0, 960.0, 1.0), 0.25),
            method="plain", params={}, seed=7, ttft_s=0.1, wall_s=0.5,
        )

    cli.generate.ask_server = ask_server
    main()
"""


def generate(surroundings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """`turnout generate` with a server that answers twice with `TEXT`, once by each model."""
    script = f"TEXT, LARGE = {TEXT!a}, {'größer'!a}\n{textwrap.dedent(GENERATE)}"
    return subprocess.run(
        [sys.executable, "-c", script, "generate", "hi", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), **surroundings},
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("surroundings", SURROUNDINGS, ids=lambda given: ",".join(map("=".join, given.items())))
def test_an_answer_is_shown_with_replacements(surroundings: dict[str, str]) -> None:
    done = generate(surroundings)
    assert (done.returncode, done.stderr) == (0, b"")
    encoding = surroundings.get("PYTHONIOENCODING", "ascii" if surroundings is BARE else "utf-8")
    shown = TEXT.encode(encoding, errors="replace")
    opened, closed = ("⟦".encode(), "⟧".encode()) if encoding == "utf-8" else (b"[[", b"]]")
    assert done.stdout.startswith(shown + opened + shown + closed)
    assert "größer".encode(encoding, errors="replace") in done.stdout
    assert b"plain: 2 tokens in 0.50 s" in done.stdout


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_json_loses_nothing(encoding: str) -> None:
    done = generate({"PYTHONIOENCODING": encoding}, "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode(encoding))["choices"][0]["text"] == 2 * TEXT


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[io.BytesIO, io.BytesIO]]:
    """Give standard output and error an encoding; what is written to them."""

    def encoded(name: str) -> tuple[io.BytesIO, io.BytesIO]:
        out, err = io.BytesIO(), io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, name, write_through=True))
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, name, write_through=True))
        return out, err

    return encoded


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stream_shows_what_its_encoding_has(encoding: str, streams: Any) -> None:
    out, err = streams(encoding)
    replace_unencodable()
    sys.stdout.write(TEXT)
    sys.stderr.write(TEXT)
    assert out.getvalue() == TEXT.encode(encoding, errors="replace")
    assert err.getvalue() == TEXT.encode(encoding, errors="backslashreplace")
    assert shows(sys.stdout, "a")
    assert not shows(sys.stdout, TEXT)
    assert shows(sys.stdout, "⟦") == (encoding == "utf-8")


def test_a_stream_that_is_no_file_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    replace_unencodable()
    sys.stdout.write(TEXT)
    assert sys.stdout.getvalue() == TEXT
    assert shows(sys.stdout, "⟦")


def test_every_entry_prints_an_error_of_any_text(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        sys.stdout.write(TEXT)
        raise invalid("prompt", TEXT)

    monkeypatch.setattr(cli.demo, "run", fail)
    monkeypatch.setattr("cli.main.app", fail)
    for entry, code in ((main, 1), (cli.demo.main, 1)):
        out, err = streams("ascii")
        try:
            left = entry()
        except SystemExit as ended:
            left = ended.code
        assert left == code
        assert out.getvalue() == TEXT.encode("ascii", errors="replace")
        assert err.getvalue().startswith(b"turnout: prompt: \\xe9\\u65e5\\u672c \\U0001f600 ")


def test_a_file_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise PermissionError(13, "Permission denied", "/some/place")

    monkeypatch.setattr("cli.main.app", fail)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == "turnout: /some/place: Permission denied\n"


def test_input_in_another_encoding_is_refused_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("wörter".encode()), "ascii"))
    with pytest.raises(TurnoutError, match=r"^prompt: standard input is no ascii text \(byte 1\); .*PYTHONIOENCODING"):
        read_stdin("prompt")
