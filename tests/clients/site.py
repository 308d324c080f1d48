"""What the clients of this folder meet: the demo pair behind Ray Serve, tenants with keys, pools that misbehave."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deployments.access.keys import make_key
from deployments.access.tenants_file import Tenant, Tenants, write_tenants
from deployments.metrics import INGRESS_STATES
from deployments.pool_deployment import Pool, load_engine
from kvstore.keys import write_root_key
from tests.deployments.fake_pool import FakePool
from turnout.access_config import TenantLimits
from turnout.calls import Event, GenerateCall
from turnout.config import TurnoutConfig, parse_config
from turnout.errors import Code, TurnoutError
from turnout.free_ports import free_port

CLIENTS = ("python", "node")
# Requests without a key are this tenant's.
EVERYBODY = "everybody"
FEW_TASKS = 24  # that come and go: of Serve, of the batches, of the question itself
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "<|{{ message['role'] if message['role'] in ('system', 'assistant') else 'user' }}|>{{ message['content'] }}"
    "{% for call in message.get('tool_calls', ()) %}{{ call | tojson }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class GonePool(FakePool):
    """Says of every request that nobody is there to answer it."""

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        if call is not None:
            raise TurnoutError(Code.UNAVAILABLE, "pool 'gone' has no replica", retry_after_s=2.0)
        yield


def load_pool(name: str, config: TurnoutConfig) -> Pool:
    """`demo` is real, and `tools` with another chat template; `slow` is slow, or never ends; `gone` cannot be asked."""
    if name in ("demo", "tools"):
        return load_engine(name, config)
    return GonePool(name, config) if name == "gone" else FakePool(name, config)


def tenants() -> dict[str, dict[str, Any]]:
    """Limits by tenant; those that a client uses up are there once for each client."""
    found: dict[str, dict[str, Any]] = {
        EVERYBODY: {"operator": True},
        "acme": {},
        "narrow": {"pools": ["demo"]},
    }
    for client in CLIENTS:
        found[f"once-{client}"] = {"requests_per_minute": 1}
        found[f"poor-{client}"] = {"budget": {"amount": 1}}
    return found


def with_tools(folder: Path, name: str) -> str:
    """A copy of a demo model whose chat template has a place for tools and for what they answer."""
    made = folder / f"{name}-with-tools"
    shutil.copytree(str(files("turnout").joinpath("demo", name)), made)
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(made)


def make_config(folder: Path, keys: dict[str, str]) -> TurnoutConfig:
    """The configuration; writes the tenants file, and fills `keys` by tenant."""
    made = {}
    for name, limits in tenants().items():
        keys[name], record = make_key()
        made[name] = Tenant(limits=TenantLimits.model_validate(limits), keys=(record,))
    write_tenants(folder / "tenants.yaml", Tenants(tenants=made))
    write_root_key(folder / "root.key")
    fake = {"small": "fake-small", "large": "fake-large"}
    return parse_config(
        {
            "models": {
                "small": {"path": "demo:small", "dtype": "float32", "kv_memory_bytes": 16 << 20},
                "large": {"path": "demo:large", "dtype": "float32", "kv_memory_bytes": 128 << 20},
                "tools-small": {"path": with_tools(folder, "small"), "dtype": "float32", "kv_memory_bytes": 16 << 20},
                "tools-large": {"path": with_tools(folder, "large"), "dtype": "float32", "kv_memory_bytes": 128 << 20},
                "fake-small": {"path": "none"},
                "fake-large": {"path": "none"},
            },
            "pools": {
                "demo": {"small": "small", "large": "large"},
                "tools": {"small": "tools-small", "large": "tools-large"},
                "slow": fake,
                "gone": fake,
            },
            "server": {
                "grpc_port": free_port(),
                "http_port": free_port(),
                "request_timeout_s": 60,
                "shutdown_grace_s": 1,
            },
            "access": {
                "tenants_file": str(folder / "tenants.yaml"),
                "anonymous": EVERYBODY,
                "usage": {"folder": str(folder / "usage"), "sync": "never"},
            },
            "batches": {"folder": str(folder / "batches")},
            "responses": {"folder": str(folder / "responses"), "root_key_file": str(folder / "root.key")},
            "ray": {"num_cpus": 8},
        }
    )


@dataclass
class Site:
    """A served application and the keys to it."""

    url: str
    grpc_address: str
    config: TurnoutConfig
    keys: dict[str, str]
    report: dict[str, Any] = field(default_factory=dict)
    tasks_at_rest: int = 0

    def held(self) -> dict[str, tuple[int, int, int]]:
        """By pool: requests, batch requests and used blocks of all replicas."""
        answer = httpx.get(f"{self.url}/status", timeout=30).json()
        assert answer["errors"] == {}
        return {
            name: tuple(sum(each[key] for each in stats) for key in ("requests", "batch_requests", "used_blocks"))
            for name, stats in answer["pools"].items()
        }

    def in_ingress(self) -> dict[str, int]:
        """What the ingress holds of requests, by state, and its tasks beyond those it had at rest and a few."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        held = {each.labels["state"]: int(each.value) for each in samples if each.name == "turnout_ingress_requests"}
        assert set(held) == set(INGRESS_STATES)
        [tasks] = [int(each.value) for each in samples if each.name == "turnout_ingress_tasks"]
        self.tasks_at_rest = self.tasks_at_rest or tasks
        return {**held, "tasks": max(tasks - self.tasks_at_rest - FEW_TASKS, 0)}

    def assert_idle(self, timeout_s: float = 20.0) -> None:
        """Nothing is left in any pool, nor in the ingress, and the server says that it is well."""
        until = time.monotonic() + timeout_s
        while any(any(held) for held in self.held().values()) or any(self.in_ingress().values()):
            assert time.monotonic() < until, (self.held(), self.in_ingress())
            time.sleep(0.05)
        assert httpx.get(f"{self.url}/healthz", timeout=30).json() == {"status": "ok"}
