"""Configuration that the chaos run serves: the demo pair in float32, each model in an actor, on a node of its own."""

from __future__ import annotations

from typing import Any


def demo_config() -> dict[str, Any]:
    """A served configuration as plain values, without ports."""
    return {
        "models": {
            "demo-small": {"path": "demo:small", "dtype": "float32", "kv_memory_bytes": 64 << 20},
            "demo-large": {"path": "demo:large", "dtype": "float32", "kv_memory_bytes": 256 << 20},
        },
        "pools": {
            "demo": {
                "small": "demo-small",
                "large": "demo-large",
                "placement": {
                    "models": "actors",
                    "cpus": 0.5,
                    "resources": {"small": {"draft": 1}, "large": {"target": 1}},
                    # Processes are killed here on purpose: no limit on restarts may end the run.
                    "max_restarts": 100,
                },
            }
        },
        "engine": {"threads": 1},
        "server": {"request_timeout_s": 300, "shutdown_grace_s": 2},
        "kvstore": {"url": "off"},
    }
