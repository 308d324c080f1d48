"""lm-evaluation-harness and GuideLLM against `turnout serve` with the demo pair; fails where they find a difference."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.foreign import harness, load
from benchmarks.foreign.compare import Comparison
from benchmarks.foreign.page import page
from benchmarks.foreign.problems import write_problems
from benchmarks.foreign.program import version_of
from benchmarks.harness import Report, command_line, note, run
from benchmarks.served import on_free_ports, running_server
from experiments.machine import describe
from turnout.addresses import http_url, reachable
from turnout.config import ModelConfig, TurnoutConfig, model_path, parse_config

PYTHON = Path(".venv-foreign/bin/python")
RESULT = Path("docs/results/lm_eval.md")
THREADS = 2
STREAMS = (1, 8)
PAIR = "demo"


def demo_config() -> TurnoutConfig:
    """The pair in float32, as the harness loads it: in bfloat16 the shape of a batch can change a token."""
    return on_free_ports(
        parse_config(
            {
                "models": {
                    "small": {"path": "demo:small", "dtype": "float32", "kv_memory_bytes": 64 << 20},
                    "large": {"path": "demo:large", "dtype": "float32", "kv_memory_bytes": 256 << 20},
                },
                "pools": {PAIR: {"small": "small", "large": "large", "default": {"name": "speculative"}}},
                "server": {"request_timeout_s": 120},
            }
        )
    )


def compare(python: Path, folder: Path, url: str) -> list[Comparison]:
    """Compare each model alone, and the pair, with the evaluation harness's own backend."""
    found = []
    for name in ("small", "large"):
        checkpoint = model_path(ModelConfig(path=f"demo:{name}")).resolve()
        note(f"{name}: the harness's own backend")
        reference = harness.evaluate(python, folder, harness.hugging_face(checkpoint), THREADS)
        for served_as in (name, PAIR) if name == "large" else (name,):
            for backend in (harness.completions(url, served_as, checkpoint), harness.chat(url, served_as)):
                note(f"{served_as}: {backend.name}")
                served = harness.evaluate(python, folder, backend, 1)
                found += [
                    Comparison(task, served_as, backend.name, reference[task], outcome)
                    for task, outcome in served.items()
                ]
    return found


def measure(options: argparse.Namespace) -> Report:
    """Run both tools against a server."""
    python, machine, config = options.python.absolute(), describe(), demo_config()
    url = http_url(reachable(config.server.http_host), config.server.http_port)
    with tempfile.TemporaryDirectory(prefix="turnout-foreign-") as temporary, running_server(config):
        folder = Path(temporary)
        write_problems(folder / "problems.jsonl", options.problems)
        comparisons = compare(python, folder, url)
        tokenizer = model_path(ModelConfig(path="demo:large")).resolve()
        loads = []
        for model, streams in ((model, streams) for model in ("large", PAIR) for streams in STREAMS):
            note(f"{model}: {streams} streams")
            loads.append((model, load.measure(python, folder, url, model, tokenizer, streams, options.requests)))
    versions = {name: f"{name} {version_of(python, name)}" for name in ("lm-eval", "guidellm")}
    return page(machine, versions, options.problems, comparisons, loads)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=None, problems=24, requests=16)
    made.add_argument("--python", type=Path, default=PYTHON, help="interpreter of the tools' environment")
    made.add_argument("--problems", type=int, default=300, help="of each task; absent: 300, 24 with --quick")
    made.add_argument("--requests", type=int, default=100, help="of each load; absent: 100, 16 with --quick")
    return made


if __name__ == "__main__":
    run(parser(), measure)
