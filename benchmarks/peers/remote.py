"""A peer in another process, seen from the benchmark."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.base import Generation, Setup
from experiments.process_cpu import cpu_seconds
from experiments.process_memory import tree

ROOT = Path(__file__).resolve().parent.parent.parent
CALL_LIMIT_S = 900.0


class PeerError(Exception):
    """A peer could not do what it was asked; the message is fit for a report."""


class RemotePeer:
    """Client of one peer in a worker process; calls block until it has answered.

    Args:
        module: holds the peer, as a class `Engine`.
        python: interpreter of the environment the peer is installed in.
        threads: of the peer's numerical libraries.
        root: tree whose code the worker runs.
    """

    def __init__(self, module: str, python: Path, threads: int, root: Path = ROOT) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the worker runs)
        # The environment is set for the worker alone: OpenMP reads it before any Python runs.
        command = ["env", f"OMP_NUM_THREADS={threads}", str(python), "-m", "benchmarks.peers.worker", module]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=root,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def missing(self) -> str | None:
        """What the worker's environment lacks; None when the peer can run."""
        answer: str | None = self._call("missing")
        return answer

    def versions(self) -> dict[str, str]:
        """See `Peer.versions`."""
        answer: dict[str, str] = self._call("versions")
        return answer

    def setup(self, setup: Setup) -> None:
        """See `Peer.setup`."""
        # Optional fields as they are by default are left out: a worker of an older tree may not know them.
        optional = {each.name: each.default for each in fields(Setup) if each.default is not MISSING}
        given = {name: value for name, value in asdict(setup).items() if optional.get(name, MISSING) != value}
        self._call("setup", **given)

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """See `Peer.generate`.

        Raises:
            PeerError: the peer failed, or answered with another number of tokens than it was asked for.
        """
        answer = self._call("generate", prompts=prompts, max_tokens=max_tokens, stop_at_end=stop_at_end)
        generation = Generation(**answer)
        lengths = {len(tokens) for tokens in generation.answers}
        allowed = set(range(1, max_tokens + 1)) if stop_at_end else {max_tokens}
        if len(generation.answers) != len(prompts) or not lengths <= allowed:
            raise PeerError(f"{len(generation.answers)} answers of {sorted(lengths)} tokens, asked for {max_tokens}")
        return generation

    def cpu_seconds(self) -> float:
        """CPU time the worker and what it started have used so far."""
        return cpu_seconds(tree(self.pid))

    def close(self) -> None:
        """End the worker."""
        try:
            if self._process.poll() is None:
                self._call("close")
                self._process.wait(timeout=30)
        except (PeerError, subprocess.TimeoutExpired):
            pass  # it is ended below
        finally:
            # The group, not only the worker: an engine may have forked helpers, which would stay behind.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            with suppress(BrokenPipeError):  # closing writes out what a dead worker never read
                self._stdin.close()
            self._stdout.close()
            self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, **args: Any) -> Any:
        try:
            self._stdin.write(json.dumps({"call": name, "args": args}) + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        # One line answers one request, so nothing is ever left in the reader's buffer between calls.
        if not select.select([self._stdout], [], [], CALL_LIMIT_S)[0]:
            self._process.kill()
            raise PeerError(f"no answer to {name} in {CALL_LIMIT_S:g} s")
        line = self._stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply["result"]

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return f"its process ended with status {status}: {lines[-1] if lines else 'no message'}"
