"""GuideLLM against a served endpoint: synthetic chats, streamed, several at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.foreign.program import run_module
from turnout.file_names import one_part

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one load: requests by outcome; times in milliseconds, their median and 95th percentile."""

    streams: int
    successful: int
    errored: int
    incomplete: int
    output_tokens: int
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    tokens_per_s: float


def measure(python: Path, folder: Path, url: str, model: str, tokenizer: Path, streams: int, requests: int) -> Figures:
    """One load; `folder` is left with the tool's own report."""
    report = folder / f"load-{one_part(model)}-{streams}.json"
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
    return _figures(streams, benchmark["metrics"])


def _figures(streams: int, metrics: dict[str, Any]) -> Figures:
    totals = metrics["request_totals"]

    def times(name: str) -> tuple[float, float]:
        figures = metrics[name]["successful"]
        return figures["median"], figures["percentiles"]["p95"]

    return Figures(
        streams,
        totals["successful"],
        totals["errored"],
        totals["incomplete"],
        round(metrics["output_token_count"]["successful"]["total_sum"]),
        times("time_to_first_token_ms"),
        times("inter_token_latency_ms"),
        metrics["output_tokens_per_second"]["successful"]["mean"],
    )
