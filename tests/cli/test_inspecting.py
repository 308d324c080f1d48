from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cli.methods import bounds, type_name
from turnout.calls import ModelDescription
from turnout.registry import METHODS_PACKAGE, names


def test_methods_lists_every_method_as_a_table_and_as_json(run: Any) -> None:
    known = names(METHODS_PACKAGE)
    table = run("methods")
    assert table.code == 0
    assert [line.split()[0] for line in table.out.splitlines() if line[1:2].isalpha()] == ["method", *known]
    document = json.loads(run("methods", "--json").out)
    assert [method["name"] for method in document] == known
    assert all(method["summary"] and method["params_schema"] for method in document)


def test_one_method_is_shown_with_the_bounds_of_its_parameters(run: Any) -> None:
    result = run("methods", "entropy_adaptive")
    assert result.code == 0
    (row,) = [line for line in result.out.splitlines() if line.split()[:1] == ["window"]]
    assert "integer" in row
    assert "at least 1" in row
    schema = json.loads(run("methods", "entropy_adaptive", "--json").out)["params_schema"]
    assert schema["properties"]["window"]["minimum"] == 1


def test_an_unknown_method_is_refused_with_the_known_ones(run: Any) -> None:
    result = run("methods", "no_such")
    assert result.code == 1
    assert result.err.startswith("turnout: method: 'no_such' is not known; available: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "kind", "allowed"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 9}, "integer", "at least 1, at most 9"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, "number", "above 0, below 2"),
        ({"enum": ["a", "b"], "type": "string"}, "choice", "a, b"),
        ({"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]}, "integer or null", "at least 3"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 2}, "list of string", "at most 2 items"),
        ({"$ref": "#/$defs/Kind"}, "choice", "x"),
    ],
)
def test_a_schema_is_put_into_words(field: dict[str, Any], kind: str, allowed: str) -> None:
    schema = {"$defs": {"Kind": {"enum": ["x"], "type": "string"}}}
    assert (type_name(field, schema), bounds(field, schema)) == (kind, allowed)


def test_a_good_configuration_is_ok(run: Any, config_file: Path) -> None:
    result = run("config", "check", str(config_file))
    assert (result.code, result.out) == (0, f"{config_file}: ok; 2 models; pools: p (s + l, plain)\n")
    resolved = json.loads(run("config", "check", str(config_file), "--json").out)
    assert resolved["server"]["grpc_port"] == 9000


def test_a_bad_configuration_is_one_line_that_names_the_field(run: Any, config_file: Path) -> None:
    values = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    values["models"]["s"]["dtyp"] = "float32"
    config_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    result = run("config", "check", str(config_file))
    allowed = "device, dtype, kv_memory_bytes, max_length, memory_limit_bytes, path"
    assert result == (1, "", f"turnout: models.s.dtyp: unknown; allowed here: {allowed}\n")


def test_the_schema_accepts_what_the_check_accepts(run: Any, config_file: Path) -> None:
    schema = json.loads(run("config", "schema").out)
    values = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"modles": {}}, schema)


def test_models_of_a_configuration_need_no_server(run: Any, config_file: Path) -> None:
    result = run("models", "--config", str(config_file))
    assert result.code == 0
    assert str(config_file.parent / "l") in result.out
    document = json.loads(run("models", "--config", str(config_file), "--json").out)
    assert document["pools"]["p"]["large"] == "l"
    assert document.keys() == {"models", "pools"}


class FakeClient:
    """A client of a server that describes these models."""

    described: list[ModelDescription]

    def __init__(self, address: str) -> None:
        self.address = address

    def models(self) -> list[ModelDescription]:
        return self.described

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, models: list[ModelDescription]) -> None:
    monkeypatch.setattr("turnout.client.Client", type("Fake", (FakeClient,), {"described": models}))


@pytest.mark.usefixtures("served")
def test_models_of_a_server_show_pools_and_members(run: Any) -> None:
    rows = {line.split()[0]: line for line in run("models").out.splitlines() if line.strip()}
    assert "small: s, large: l" in rows["p"]
    assert "LlamaForCausalLM" in rows["l"]
    assert [model["name"] for model in json.loads(run("models", "--json").out)] == ["p", "s", "l"]


METRICS = """\
# HELP turnout_requests_total Finished requests.
turnout_requests_total{model="p",outcome="OK"} 3.0
turnout_ttft_seconds_bucket{le="0.1"} 2.0
turnout_ttft_seconds_count 3.0
turnout_requests_created 1.7e+09
python_info 1.0
"""


@pytest.fixture
def http() -> Iterator[ThreadingHTTPServer]:
    """A server with the endpoints that `status` reads; set `health` to change what it says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = (200, METRICS) if self.path == "/metrics" else self.server.health  # type: ignore[attr-defined]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.health = (200, '{"status": "ok"}')  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("served")
def test_the_status_of_a_healthy_server(run: Any, http: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{http.server_port}"
    result = run("status", "--http", url)
    assert result.code == 0
    assert f"HTTP {url}: ok" in result.out
    document = json.loads(run("status", "--http", url, "--json").out)
    assert document["healthy"] is True
    assert document["metrics"] == {
        'turnout_requests_total{model="p",outcome="OK"}': 3.0,
        "turnout_ttft_seconds_count": 3.0,
    }


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((503, '{"status": "unavailable"}'), "unavailable"),
        ((502, "bad gateway"), "answered 502 without a status"),
        ((200, "[]"), "answered 200 without a status"),
    ],
)
def test_a_server_that_is_not_well_is_exit_code_1(
    run: Any, http: ThreadingHTTPServer, answer: tuple[int, str], said: str
) -> None:
    http.health = answer  # type: ignore[attr-defined]
    result = run("status", "--http", f"http://127.0.0.1:{http.server_port}")
    assert result.code == 1
    assert f": {said}\n" in result.out


@pytest.mark.usefixtures("served")
def test_a_missing_http_endpoint_is_one_line(run: Any) -> None:
    result = run("status", "--http", "http://127.0.0.1:1")
    assert result.code == 1
    assert result.err.startswith("turnout: http: no server answers at http://127.0.0.1:1 (")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", ["models", "status"])
def test_a_missing_server_is_one_line(run: Any, command: str) -> None:
    result = run(command, "--address", "127.0.0.1:1")
    assert result == (1, "", "turnout: address: no server answers at 127.0.0.1:1\n")


def test_parts_lists_what_speculation_is_made_of(run: Any) -> None:
    table = run("parts")
    assert table.code == 0
    for name in ("copyspec", "svip", "rejection", "ucb"):
        assert name in table.out
    listed = json.loads(run("parts", "verifiers", "--json").out)
    assert {part["name"]: part["fits"] for part in listed}["typical"] == "fixed, not lossless"
    one = run("parts", "drafters", "token_recycling")
    assert "#63" in one.out
    assert "parameter" in one.out
    assert run("parts", "drafters", "no_such").code == 1
