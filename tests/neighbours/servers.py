"""llama.cpp's and vLLM's own servers with the real model, each in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos.cluster import until
from turnout.free_ports import free_port

LLAMA, VLLM = "llama-cpp", "vllm"
DIALECTS = {LLAMA: "llama.cpp", VLLM: "vllm"}
MODEL = "smollm2"
SLOTS = 2  # requests that a server computes at once; more wait there
MAX_LENGTH = 1024
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


class Neighbour:
    """One server, which can be killed and started again on the same port.

    Args:
        name: LLAMA or VLLM.
        python: interpreter of the environment that has it.
        model: the GGUF file, or the checkpoint's folder.
        log: file for what it prints.
    """

    def __init__(self, name: str, python: Path, model: Path, log: Path) -> None:
        self.name = name
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._command = self._llama(python, model) if name == LLAMA else self._vllm(python, model)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def _llama(self, python: Path, model: Path) -> Sequence[str]:
        script = Path(__file__).with_name("llama_cpp_server.py")
        return ["env", "OMP_NUM_THREADS=1", str(python), str(script), str(model), str(self.port), MODEL, str(SLOTS)]

    def _vllm(self, python: Path, model: Path) -> Sequence[str]:
        options = {
            "model": model,
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "max-model-len": MAX_LENGTH,
            "max-num-seqs": SLOTS,
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        program = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        return ["env", "OMP_NUM_THREADS=1", *OF_VLLM, *program, *given]

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
