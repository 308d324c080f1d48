"""Engine settings for throughput, in a process without interactive requests."""

from __future__ import annotations

import os

from turnout.config import EngineConfig

# Prompts need no small chunks: no concurrent answer has to stay smooth.
THROUGHPUT = {"max_slowdown": 1e9, "short_step_s": 60.0, "token_budget": 2048}


def throughput_settings(engine: EngineConfig, num_processes: int = 1) -> EngineConfig:
    """Lift the bounds on steps that keep answers smooth; fields that the configuration sets stay as they are.

    Args:
        engine: as configured.
        num_processes: processes that share the machine, each of which gets its part of the cores: threads of several
            forwards that wait for each other on the same core cost about half of the speed.
    """
    settings: dict[str, float] = dict(THROUGHPUT)
    if num_processes > 1:
        settings["threads"] = max((os.cpu_count() or 1) // num_processes, 1)
    return engine.model_copy(
        update={name: value for name, value in settings.items() if name not in engine.model_fields_set}
    )
