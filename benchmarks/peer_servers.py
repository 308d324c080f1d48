"""The servers of llama.cpp and vLLM with the real model, each in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos.cluster import until
from turnout.free_ports import free_port

LLAMA, VLLM = "llama-cpp", "vllm"
DIALECTS = {LLAMA: "llama.cpp", VLLM: "vllm"}
MODEL = "smollm2"
SLOTS = 2  # requests that a server computes at once, unless it is said; more wait there
MAX_LENGTH = 1024  # prompt and answer
START_LIMIT_S = 600.0
# Requests that a server holds, by its own count.
RUNNING = {LLAMA: "llamacpp:requests_processing", VLLM: "vllm:num_requests_running"}
WAITING = {LLAMA: "llamacpp:requests_deferred", VLLM: "vllm:num_requests_waiting"}
OF_VLLM = (
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_NO_USAGE_STATS=1",
    "VLLM_LOGGING_LEVEL=ERROR",
    "HF_HUB_OFFLINE=1",
)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a server.

    Attributes:
        threads: that compute.
        slots: requests that it computes at once.
        dtype: of vLLM.
        compiled: whether vLLM compiles the model, as by default; this takes minutes.
    """

    threads: int = 1
    slots: int = SLOTS
    dtype: str = "float32"
    compiled: bool = False


class Neighbour:
    """One server, which can be killed and started again on the same port.

    Args:
        name: LLAMA or VLLM.
        python: interpreter of the environment that has it.
        model: the GGUF file, or the checkpoint's folder.
        log: file for what it prints.
        size: threads, requests at once, and vLLM's number format.
    """

    def __init__(self, name: str, python: Path, model: Path, log: Path, size: Size | None = None) -> None:
        self.name = name
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._size = size or Size()
        self._command = self._llama(python, model) if name == LLAMA else self._vllm(python, model)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def _llama(self, python: Path, model: Path) -> Sequence[str]:
        size, script = self._size, Path(__file__).parent / "peers" / "llama_cpp_server.py"
        given = [model, self.port, MODEL, size.slots, MAX_LENGTH, size.threads]
        return ["env", f"OMP_NUM_THREADS={size.threads}", str(python), str(script), *map(str, given)]

    def _vllm(self, python: Path, model: Path) -> Sequence[str]:
        size = self._size
        options = {
            "model": model,
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": size.dtype,
            "max-model-len": MAX_LENGTH,
            "max-num-seqs": size.slots,
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        program = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        compiled = [] if size.compiled else ["--enforce-eager"]
        return ["env", f"OMP_NUM_THREADS={size.threads}", *OF_VLLM, *program, *compiled, *given]

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is None:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )

    def wait(self) -> None:
        """Wait until it answers."""
        until(self._answers, f"{self.name} answers", START_LIMIT_S)

    def kill(self) -> None:
        """Kill all its processes, at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def held(self) -> dict[str, int]:
        """Requests that it computes, and those that wait for it to."""
        text = httpx.get(f"{self.address}/metrics", timeout=60).raise_for_status().text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        names = {"running": RUNNING[self.name], "waiting": WAITING[self.name]}
        return {kind: int(sum(each.value for each in samples if each.name == name)) for kind, name in names.items()}

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            text = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended: {text}")
        try:
            return httpx.get(f"{self.address}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False
