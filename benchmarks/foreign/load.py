"""GuideLLM against a served endpoint: synthetic chats, streamed, several at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.foreign.program import run_module
from benchmarks.foreign.server_counts import Counts, counted_since, counters
from turnout.file_names import one_part

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one load: requests by outcome; times in milliseconds, their median and 95th percentile.

    Attributes:
        tool: what the tool counted of requests that succeeded.
        server: what the server's metrics rose by, whatever a request's outcome.
    """

    streams: int
    errored: int
    incomplete: int
    tool: Counts
    server: Counts
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    tokens_per_s: float

    def differences(self, model: str) -> list[str]:
        """What the tool and the server do not agree on, and requests that failed."""
        load, lost = f"GuideLLM, {model}, {self.streams} streams", self.errored + self.incomplete
        found = [f"{lost} requests failed"] if lost else []
        if self.tool != self.server:
            found.append(f"it counts {self.tool}, the server {self.server}")
        return [f"{load}: {each}" for each in found]


def measure(python: Path, folder: Path, url: str, model: str, tokenizer: Path, streams: int, requests: int) -> Figures:
    """One load; `folder` is left with the tool's own report."""
    report, before = folder / f"load-{one_part(model)}-{streams}.json", counters(url, model)
    backend = {"kind": "openai_http", "target": url, "model": model, "request_format": "/v1/chat/completions"}
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    run_module(
        python,
        folder,
        1,
        ["guidellm", "run", "--backend", json.dumps(backend), "--data", json.dumps(data),
         "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(tokenizer)}),
         "--profile", json.dumps({"kind": "concurrent", "streams": streams}),
         "--constraint", json.dumps({"kind": "max_requests", "count": requests}),
         "--output", json.dumps({"kind": "json", "path": str(report)}), "--disable-console"],
    )  # fmt: skip
    [benchmark] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]
    sums = {name: round(metrics[f"{name}_token_count"]["successful"]["total_sum"]) for name in ("prompt", "output")}
    tool = Counts(metrics["request_totals"]["successful"], **sums)
    return _figures(streams, metrics, tool, counted_since(url, model, before, tool))


def _figures(streams: int, metrics: dict[str, Any], tool: Counts, server: Counts) -> Figures:
    totals = metrics["request_totals"]

    def times(name: str) -> tuple[float, float]:
        figures = metrics[name]["successful"]
        return figures["median"], figures["percentiles"]["p95"]

    return Figures(
        streams,
        totals["errored"],
        totals["incomplete"],
        tool,
        server,
        times("time_to_first_token_ms"),
        times("inter_token_latency_ms"),
        metrics["output_tokens_per_second"]["successful"]["mean"],
    )
