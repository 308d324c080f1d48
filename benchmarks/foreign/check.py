"""lm-evaluation-harness, GuideLLM and `vllm bench serve` on a served pair; fails where they find a difference."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.foreign import harness, load, vllm_bench
from benchmarks.foreign.compare import Comparison
from benchmarks.foreign.page import GUIDELLM, LM_EVAL, TOOLS, VLLM, Found, page
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
VLLM_PYTHON = Path(".venv-vllm/bin/python")
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


def guidellm_loads(python: Path, folder: Path, url: str, pair: Pair, requests: int) -> list[tuple[str, load.Figures]]:
    """GuideLLM's figures of the large model and of the pair, by what it asked for."""
    found = []
    for model, streams in ((model, streams) for model in ("large", pair.pool) for streams in STREAMS):
        note(f"GuideLLM, {model}: {streams} streams")
        found.append((model, load.measure(python, folder, url, model, pair.folder("large"), streams, requests)))
    return found


def vllm_loads(python: Path, folder: Path, url: str, pair: Pair, requests: int) -> list[vllm_bench.Figures]:
    """Figures of `vllm bench serve` on the pair."""
    found = []
    for each in vllm_bench.LOADS:
        note(f"vllm bench serve, {each.backend}: {each}")
        found.append(vllm_bench.measure(python, folder, url, pair.pool, pair.folder("large"), each, requests))
    return found


def measure(options: argparse.Namespace) -> Report:
    """Run the tools against a server."""
    machine, pair, tools = describe(), open_pair(options.pair), set(options.tools)
    if tools != set(TOOLS):
        options.out = None
    pythons = {LM_EVAL: options.python, GUIDELLM: options.python, VLLM: options.vllm_python}
    if VLLM in tools and not options.vllm_python.exists():
        note(f"{VLLM} is left out: there is no {options.vllm_python}, which `make venv-vllm` makes")
        tools.remove(VLLM)
    pythons = {tool: python.absolute() for tool, python in pythons.items() if tool in tools}
    found = Found({tool: f"{tool} {version_of(python, tool)}" for tool, python in pythons.items()})
    config = served_config(pair)
    url = http_url(reachable(config.server.http_host), config.server.http_port)
    with tempfile.TemporaryDirectory(prefix="turnout-foreign-") as temporary, running_server(config):
        folder = Path(temporary)
        if LM_EVAL in tools:
            write_problems(folder / "problems.jsonl", options.problems)
            found.comparisons.extend(compare(pythons[LM_EVAL], folder, url, pair))
        if GUIDELLM in tools:
            found.loads.extend(guidellm_loads(pythons[GUIDELLM], folder, url, pair, options.requests))
        if VLLM in tools:
            found.vllm_loads.extend(vllm_loads(pythons[VLLM], folder, url, pair, options.requests))
    return page(machine, options.problems, found, pair, options.quick)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=None, takes_pair=True, problems=24, requests=16)
    made.add_argument("--python", type=Path, default=PYTHON, help="interpreter of the tools' environment")
    made.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, help="of vLLM's; left out where it is not there")
    made.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS, help="a page of some is shown and not saved")
    made.add_argument("--problems", type=int, default=300, help="of each task; absent: 300, 24 with --quick")
    made.add_argument("--requests", type=int, default=100, help="of each load; absent: 100, 16 with --quick")
    return made


if __name__ == "__main__":
    run(parser(), measure)
