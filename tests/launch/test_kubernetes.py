"""The manifests: what can be known of them without a Kubernetes cluster."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from actors.placement import bundles, check_hosts
from deployments import app as application
from deployments.deadline import BACKSTOP_S
from deployments.telemetry.catalogue import CONVENTIONS, QUEUED, SERVING
from tests.launch.test_cluster_files import exported
from turnout.config import parse_config

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
KUBERNETES = ROOT / "ops" / "kubernetes"
FOLDERS = ("rayservice", "servers")
KUBERNETES_VERSION = "1.34"
DOCKERFILE = (ROOT / "ops" / "docker" / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return sources("rayservice")


def sources(folder: str) -> dict[str, Any]:
    """What a folder's kustomization names under `resources`, by kind, as it stands there."""
    found = {}
    for name in read(folder, "kustomization.yaml")["resources"]:
        for each in yaml.safe_load_all((KUBERNETES / folder / name).read_text(encoding="utf-8")):
            found[each["kind"]] = each
    return found


def read(folder: str, name: str) -> Any:
    return yaml.safe_load((KUBERNETES / folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def serve(manifests: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(manifests["RayService"]["spec"]["serveConfigV2"])
    return values


@pytest.fixture(scope="module")
def config() -> Any:
    return parse_config(read("rayservice", "turnout.yaml"))


@pytest.fixture(scope="module")
def groups(manifests: dict[str, Any]) -> dict[str, Any]:
    cluster = manifests["RayService"]["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"], **{each["groupName"]: each for each in cluster["workerGroupSpecs"]}}


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return dict(only)


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return found[1]


def test_serve_accepts_its_part(serve: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(serve)
    assert schema.proxy_location == "EveryNode"
    with pytest.raises(ValidationError):
        ServeDeploySchema.model_validate(serve | {"grpc_options": {"port": "many"}})


def test_what_serve_imports_is_there(serve: dict[str, Any]) -> None:
    (served,) = serve["applications"]
    assert served["name"] == application.APP_NAME
    module, _, name = served["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is application.build
    assert serve["grpc_options"]["grpc_servicer_functions"] == [application.ADD_TO_SERVER]
    module, _, name = application.ADD_TO_SERVER.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_configuration_lies_where_the_application_looks_for_it(
    serve: dict[str, Any], groups: dict[str, Any]
) -> None:
    (served,) = serve["applications"]
    for group in groups.values():
        (mount,) = [each for each in container(group)["volumeMounts"] if each["name"] == "config"]
        assert served["args"]["config"] == f"{mount['mountPath']}/turnout.yaml"
        (volume,) = [each for each in group["template"]["spec"]["volumes"] if each["name"] == "config"]
        assert volume["configMap"]["name"] == "turnout-config"


def test_ports_and_times_agree(
    serve: dict[str, Any], config: Any, groups: dict[str, Any], manifests: dict[str, Any]
) -> None:
    ports = {"serve": config.server.http_port, "grpc": config.server.grpc_port}
    assert (serve["http_options"]["port"], serve["grpc_options"]["port"]) == tuple(ports.values())
    for group in groups.values():
        named = {each["name"]: each["containerPort"] for each in container(group)["ports"]}
        assert {name: named[name] for name in ports} == ports
        assert str(named["metrics"]) == group["rayStartParams"]["metrics-export-port"]
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > config.server.shutdown_grace_s + 15
    assert {each["targetPort"]: each["port"] for each in manifests["Service"]["spec"]["ports"]} == ports
    assert config.server.http_host == serve["http_options"]["host"] == "0.0.0.0"
    backstop = config.server.request_timeout_s + BACKSTOP_S
    assert serve["http_options"]["request_timeout_s"] == serve["grpc_options"]["request_timeout_s"] == backstop
    assert re.search(rf"^EXPOSE {config.server.http_port} {config.server.grpc_port}$", DOCKERFILE, re.MULTILINE)


def test_versions_agree(manifests: dict[str, Any], groups: dict[str, Any]) -> None:
    assert manifests["RayService"]["spec"]["rayClusterConfig"]["rayVersion"] == pinned("ray")
    assert {container(group)["image"] for group in groups.values()} == {"turnout"}
    for folder in FOLDERS:
        (image,) = read(folder, "kustomization.yaml")["images"]
        assert image == {"name": "turnout", "newName": "turnout", "newTag": PROJECT["version"]}
    assert f"-t turnout:{PROJECT['version']} ." in DOCKERFILE


def test_the_cluster_survives_its_head_and_lets_in_nobody_without_the_token(manifests: dict[str, Any]) -> None:
    cluster = manifests["RayService"]["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"]["backend"] == "rocksdb"
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_groups_can_host_what_is_served_on_them(config: Any, groups: dict[str, Any]) -> None:
    offers = []
    for name in ("draft", "target"):
        group, limits = groups[name], container(groups[name])["resources"]["limits"]
        custom = json.loads(json.loads(group["rayStartParams"]["resources"].strip("'")))
        offers.append({"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"]), **custom})
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["maxReplicas"] >= config.pools["assistant"].autoscaling.max_replicas
    for name, pool in config.pools.items():
        check_hosts(name, bundles(pool, config), offers)


def test_workers_are_probed_over_http_and_know_what_every_node_knows(groups: dict[str, Any]) -> None:
    for name, group in groups.items():
        assert {each["name"]: each["value"] for each in container(group)["env"]} == {
            key: value
            for key, value in exported().items()
            if key != "RAY_AUTH_MODE"  # the operator sets it
        }
        if name != "head":
            probe = container(group)["readinessProbe"]["httpGet"]
            assert probe == {"path": "/-/healthz", "port": "serve"}


def test_probes_leave_workers_the_time_to_wait_for_a_head(groups: dict[str, Any]) -> None:
    wait_s = float(exported()["RAY_gcs_rpc_server_reconnect_timeout_s"])
    for name in ("draft", "target"):
        probe = container(groups[name])["livenessProbe"]
        assert probe["exec"]["command"] == ["ray", "health-check"], "it fails as long as there is no head"
        assert probe["periodSeconds"] * probe["failureThreshold"] > wait_s + probe["timeoutSeconds"]


def test_a_servers_ports_times_and_configuration_agree() -> None:
    found, config = sources("servers"), parse_config(read("servers", "turnout.yaml"))
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (pod,) = spec["containers"]
    ports = {each["name"]: each["containerPort"] for each in pod["ports"]}
    assert ports == {"http": config.server.http_port, "grpc": config.server.grpc_port}
    assert {each["targetPort"]: each["port"] for each in found["Service"]["spec"]["ports"]} == ports
    assert config.server.http_host == "0.0.0.0"
    assert spec["terminationGracePeriodSeconds"] > config.server.shutdown_grace_s + 15
    assert found["HTTPRoute"]["spec"]["rules"][0]["timeouts"]["request"] == (
        f"{config.server.request_timeout_s + BACKSTOP_S:g}s"
    )
    (mount,) = [each["mountPath"] for each in pod["volumeMounts"] if each["name"] == "config"]
    assert pod["args"] == ["turnout", "serve", f"{mount}/turnout.yaml"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (1000, 100)
    assert all(pool.placement.models != "actors" for pool in config.pools.values()), "a pod has one GPU"


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("fault", [False, True])
def test_kubernetes_accepts_its_own_kinds(folder: str, fault: bool) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="a new one of the development tools: make venv")
    found = sources(folder)
    checked = [each for each in found.values() if each["apiVersion"] in ("v1", "apps/v1")]
    if folder == "rayservice":
        cluster = found["RayService"]["spec"]["rayClusterConfig"]
        templates = [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
        about = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        checked += [{**about, "template": template} for template in templates]
    assert len(checked) == (4 if folder == "rayservice" else 2)
    for each in checked:
        if fault:
            misspelt = json.loads(re.sub(r'"(containerPort|targetPort)"', r'"\1s"', json.dumps(each)))
            with pytest.raises(schemas.ValidationError):
                schemas.validate(misspelt, KUBERNETES_VERSION, strict=True)
        else:
            schemas.validate(each, KUBERNETES_VERSION, strict=True)


def test_gateway_and_scaler_find_the_servers_and_gauges_that_exist() -> None:
    found, config = sources("servers"), parse_config(read("servers", "turnout.yaml"))
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    pool = found["InferencePool"]["spec"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == pool["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert pool["targetPorts"] == [{"number": config.server.http_port}]
    (backend,) = found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == found["InferencePool"]["metadata"]["name"]
    scaler = found["ScaledObject"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    query = scaler["triggers"][0]["metadata"]["query"]
    names, model = re.findall(r'"([^"]+)"', query)
    assert [each.name for each in CONVENTIONS if re.fullmatch(names, each.name)] == [QUEUED.name, SERVING.name]
    assert model in config.pools


def kustomized(folder: Path) -> dict[str, Any]:
    built = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(built.stdout)}


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on PATH")


@needs_kubectl
@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_names_image_and_configuration_wherever_they_stand(folder: str) -> None:
    found = kustomized(KUBERNETES / folder)
    assert found.keys() == {*sources(folder), "ConfigMap"}
    made = found["ConfigMap"]
    assert made["data"]["turnout.yaml"] == (KUBERNETES / folder / "turnout.yaml").read_text(encoding="utf-8")
    pods = 3 if folder == "rayservice" else 1
    workload = json.dumps(found["RayService" if folder == "rayservice" else "Deployment"])
    assert workload.count(f'"image": "turnout:{PROJECT["version"]}"') == workload.count('"image":') == pods
    assert workload.count(f'"configMap": {{"name": "{made["metadata"]["name"]}"}}') == pods
    assert re.search(r"-\w{10}$", made["metadata"]["name"]), "a change of the content is a change of the name"


@needs_kubectl
def test_the_kustomization_in_the_docs_sets_image_and_configuration(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", page, re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(shown, encoding="utf-8")
    (tmp_path / "turnout.yaml").write_text("models: mine\n", encoding="utf-8")
    shutil.copytree(KUBERNETES, tmp_path / "turnout" / "ops" / "kubernetes")
    found = kustomized(tmp_path)
    name = found["ConfigMap"]["metadata"]["name"]
    assert found["ConfigMap"]["data"] == {"turnout.yaml": "models: mine\n"}
    service = json.dumps(found["RayService"])
    assert service.count(f'"configMap": {{"name": "{name}"}}') == 3
    assert service.count('"image": "registry.example.com/turnout:') == 3
