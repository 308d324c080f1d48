"""Our engine with settings for throughput: whole prompts in a step, however long that makes it."""

from __future__ import annotations

from benchmarks.peers import turnout_engine


class Engine(turnout_engine.Engine):
    """The default keeps steps short, so that answers flow evenly; a batch is done sooner in long ones."""

    ENGINE = turnout_engine.Engine.ENGINE | {"token_budget": 8192}
