"""Hosts of model actors with one fault each; named in `ActorPool.load(..., host=...)`, so actors import them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

from actors.model_worker import ModelWorker
from actors.protocol import ModelCard

POISON = 126  # the token that ends the process which feeds it
DEADLY = f"{__name__}:PoisonedWorker"
STRANGE = f"{__name__}:StrangeWorker"
ALOOF = f"{__name__}:AloofWorker"


class PoisonedWorker(ModelWorker):
    """Its forwards end the process when they are fed `POISON`."""

    def begin(self, vocab_size: int) -> ModelCard:
        card = super().begin(vocab_size)
        runner = self.model.batcher.runner
        run = runner.run

        def deadly(feeds: Any) -> Any:
            if any(POISON in feed.tokens for feed in feeds):
                os.kill(os.getpid(), signal.SIGKILL)
            return run(feeds)

        runner.run = deadly  # type: ignore[method-assign]
        return card


class StrangeWorker(ModelWorker):
    """Says that it runs other code."""

    def load(self) -> ModelCard:
        return replace(super().load(), code="0123456789abcdef")


class AloofWorker(ModelWorker):
    """The large model's never joins a group."""

    def begin(self, vocab_size: int) -> ModelCard:
        if self.spec.name == "large":
            self.transport.join = self._wait  # type: ignore[method-assign]
        return super().begin(vocab_size)

    async def _wait(self, *_: object) -> None:
        await asyncio.Event().wait()
