"""`vllm bench serve` against a served endpoint: random prompts, and its counts next to the server's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.foreign.program import run_tool
from benchmarks.foreign.server_counts import Counts, counted_since, counters
from turnout.file_names import one_part

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
# What the command calls. Built for CPUs, vLLM has another name, under which the command itself does not find it.
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Load:
    """One way of asking.

    Attributes:
        backend: of the tool.
        streams: requests at a time; None: as many as come.
        rate: requests a second, at random times; None: at once.
    """

    backend: str
    streams: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.streams} at a time" if self.streams else f"{self.rate:g} a second"


LOADS = tuple(Load(backend, *how) for backend in PATHS for how in ((1, None), (8, None), (None, 4.0)))


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one load.

    Attributes:
        load: how it asked.
        model: what it asked for.
        asked: requests, and tokens that all of their answers have together.
        failed: requests, as the tool counted.
        lengths: of the answers, by the tool; tokens.
        tool: what the tool counted.
        server: what the server's metrics rose by, whatever a request's outcome.
        ttft_ms: median and 95th percentile.
        itl_ms: the same, of the gaps between pieces.
        tokens_per_s: of all answers together.
    """

    load: Load
    model: str
    asked: tuple[int, int]
    failed: int
    lengths: tuple[int, ...]
    tool: Counts
    server: Counts
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    tokens_per_s: float

    @property
    def differences(self) -> list[str]:
        """What the tool and the server do not agree on, or what is not as it was asked for."""
        load = f"vllm bench serve, {self.model} by {PATHS[self.load.backend]}, {self.load}"
        wanted = [OUTPUT_TOKENS] * self.asked[0]
        found = [f"{self.failed} requests failed"] if self.failed else []
        if self.tool != self.server:
            found.append(f"it counts {self.tool}, the server {self.server}")
        if (self.tool.requests, self.tool.output) != self.asked or sorted(self.lengths) != wanted:
            found.append(f"{self.asked[0]} answers of {OUTPUT_TOKENS} tokens were asked for, it got {self.lengths}")
        return [f"{load}: {each}" for each in found]


def measure(python: Path, folder: Path, url: str, model: str, tokenizer: Path, load: Load, requests: int) -> Figures:
    """One load; `folder` is left with the tool's own report.

    Raises:
        RuntimeError: the tool failed.
    """
    report = folder / f"vllm-{one_part(model)}-{load.backend}-{load.streams}-{load.rate}.json"
    how = ["--max-concurrency", str(load.streams)] if load.streams else ["--request-rate", str(load.rate)]
    before = counters(url, model)
    run_tool(
        python,
        folder,
        1,
        "vllm_bench_serve",
        ["-c", PROGRAM, "--backend", load.backend, "--base-url", url, "--endpoint", PATHS[load.backend],
         "--model", model, "--tokenizer", str(tokenizer), "--dataset-name", "random", "--num-prompts", str(requests),
         "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos",
         "--temperature", "0", "--ready-check-timeout-sec", "0", "--metric-percentiles", "95", "--disable-tqdm",
         "--save-result", "--save-detailed", "--result-dir", str(report.parent), "--result-filename", report.name,
         *how],
    )  # fmt: skip
    result = json.loads(report.read_text(encoding="utf-8"))
    tool = Counts(result["completed"], result["total_input_tokens"], result["total_output_tokens"])
    return Figures(
        load,
        model,
        (requests, requests * OUTPUT_TOKENS),
        result["failed"],
        tuple(result["output_lens"]),
        tool,
        counted_since(url, model, before, tool),
        (result["median_ttft_ms"], result["p95_ttft_ms"]),
        (result["median_itl_ms"], result["p95_itl_ms"]),
        result["output_throughput"],
    )
