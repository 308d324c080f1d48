"""Engine settings for throughput, in a process without interactive requests."""

from __future__ import annotations

import os

from turnout.config import EngineConfig

# Prompts need no small chunks: no concurrent answer has to stay smooth.
UNHURRIED = {"max_slowdown": 1e9, "short_step_s": 60.0, "token_budget": 2048}


def unhurried(engine: EngineConfig, beside: int = 1) -> EngineConfig:
    """Settings by which no step is bound for the sake of smoothness; what the configuration says itself stays.

    Args:
        engine: as configured.
        beside: processes that share the machine, each of which gets its part of the cores: threads of several forwards
            that wait for each other on the same core cost about half of the speed.
    """
    settings: dict[str, float] = dict(UNHURRIED)
    if beside > 1:
        settings["threads"] = max((os.cpu_count() or 1) // beside, 1)
    return engine.model_copy(
        update={name: value for name, value in settings.items() if name not in engine.model_fields_set}
    )
