"""Requests answered with several models: validation, text, structures, routing, audits, migration. No Ray here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from turnout.config import TurnoutConfig, load_config

if TYPE_CHECKING:
    from pool.local_pool import LocalPool

__all__ = ["load"]


def load(config: TurnoutConfig | Path | str | None = None, pool: str | None = None) -> LocalPool:
    """Load a pool into this process, without any server.

    Args:
        config: a configuration or its file; None is the shipped demo pair.
        pool: which pool of it; None is the first.

    Raises:
        TurnoutError: the configuration, a checkpoint or the pool's name is refused.
    """
    from pool.local_pool import LocalPool  # torch and transformers are loaded only now

    if config is None:
        config = TurnoutConfig.demo()
    elif not isinstance(config, TurnoutConfig):
        config = load_config(Path(config))
    return LocalPool.load(pool or next(iter(config.pools)), config)
