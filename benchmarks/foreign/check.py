"""lm-evaluation-harness and GuideLLM against `turnout serve` with a pair; fails where they find a difference."""

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
from benchmarks.served import running_server
from experiments.machine import describe
from experiments.pairs import Pair, open_pair
from turnout.addresses import http_url, reachable
from turnout.config import TurnoutConfig, parse_config
from turnout.free_ports import on_free_ports

PYTHON = Path(".venv-foreign/bin/python")
RESULT = Path("docs/results/lm_eval.md")
THREADS = 2
STREAMS = (1, 8)
ROLES = ("small", "large")


def served_config(pair: Pair) -> TurnoutConfig:
    """A pair in float32, as the harness loads it: in bfloat16 the shape of a batch can change a token."""
    return on_free_ports(
        parse_config(
            {
                "models": {
                    role: pair.model(role).model_dump(exclude_unset=True) | {"dtype": "float32"} for role in ROLES
                },
                "pools": {pair.pool: {"small": "small", "large": "large", "default": {"name": "speculative"}}},
                "server": {"request_timeout_s": 120},
            }
        )
    )


def compare(python: Path, folder: Path, url: str, pair: Pair) -> list[Comparison]:
    """Compare each model alone, and the pair, with the evaluation harness's own backend."""
    found = []
    for name in ROLES:
        checkpoint = pair.folder(name)
        note(f"{name}: the harness's own backend")
        reference = harness.evaluate(python, folder, harness.hugging_face(checkpoint), THREADS)
        for served_as in (name, pair.pool) if name == "large" else (name,):
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
    python, machine, pair = options.python.absolute(), describe(), open_pair(options.pair)
    config = served_config(pair)
    url = http_url(reachable(config.server.http_host), config.server.http_port)
    with tempfile.TemporaryDirectory(prefix="turnout-foreign-") as temporary, running_server(config):
        folder = Path(temporary)
        write_problems(folder / "problems.jsonl", options.problems)
        comparisons = compare(python, folder, url, pair)
        tokenizer = pair.folder("large")
        loads = []
        for model, streams in ((model, streams) for model in ("large", pair.pool) for streams in STREAMS):
            note(f"{model}: {streams} streams")
            loads.append((model, load.measure(python, folder, url, model, tokenizer, streams, options.requests)))
    versions = {name: f"{name} {version_of(python, name)}" for name in ("lm-eval", "guidellm")}
    return page(machine, versions, options.problems, comparisons, loads, pair)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=None, takes_pair=True, problems=24, requests=16)
    made.add_argument("--python", type=Path, default=PYTHON, help="interpreter of the tools' environment")
    made.add_argument("--problems", type=int, default=300, help="of each task; absent: 300, 24 with --quick")
    made.add_argument("--requests", type=int, default=100, help="of each load; absent: 100, 16 with --quick")
    return made


if __name__ == "__main__":
    run(parser(), measure)
