"""The engine's settings for a process that serves nobody."""

from __future__ import annotations

from turnout.config import EngineConfig

# Prompts need not be read in small pieces so that answers beside them stay smooth.
UNHURRIED = {"max_slowdown": 1e9, "short_step_s": 60.0, "token_budget": 2048}


def unhurried(engine: EngineConfig) -> EngineConfig:
    """Settings by which no step is bound for the sake of smoothness; what the configuration says itself stays."""
    return engine.model_copy(
        update={name: value for name, value in UNHURRIED.items() if name not in engine.model_fields_set}
    )
