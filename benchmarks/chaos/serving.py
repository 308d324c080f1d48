"""Configuration that the chaos run serves: a pair in float32, each model in an actor, on a node of its own."""

from __future__ import annotations

from typing import Any

from experiments.pairs import DEMO, open_pair


def float32_config(pair: str = DEMO) -> dict[str, Any]:
    """A served configuration as plain values, without ports."""
    found = open_pair(pair)
    small, large = found.members
    models = found.in_dtype("float32").model_dump(mode="json", include={"models"}, exclude_unset=True)["models"]
    return {
        "models": {name: models[name] for name in found.members},
        "pools": {
            found.pool: {
                "small": small,
                "large": large,
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
