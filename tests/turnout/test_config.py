from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.checkpoint_folders import write_checkpoint
from turnout.config import (
    ModelConfig,
    PoolConfig,
    TurnoutConfig,
    artifacts_path,
    load_config,
    model_path,
    parse_config,
)
from turnout.errors import Code, TurnoutError


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A valid configuration as plain data; its models' folders exist."""
    for name in ("s", "l"):
        write_checkpoint(tmp_path / name)
    return {
        "models": {"s": {"path": str(tmp_path / "s")}, "l": {"path": str(tmp_path / "l"), "max_length": 64}},
        "pools": {"p": {"small": "s", "large": "l", "default": {"name": "plain"}}},
    }


def load_config_of(tmp_path: Path, values: dict[str, Any]) -> TurnoutConfig:
    path = tmp_path / "turnout.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_config(path)


def refusal(tmp_path: Path, text: str) -> TurnoutError:
    path = tmp_path / "turnout.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TurnoutError) as caught:
        load_config(path)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def test_a_valid_file_keeps_what_it_says_and_fills_in_the_rest(tmp_path: Path, values: dict[str, Any]) -> None:
    config = load_config_of(tmp_path, values)
    assert config.models["l"].max_length == 64
    assert config.pools["p"].default.name == "plain"
    assert (config.server.grpc_port, config.server.http_port) == (9000, 8000)


def test_the_demo_configuration_serves_its_pair() -> None:
    config = TurnoutConfig.demo()
    assert {config.pools["demo"].small, config.pools["demo"].large} == set(config.models)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (
            {"model": {}},
            "model",
            r"unknown; allowed here: access, batches, console, engine, kvstore, models, pools, ray, responses, server,"
            r" telemetry$",
        ),
        (
            {"models": {"a": {"path": "x", "dtyp": "float32"}}},
            "models.a.dtyp",
            r"unknown; allowed here: device, dtype, endpoint, kv_dtype, kv_memory_bytes, max_length,"
            r" memory_limit_bytes, path, price, tensor_parallel, weights$",
        ),
        (
            {"pools": {"p": {"small": "s", "large": "l", "default": {"nam": "plain"}}}},
            "pools.p.default.name",
            r"field required$",
        ),
        (
            {"pools": {"p": {"small": "s", "large": "l", "default": {"name": "plain", "parms": {}}}}},
            "pools.p.default.parms",
            r"unknown; allowed here: name, params$",
        ),
        ({"server": {"prot": 1}}, "server.prot", r"allowed here: cors_origins, grpc_port, http_host, http_port"),
        ({"models": {"a": {}}}, "models.a.path", r"field required"),
        (
            {"models": {"a": {"path": "x", "dtype": "int8"}}},
            "models.a.dtype",
            r"'bfloat16', 'float32' or 'float16' \(got 'int8'\)",
        ),
        ({"models": {"a": {"path": "x", "device": "gpu"}}}, "models.a.device", r"cuda.*\(got 'gpu'\)"),
        ({"models": {"a": {"path": "x", "max_length": 4}}}, "models.a.max_length", r"greater than or equal to 16"),
        ({"models": {}}, "models", r"at least 1"),
        ({"models": None}, "models", r"dictionary"),
        ({"engine": {"block_size": "many"}}, "engine.block_size", r"integer.*\(got 'many'\)"),
        ({"server": {"grpc_port": 70000}}, "server.grpc_port", r"65535 \(got 70000\)"),
        ({"server": {"grpc_port": 8000}}, "server.http_port", r"must differ from server.grpc_port \(both are 8000\)"),
        ({"server": {"request_timeout_s": 0}}, "server.request_timeout_s", r"greater than 0"),
        (
            {"server": {"ingress_processes": 2}, "access": {"anonymous": "a"}, "kvstore": {"url": "off"}},
            "server.ingress_processes",
            r"more than 1 needs kvstore.url",
        ),
        ({"pools": {"p": {"small": "s", "large": "tall"}}}, "pools.p.large", r"no model 'tall'; models: l, s"),
        ({"pools": {"s": {"small": "s", "large": "l"}}}, "pools.s", r"cannot share a name"),
        (
            {"pools": {"p": {"small": "s", "large": "l", "default": {"name": "no_such"}}}},
            "pools.p.default.name",
            r"'no_such' is not known; available: .*plain",
        ),
        (
            {"pools": {"p": {"small": "s", "large": "l", "default": {"name": "plain", "params": {"zz": 1}}}}},
            "pools.p.default.params.zz",
            r"unknown; allowed here: ",
        ),
    ],
)
def test_a_fault_is_refused_naming_the_field(
    tmp_path: Path, values: dict[str, Any], change: dict[str, Any], field: str, says: str
) -> None:
    error = refusal(tmp_path, yaml.safe_dump(values | change))
    assert error.field == field
    assert re.search(says, error.message), error.message


def test_keys_in_bytes_are_neither_moved_nor_stored_with_a_loss(tmp_path: Path, values: dict[str, Any]) -> None:
    values["models"]["s"]["kv_dtype"] = "int8"
    assert load_config_of(tmp_path, values).models["s"].kv_dtype == "int8"
    lossy = {"kvstore": {"codecs": ["raw", "fp8"]}}
    error = refusal(tmp_path, yaml.safe_dump(values | lossy))
    assert (error.field, error.code) == ("kvstore.codecs", Code.INVALID_ARGUMENT)
    assert "fp8: models.s.kv_dtype is int8" in error.message
    lossy["kvstore"]["url"] = "off"  # nothing is stored
    assert load_config_of(tmp_path, values | lossy).kvstore.codecs == ("raw", "fp8")
    values["pools"]["p"]["reuse"] = {}
    error = refusal(tmp_path, yaml.safe_dump(values))
    assert (error.field, error.code) == ("pools.p.reuse", Code.INVALID_ARGUMENT)
    values["models"]["s"]["kv_dtype"] = "auto"
    assert load_config_of(tmp_path, values | {"kvstore": {"codecs": ["fp8"]}}).pools["p"].reuse is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: {a: b", r"is not valid YAML: line 2, column 1: "),
        ("models:\n  a: b\n c: d\n", r"is not valid YAML: line 3, column 2: "),
        ("models: {}\nmodels: {}\n", r"line 2, column 1: 'models' is given twice"),
        ("pools: !!python/object:os.system {}", r"is not valid YAML: .*could not determine a constructor"),
        ("- a\n- b\n", r"must hold a mapping"),
        ("", r"must hold a mapping"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    error = refusal(tmp_path, text)
    assert error.field == "config"
    assert re.search(says, error.message), error.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError, match=r"^config: cannot read .*absent.yaml: No such file or directory$"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"models: \xe9")
    with pytest.raises(TurnoutError, match=r"^config: .*latin.yaml is not UTF-8 text$"):
        load_config(tmp_path / "latin.yaml")


def test_a_model_folder_without_a_checkpoint_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    values["models"]["l"]["path"] = str(tmp_path / "elsewhere")
    error = refusal(tmp_path, yaml.safe_dump(values))
    assert error.field == "models.l.path"
    assert error.code is Code.INVALID_ARGUMENT
    assert "elsewhere" in error.message


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"placement": {"resources": {"medium": {}}}}, "placement.resources.medium"),
        ({"placement": {"prefill": 1}}, "placement.prefill"),
        ({"autoscaling": {"min_replicas": 5}}, "autoscaling.max_replicas"),
    ],
)
def test_of_several_pools_a_fault_names_the_one_that_has_it(
    values: dict[str, Any], section: dict[str, Any], place: str
) -> None:
    pools = {"good": values["pools"]["p"], "bad": {**values["pools"]["p"], **section}}
    with pytest.raises(TurnoutError) as caught:
        parse_config({**values, "pools": pools})
    assert caught.value.field == f"pools.bad.{place}"
    assert caught.value.message.startswith(f"pools.bad.{place}: ")


def test_a_configuration_is_immutable(values: dict[str, Any]) -> None:
    config = parse_config(values)
    with pytest.raises(ValidationError, match="frozen"):
        config.models["s"].dtype = "float32"


def test_demo_paths_lead_into_the_package_and_others_are_taken_as_they_are() -> None:
    assert model_path(ModelConfig(path="demo:small")).parts[-3:] == ("turnout", "demo", "small")
    assert model_path(ModelConfig(path="~/m")) == Path("~/m").expanduser()
    assert model_path(ModelConfig(path="some/where")) == Path("some/where")
    folders = [
        artifacts_path(PoolConfig(small="s", large="l", artifacts=path)) for path in ("demo:artifacts", "~/a", None)
    ]
    assert folders == [model_path(ModelConfig(path="demo:artifacts")), Path("~/a").expanduser(), None]


def test_every_field_says_what_it_is() -> None:
    schema = TurnoutConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    silent = [
        f"{s['title']}.{n}" for s in sections for n, field in s["properties"].items() if "description" not in field
    ]
    assert silent == []


def test_the_prefix_store_is_embedded_unless_told_otherwise(values: dict[str, Any]) -> None:
    assert parse_config(values).kvstore.url == "embedded"
    assert not parse_config(values).kvstore.has_address
    named = parse_config({**values, "kvstore": {"url": "unix:///run/redis.sock", "root_key_file": "key"}})
    assert named.kvstore.has_address


@pytest.mark.parametrize(
    ("store", "field", "says"),
    [
        ({"url": "http://somewhere:SECRET@host"}, "kvstore.url", "redis://"),
        ({"url": "redis://:SECRET@host:6379"}, "kvstore.root_key_file", "openssl rand -hex 32"),
        ({"tls_cert_file": "cert.pem"}, "kvstore.tls_key_file", "tls_cert_file"),
        ({"codecs": []}, "kvstore.codecs", "at least 1"),
        ({"ttl_s": 0}, "kvstore.ttl_s", "greater than 0"),
        ({"quota_bytes": -1}, "kvstore.quota_bytes", "greater than or equal to 0"),
        ({"tenants": {"t": {"policy": "public"}}}, "kvstore.tenants.t.policy", "'private' or 'group'"),
        ({"tenants": {"t": {"policy": "group"}}}, "kvstore.tenants.t.group", "must be named"),
        ({"tenant": {}}, "kvstore.tenant", "unknown"),
    ],
)
def test_a_wrong_prefix_store_is_refused_without_showing_its_password(
    values: dict[str, Any], store: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(TurnoutError) as caught:
        parse_config({**values, "kvstore": store})
    assert caught.value.field == field
    assert says in caught.value.message
    assert "SECRET" not in caught.value.message
