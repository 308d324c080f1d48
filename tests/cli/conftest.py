from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from cli.main import main
from tests.checkpoint_folders import write_checkpoint
from turnout.calls import Chunk, EndToken, ModelDescription, TokenOut, Usage
from turnout.cost import Cost, CostReport, ModelMeter, SpeculationMeter
from turnout.types import FinishReason, TokenKind


class Outcome(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `turnout` with these arguments, as a shell would."""

    def run_turnout(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["turnout", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run_turnout


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A valid configuration of two models that look like checkpoints from outside."""
    for name in ("s", "l"):
        write_checkpoint(tmp_path / name)
    values: dict[str, Any] = {
        "models": {name: {"path": str(tmp_path / name)} for name in ("s", "l")},
        "pools": {"p": {"small": "s", "large": "l", "default": {"name": "plain"}}},
    }
    path = tmp_path / "turnout.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def token(text: str, source: str) -> TokenOut:
    return TokenOut(1, text, source, TokenKind.DECODED)


@pytest.fixture
def models() -> list[ModelDescription]:
    ends: dict[str, Any] = {"ends": (EndToken(2, "<|end|>"), EndToken(7, "</s>")), "ends_source": "config.json"}
    return [
        ModelDescription("p", "LlamaForCausalLM", 50, 100, 64, {"small": "s", "large": "l"}, "plain", **ends),
        ModelDescription("s", "LlamaForCausalLM", 10, 100, 64, {}, "plain"),
        ModelDescription("l", "LlamaForCausalLM", 40, 100, 64, {}, "plain"),
    ]


@pytest.fixture
def chunks() -> list[Chunk]:
    """An answer of three pieces: small, large, small."""
    return [
        Chunk(0, "one", (token("one", "s"),)),
        Chunk(0, " two", (token(" two", "l"), token(" th", "s"))),
        Chunk(0, " three", (token("ree", "s"),), FinishReason.STOP),
    ]


@pytest.fixture
def usage() -> Usage:
    return Usage(
        prompt_tokens=5, completion_tokens=4, cached_tokens=0,
        models={"s": ModelMeter(10, generated_tokens=3), "l": ModelMeter(40, generated_tokens=1)},
        speculation=SpeculationMeter(), switches=2,
        cost=CostReport(Cost(0.4375, 600.0, 0.5), Cost(1.0, 960.0, 1.0), 0.25),
        method="entropy_adaptive", params={}, seed=7, ttft_s=0.1, wall_s=0.5,
    )  # fmt: skip
