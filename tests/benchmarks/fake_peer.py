"""A peer for a worker process: it counts instead of computing, and misbehaves when asked to."""

from __future__ import annotations

import os
import sys

from benchmarks.peers.base import Generation, Setup


class Engine:
    """Answers prompt p with p[0] + 1, p[0] + 2, ...; prompts that begin with 666 to 669 plant a fault each."""

    def missing(self) -> str | None:
        return None

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}

    def setup(self, setup: Setup) -> None:
        if setup.dtype != "float32":
            raise ValueError(f"no {setup.dtype} here")

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        first = prompts[0][0]
        if first == 666:
            raise RuntimeError("out of luck")
        if first == 667:
            max_tokens -= 1
        if first == 668:
            sys.stderr.write("the last words\n")
            os._exit(3)
        if first == 669:
            sys.stdout.write("a line an engine prints\n")
            os.write(1, b"and one from native code\n")
        length = 2 if stop_at_end else max_tokens
        return Generation(0.5, [[prompt[0] + 1 + i for i in range(length)] for prompt in prompts], 0.25)

    def close(self) -> None:
        pass
