"""Files that an editor began with a byte order mark say the same as without it, wherever one is read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cli.cache import _read
from cli.route import _read_json
from cli.train_codecs import _texts
from deployments.access.signed import read_keys
from deployments.access.tenants_file import read_tenants
from deployments.console.reports import Reports
from experiments.grid.datasets import _lines
from kvstore.keys import load_root_key
from kvstore.redis.nodes import _read_password
from router.experiment_winner import DecidedFile
from router.summary import read_log
from training.calibration_data import read_questions
from training.demo_prompts import read_lines
from training.router_outcomes import Outcomes
from turnout.api_keys import read_api_key
from turnout.config import TurnoutConfig, parse_config, read_yaml
from turnout.standard_streams import read_stdin

MARK = "\ufeff"
POINT = {"label": "a", "quality": 0.5, "cost": 0.25}
ENTRY = {"kind": "request", "request_id": "r", "decision": None, "outcome": {}}
OUTCOME = {"prompt": "a", "correct_small": True, "correct_large": False}
QUESTIONS = "".join(json.dumps({"prompt": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(20))
PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo
PEM = Ed25519PrivateKey.generate().public_key().public_bytes(serialization.Encoding.PEM, PUBLIC).decode()
DEMO = yaml.safe_dump(TurnoutConfig.demo().model_dump(mode="json"))
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "configuration": (DEMO, lambda p: parse_config(read_yaml(p))),
    "tenants file": ("tenants: {}\n", lambda p: read_tenants(p)),
    "API key": ("to_key_secret\n", lambda p: read_api_key(p)),
    "root key": ("ab" * 32, lambda p: load_root_key(p)),
    "password of Redis": ("secret\n", lambda p: _read_password(str(p))),
    "report": (json.dumps({"points": [POINT]}), lambda p: Reports(p.parent).read(p.stem)),
    "route log": (json.dumps(ENTRY) + "\n", lambda p: list(read_log(p))),
    "request": ('{"prompt": "a"}', lambda p: _read_json(p, "file")),
    "decided split": ('{"arm": "a"}', lambda p: DecidedFile(p, ["a"]).get()),
    "prefix": ("You are.", lambda p: _read(p, "text")),
    "prompts": ("one\ntwo\n", lambda p: [prompt.text for prompt in read_lines(p, 2)]),
    "prompts of codecs": ("one\ntwo\n", lambda p: _texts(p, 2, 0)),
    "public key": (PEM, lambda p: [key.algorithms for key in read_keys(p, False, ("EdDSA",))]),
    "questions": (QUESTIONS, lambda p: read_questions(p).digest),
    "outcomes": (json.dumps(OUTCOME), lambda p: Outcomes.read(p).digest),
    "rows of a dataset": ('{"prompt": "a"}\n', lambda p: list(_lines(p, "dataset"))),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_file_with_a_mark_is_the_file_without_it(tmp_path: Path, name: str) -> None:
    text, read = READERS[name]
    path = tmp_path / "file.json"
    found = []
    for mark in ("", MARK):
        path.write_text(mark + text, encoding="utf-8")
        path.chmod(0o600)
        found.append(read(path))
    assert found[0]
    assert found[0] == found[1]


def test_a_prompt_that_is_piped_in_with_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{MARK}2 + 2 ="))
    assert read_stdin("prompt") == "2 + 2 ="
