from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cli.methods import bounds, type_name
from cli.status import acceptance_rows
from tests.checkpoint_folders import write_checkpoint
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
    first, memory = result.out.splitlines()
    assert (result.code, first) == (0, f"{config_file}: ok; 2 models; pools: p (s + l, plain)")
    assert re.fullmatch(r"p: [\d.]+ MiB of memory on cpu, up to [\d.]+ MiB while loading \(s: .*; l: .*\)", memory)
    resolved = json.loads(run("config", "check", str(config_file), "--json").out)
    assert resolved["server"]["grpc_port"] == 9000


def test_a_bad_configuration_is_one_line_that_names_the_field(run: Any, config_file: Path) -> None:
    values = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    values["models"]["s"]["dtyp"] = "float32"
    config_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    result = run("config", "check", str(config_file))
    allowed = "device, dtype, endpoint, kv_dtype, kv_memory_bytes, max_length, memory_limit_bytes, path"
    allowed += ", price, tensor_parallel, weights"
    assert result == (1, "", f"turnout: models.s.dtyp: unknown; allowed here: {allowed}\n")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: hqq is not supported; supported: "),
        (
            {"model_type": "mamba"},
            "architecture 'mamba' is not supported: ",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "code of a checkpoint (modeling_x.X) is never run"),
        ({"use_bidirectional_attention": True}, "bidirectional attention is not supported (llama)"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_one_line(
    run: Any, config_file: Path, fields: dict[str, Any], says: str
) -> None:
    write_checkpoint(config_file.parent / "l", **fields)
    code, out, error = run("config", "check", str(config_file))
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert error.startswith("turnout: models.l.path: ")
    assert says in error


def test_tokenizers_are_compared_without_weights(run: Any, config_file: Path) -> None:
    file = config_file.parent / "s" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<|pad|>", "<|none|>"), encoding="utf-8")
    code, _, error = run("config", "check", str(config_file))
    assert (code, "s and l do not share one vocabulary ('<|none|>' is " in error) == (0, True)
    written = config_file.read_text(encoding="utf-8")
    assert "name: plain" in written
    config_file.write_text(written.replace("name: plain", "name: entropy_adaptive"), encoding="utf-8")
    code, out, error = run("config", "check", str(config_file))
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert error.startswith(
        "turnout: pools.p.default: 'entropy_adaptive' needs one vocabulary, and that of 's' (small)"
    )


def test_weights_that_are_elsewhere_are_noted(run: Any, config_file: Path) -> None:
    (config_file.parent / "l" / "model.safetensors").unlink()
    code, out, error = run("config", "check", str(config_file))
    assert (code, out) == (0, f"{config_file}: ok; 2 models; pools: p (s + l, plain)\n")
    folder = config_file.parent / "l"
    assert error == f"models.l.path: {folder} has no weight files, which each node that loads the model needs\n"


def test_ends_of_text_that_differ_are_said(run: Any, config_file: Path) -> None:
    write_checkpoint(config_file.parent / "s", eos_token_id=[65, 66])
    code, out, error = run("config", "check", str(config_file))
    assert (code, out.splitlines()[0]) == (0, f"{config_file}: ok; 2 models; pools: p (s + l, plain)")
    note = "p: s ends texts with tokens [65, 66] (config.json), l with [256] (config.json), which hold for both\n"
    assert error == note


def test_the_schema_accepts_what_the_check_accepts(run: Any, config_file: Path) -> None:
    schema = json.loads(run("config", "schema").out)
    values = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"modles": {}}, schema)


def test_models_of_a_configuration_need_no_server(run: Any, config_file: Path) -> None:
    result = run("models", "--config", str(config_file))
    assert result.code == 0
    assert str(config_file.parent / "l") in "".join(result.out.split())
    document = json.loads(run("models", "--config", str(config_file), "--json").out)
    assert document["pools"]["p"]["large"] == "l"
    assert document.keys() == {"models", "pools"}


class FakeClient:
    """A client of a server that describes these models."""

    described: list[ModelDescription]
    asked: list[float | None]

    def __init__(self, address: str, api_key: str = "") -> None:
        self.address = address

    def models(self, timeout_s: float | None = None) -> list[ModelDescription]:
        self.asked.append(timeout_s)
        return self.described

    def healthy(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        return True

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, models: list[ModelDescription]) -> list[float | None]:
    """A server that describes these models; how long it was given to, each time it was asked."""
    asked: list[float | None] = []
    monkeypatch.setattr("turnout.client.Client", type("Fake", (FakeClient,), {"described": models, "asked": asked}))
    return asked


@pytest.mark.usefixtures("served")
def test_models_of_a_server_show_pools_and_members(run: Any) -> None:
    rows = {line.split()[0]: line for line in run("models").out.splitlines() if line.strip()}
    assert "small: s, large: l" in rows["p"]
    assert "LlamaForCausalLM" in rows["l"]
    assert "2 <|end|>, 7 </s> (config.json)" in rows["p"]
    assert rows["s"].rstrip().endswith("none")
    assert [model["name"] for model in json.loads(run("models", "--json").out)] == ["p", "s", "l"]


METRICS = """\
# HELP turnout_requests_total Finished requests.
turnout_requests_total{model="p",outcome="OK"} 3.0
turnout_ttft_seconds_bucket{le="0.1"} 2.0
turnout_ttft_seconds_count 3.0
turnout_requests_created 1.7e+09
python_info 1.0
"""


MEMBER = {
    "model": "s",
    "sequences": 3,
    "used_blocks": 25,
    "cached_blocks": 5,
    "total_blocks": 100,
    "waiting": 2,
    "waiting_tokens": 40,
    "step_seconds": 0.0125,
    "place": "10.0.0.7 pid 4711",
    "restarts": 4,
}
REPLICA = {"requests": 6, "waiting": 2, "tokens_per_second": 81.6, "notes": ["slower kernels"]}
POOLS = {
    "p": [{**REPLICA, "members": [MEMBER, {**MEMBER, "model": "l", "place": "", "step_seconds": None}]}],
    "idle": [],
}


@pytest.fixture
def http() -> Iterator[ThreadingHTTPServer]:
    """A server with the endpoints that `status` reads; set `health` and `status` to change what it says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = self.server.status  # type: ignore[attr-defined]
            answers = {"/metrics": (200, METRICS), "/status": status}
            code, body = answers.get(self.path, self.server.health)  # type: ignore[attr-defined]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.health = (200, '{"status": "ok"}')  # type: ignore[attr-defined]
    server.status = (200, json.dumps({"pools": POOLS, "errors": {}}))  # type: ignore[attr-defined]
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
def test_the_status_shows_replicas_and_where_their_models_run(run: Any, http: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{http.server_port}"
    lines = [" ".join(line.split()) for line in run("status", "--http", url).out.splitlines()]
    assert "p 0 6 2 82" in lines
    assert "idle no replica" in lines
    assert "p 0 s 10.0.0.7 pid 4711 4 3 25 % 2 (40 tokens) 12.5" in lines
    assert "p 0 l with the replica 4 3 25 % 2 (40 tokens)" in lines
    assert "note: p: slower kernels" in lines
    assert json.loads(run("status", "--http", url, "--json").out)["pools"] == POOLS


@pytest.mark.usefixtures("served")
def test_the_status_names_the_servers_of_the_prefix_store_once(run: Any, http: ThreadingHTTPServer) -> None:
    embedded, named = "valkey 9.1.2 (embedded)", "redis 8.2.2 (redis.internal:6379)"
    caches = [{"servers": [embedded]}, {"servers": [named, embedded]}, {"servers": []}, None]
    pools = {"p": [{**POOLS["p"][0], "cache": cache} for cache in caches]}
    http.status = (200, json.dumps({"pools": pools, "errors": {}}))  # type: ignore[attr-defined]
    lines = run("status", "--http", f"http://127.0.0.1:{http.server_port}").out.splitlines()
    assert [line for line in lines if line.startswith("store:")] == [f"store: {embedded}", f"store: {named}"]


@pytest.mark.parametrize(("asleep", "asked"), [(False, [10.0]), (True, [])])
def test_the_status_wakes_no_pool_and_waits_for_none(
    run: Any, http: ThreadingHTTPServer, served: list[float | None], asleep: bool, asked: list[float]
) -> None:
    pools = POOLS if asleep else {"p": POOLS["p"]}
    http.status = (200, json.dumps({"pools": pools, "errors": {}}))  # type: ignore[attr-defined]
    result = run("status", "--http", f"http://127.0.0.1:{http.server_port}")
    assert (result.code, served) == (0, asked)
    assert ("small: s, large: l" in result.out) is not asleep


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ((200, {"pools": {"p": POOLS["p"]}, "errors": {"q": "pool 'q' has no replica"}}), "q: pool 'q' has no replica"),
        ((403, "not for you"), "/status: answered 403 without pools"),
    ],
)
def test_the_status_says_which_pools_do_not_answer(
    run: Any, http: ThreadingHTTPServer, served: list[float | None], status: tuple[int, Any], said: str
) -> None:
    http.status = (status[0], json.dumps(status[1]))  # type: ignore[attr-defined]
    result = run("status", "--http", f"http://127.0.0.1:{http.server_port}")
    assert f"\n{said}\n" in result.out
    assert ("10.0.0.7 pid 4711" in result.out) == (status[0] == 200)
    assert served == [], "a pool that does not answer would be waited for"


def test_a_server_that_says_nothing_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.status.TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        result = run("status", "--address", address)
        assert time.monotonic() - started < 8
    assert result == (1, "", f"turnout: address: the server at {address} does not answer within 0.5 s\n")


def test_the_status_shows_how_many_drafts_were_accepted() -> None:
    labels = '{method="speculative",tenant="default"}'
    metrics = {
        f"turnout_draft_tokens_total{labels}": 80.0,
        f"turnout_accepted_draft_tokens_total{labels}": 60.0,
        'turnout_draft_tokens_total{method="pearl",tenant="default"}': 0.0,
    }
    assert acceptance_rows(metrics) == [['method="speculative",tenant="default"', "80", "75 %"]]


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
