"""`turnout task`: parameters, files in and out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from cli.main import app
from decoding.tasks.base import to_base64
from turnout.errors import Code, TurnoutError


class FakeClient:
    """The gRPC client; `asked` is what reached it."""

    asked: tuple[Any, ...] = ()
    answer: dict[str, Any]

    def __init__(self, address: str, api_key: str = "") -> None:
        self._address = address

    def task(self, name: str, params: dict[str, Any], **options: Any) -> dict[str, Any]:
        type(self).asked = (self._address, name, params, options)
        return dict(self.answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClient.asked, FakeClient.answer = (), {"data": to_base64(b"\x00raw"), "tokens": 3}
    monkeypatch.setattr("turnout.client.Client", FakeClient)


def run(*args: str, stdin: bytes | None = None) -> Any:
    return CliRunner().invoke(app, ["task", *args], input=stdin)


def test_a_file_goes_in_as_base64_and_comes_out_as_it_is(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\xff any bytes")
    done = run("compress", str(source), "--param", "lanes=2", "--out", str(target), "--model", "demo")
    assert done.exit_code == 0, done.output
    params = {"lanes": 2, "data": to_base64(b"\xff any bytes")}
    assert FakeClient.asked == ("localhost:9000", "compress", params, {"model": "demo", "deadline_s": None})
    assert target.read_bytes() == b"\x00raw"
    assert json.loads(done.stdout) == {"tokens": 3}


def test_without_files_the_result_is_json() -> None:
    done = run("score", "--param", "prompt=a", "--param", 'completions=["b"]', "--deadline-s", "2.5")
    assert json.loads(done.stdout) == FakeClient.answer
    assert FakeClient.asked[2:] == ({"prompt": "a", "completions": ["b"]}, {"model": "", "deadline_s": 2.5})
    assert run("compress", "-", stdin=b"from stdin").exit_code == 0
    assert FakeClient.asked[2] == {"data": to_base64(b"from stdin")}
    assert run("only_there", "--param", "a=1").exit_code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("score", "README.md"), "takes no file"),
        (("score", "--out", "x"), "is no file"),
        (("compress", "README.md", "--param", "data=YQ=="), "given twice"),
        (("score", "--param", "top"), "NAME=VALUE"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_it_is_asked(args: tuple[str, ...], said: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert said in done.output.replace("\n", " ")
    assert not FakeClient.asked


def test_a_task_that_only_the_server_has_takes_no_files() -> None:
    done = run("only_there", "README.md")
    assert isinstance(done.exception, TurnoutError)
    assert (done.exception.code, done.exception.field) == (Code.INVALID_ARGUMENT, "file")


def test_models_that_are_loaded_here_carry_out_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.harness import pair_config
    from training.random_models import byte_tokenizer, llama_config, random_model

    for name in ("small", "large"):
        random_model(llama_config(num_hidden_layers=1), seed=1).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    monkeypatch.setattr("cli.task.read_config", lambda _: pair_config(tmp_path))
    source, packed, back = tmp_path / "in", tmp_path / "packed", tmp_path / "back"
    source.write_bytes(b"by models here")
    done = run("compress", str(source), "--local", "--out", str(packed))
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(done.stdout)["original_bytes"] == 14
    assert run("decompress", str(packed), "--local", "--out", str(back)).exit_code == 0
    assert back.read_bytes() == source.read_bytes()
    late = run("compress", str(source), "--local", "--deadline-s", "1e-9")
    assert isinstance(late.exception, TurnoutError)
    assert late.exception.code is Code.DEADLINE_EXCEEDED


def test_help_names_the_listing() -> None:
    assert "turnout parts tasks" in run("--help").output.replace("\n", " ")
    listed = CliRunner().invoke(app, ["parts", "tasks"])
    assert "label_hierarchy" in listed.output
