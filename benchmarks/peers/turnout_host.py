"""Our engine around layers that cost nothing: its times are processor time of its host part alone."""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.host_clock import Clock, FreeLayers
from benchmarks.peers import turnout_engine
from benchmarks.peers.base import Generation, Setup


class Engine(turnout_engine.Engine):
    """See `turnout_engine.Engine`; `Generation.seconds` is the whole process's processor time."""

    def setup(self, setup: Setup) -> None:
        """Load the models, and replace their layers."""
        super().setup(setup)
        for model in self._pool.engines.values():
            plan = model.batcher.runner.plan
            plan.stack = FreeLayers(plan.stack, Clock(), plan.width, seconds=0.0)

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """All prompts as concurrent requests."""
        before = time.process_time()
        made = super().generate(prompts, max_tokens, stop_at_end)
        return replace(made, seconds=time.process_time() - before)
