"""Write the Grafana dashboards in ops/grafana/dashboards; a test refuses stale ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "ops" / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8  # three panels a row, in Grafana's units of 24 columns


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram.

    Attributes:
        title: with what is shown.
        unit: Grafana's name of it.
        queries: PromQL and legend.
        text: what it means.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def rate(metric: str, by: str) -> str:
    """Per second, summed by labels."""
    return f"sum by ({by}) (rate(turnout_{metric}_total[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "model") -> str:
    """Of a histogram."""
    return f"histogram_quantile({share}, sum by (le, {by}) (rate(turnout_{metric}_seconds_bucket[$__rate_interval])))"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Median and 95th percentile by model."""
    return (quantile(0.5, metric), "{{model}} p50"), (quantile(0.95, metric), "{{model}} p95")


def cost(meter: str) -> str:
    """Cost on a meter, divided by that of the large model alone."""
    spent, alone = (
        f'sum by (model) (rate(turnout_cost_{meter}_total{{way="{way}"}}[$__rate_interval]))'
        for way in ("spent", "large_only")
    )
    return f"{spent} / {alone}"


def share(part: str, whole: str, by: str) -> str:
    """Of one rate in another."""
    return f"{rate(part, by)} / {rate(whole, by)}"


RELATIVE = "Relative to the large model alone: below 1 is saved."

SERVICE = (
    Panel("Requests", "reqps", ((rate("requests", "model, outcome"), "{{model}} {{outcome}}"),)),
    Panel(
        "Goodput", "reqps",
        ((rate("good_requests", "model"), "{{model}}"),),
        "Answers within both goals of telemetry.slo.",
    ),
    Panel("Goals missed", "reqps", ((rate("slo_missed", "model, slo"), "{{model}} {{slo}}"),)),
    Panel("Time to first token", "s", quantiles("ttft")),
    Panel("Time per output token", "s", quantiles("tpot")),
    Panel("Time of the whole answer", "s", quantiles("request")),
    Panel("Time in the queue", "s", quantiles("queue")),
    Panel("Refusals", "reqps", ((rate("refusals", "code, field"), "{{code}} {{field}}"),)),
    Panel("Tokens of answers", "tokens/s", ((rate("completion_tokens", "model, method"), "{{model}} {{method}}"),)),
    Panel("Requests by tenant", "reqps", ((rate("tenant_requests", "tenant, outcome"), "{{tenant}} {{outcome}}"),)),
    Panel("Tokens by tenant", "tokens/s", ((rate("tenant_tokens", "tenant, kind"), "{{tenant}} {{kind}}"),)),
    Panel("Lines of batches", "short", (("sum by (state) (turnout_batch_lines)", "{{state}}"),)),
    Panel("In the ingress", "short", (
        ("turnout_ingress_requests", "{{state}}"), ("turnout_ingress_tasks", "tasks"),
    ), "Requests whose bodies come, that run, that are refused late; records to be written; and all tasks."),
)  # fmt: skip
BY_DRAFTER, DRAFTER = "method, drafter", "{{method}} {{drafter}}"
DRAFTING = rate("draft_seconds", BY_DRAFTER)
DECODING = (
    Panel("Tokens by model", "tokens/s", ((rate("generated_tokens", "model"), "{{model}}"),)),
    Panel(
        "Share of the large model", "percentunit",
        ((share("large_tokens", "completion_tokens", "model, method"), "{{model}} {{method}}"),),
    ),
    Panel("Work of the models", "tokens/s", ((rate("model_tokens", "model, kind"), "{{model}} {{kind}}"),)),
    Panel("Switches", "ops", ((rate("switches", "model, method"), "{{model}} {{method}}"),)),
    Panel("Drafts accepted", "percentunit", (
        (share("accepted_draft_tokens", "draft_tokens", BY_DRAFTER), DRAFTER),
    )),
    Panel(
        "Drafts accepted by tenant", "percentunit",
        ((share("accepted_draft_tokens", "draft_tokens", "tenant"), "{{tenant}}"),),
        "The first 32 tenants that drafted since the ingress began; other: the rest.",
    ),
    Panel(
        "Acceptance by position", "percentunit",
        ((share("accepted_depth_rounds", "draft_depth_rounds", f"{BY_DRAFTER}, depth"), f"{DRAFTER} {{{{depth}}}}"),),
        "Share of the verifications whose draft reached so deep that accepted so deep.",
    ),
    Panel("Tokens a round", "short", (
        (f"{rate('draft_round_tokens', BY_DRAFTER)} / {rate('draft_rounds', BY_DRAFTER)}", DRAFTER),
    )),
    Panel("Time in drafting", "percentunit", (
        (f"{DRAFTING} / ({DRAFTING} + {rate('verify_seconds', BY_DRAFTER)})", DRAFTER),
    )),
    Panel("Cost: the paper's", "percentunit", ((cost("paper_tokens"), "{{model}}"),), RELATIVE),
    Panel("Cost: FLOPs", "percentunit", ((cost("flops"), "{{model}}"),), RELATIVE),
    Panel("Cost: wall clock", "percentunit", ((cost("wall_seconds"), "{{model}}"),), RELATIVE),
    Panel(
        "Audits", "ops", ((rate("audits", "pool, result"), "{{pool}} {{result}}"),),
        "Lossless answers computed again by the large model alone. A mismatch is an alert.",
    ),
)  # fmt: skip
POOLS = (
    Panel("Pools that answer", "short", (("turnout_pool_up", "{{pool}}"),)),
    Panel("Replicas", "short", (
        ("turnout_pool_replicas", "{{pool}}"),
        ("turnout_pool_min_replicas", "{{pool}} least"),
        ("turnout_pool_max_replicas", "{{pool}} most"),
    )),
    Panel("Starts of replicas and restarts of models", "short", (
        ("sum by (pool) (increase(turnout_replica_starts_total[1h]))", "{{pool}} replicas"),
        ("sum by (pool, model) (increase(turnout_model_restarts_total[1h]))", "{{model}}"),
    )),
    Panel("Requests in progress", "short", (
        ("turnout_pool_requests", "{{pool}}"), ("turnout_pool_batch_requests", "{{pool}} batch"),
    )),
    Panel("Waiting operations", "short", (("turnout_pool_waiting_operations", "{{pool}}"),)),
    Panel("Waiting work, by forecast", "s", (("turnout_pool_waiting_seconds", "{{pool}}"),)),
    Panel("Cache in use", "percentunit", ((
        'sum by (pool, model) (turnout_kv_blocks{state="used"}) / sum by (pool, model) (turnout_kv_blocks)',
        "{{model}}",
    ),)),
    Panel("Blocks", "short", (("turnout_kv_blocks", "{{model}} {{state}}"),)),
    Panel("Sequences and waiting tokens", "short", (
        ("turnout_model_sequences", "{{model}} sequences"), ("turnout_model_waiting_tokens", "{{model}} tokens"),
    )),
    Panel("Decode step", "s", (("turnout_model_step_seconds", "{{model}}"),)),
    Panel("Prompts found in a cache", "percentunit", (
        (share("cached_tokens", "prompt_tokens", "model"), "{{model}}"),
    )),
    Panel("Cache hits by tier", "tokens/s", ((rate("cache_tokens", "pool, tier"), "{{pool}} {{tier}}"),)),
    Panel("Prefix store", "ops", (
        (rate("cache_lookups", "pool"), "{{pool}} look-ups"), (rate("cache_writes", "pool"), "{{pool}} writes"),
    )),
    Panel("Replicas without their prefix store", "short", (("turnout_cache_degraded", "{{pool}}"),)),
    Panel("Shadows", "short", (("turnout_shadows", "{{pool}}"),)),
)  # fmt: skip

ENDPOINTS = (
    Panel("Requests of endpoints", "reqps", ((rate("endpoint_requests", "model, outcome"), "{{model}} {{outcome}}"),)),
    Panel(
        "Time of a request", "s",
        ((f"{rate('endpoint_seconds', 'model')} / {rate('endpoint_requests', 'model')}", "{{model}}"),),
    ),
    Panel(
        "First event, of requests that answered", "s",
        ((f"{rate('endpoint_first_event_seconds', 'model')} / sum by (model) "
          '(rate(turnout_endpoint_requests_total{outcome="ok"}[$__rate_interval]))', "{{model}}"),),
    ),
    Panel(
        "Retries, and endpoints left alone", "cps",
        ((rate("endpoint_retries", "model"), "{{model}} retries"),
         (rate("endpoint_breaker_opened", "model"), "{{model}} left alone")),
    ),
    Panel("Breaker", "short", (("sum by (model, state) (turnout_endpoint_breaker)", "{{model}} {{state}}"),)),
    Panel(
        "Requests at an endpoint, and waiting", "short",
        (("sum by (model) (turnout_endpoint_running)", "{{model}} running"),
         ("sum by (model) (turnout_endpoint_waiting)", "{{model}} waiting")),
    ),
    Panel("US dollars by model", "currencyUSD", ((rate("model_usd", "model"), "{{model}}"),), "A second."),
    Panel("Cost: US dollars", "percentunit", ((cost("usd"), "{{model}}"),), RELATIVE),
)  # fmt: skip

DASHBOARDS = {
    "service.json": ("Turnout: service", "turnout-service", SERVICE),
    "decoding.json": ("Turnout: decoding", "turnout-decoding", DECODING),
    "pools.json": ("Turnout: pools", "turnout-pools", POOLS),
    "endpoints.json": ("Turnout: endpoints", "turnout-endpoints", ENDPOINTS),
}


def render(title: str, uid: str, panels: tuple[Panel, ...]) -> str:
    """A dashboard's file."""
    variable = {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}
    board = {
        "title": title,
        "uid": uid,
        "tags": ["turnout"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [variable]},
        "panels": [_panel(place, panel) for place, panel in enumerate(panels)],
    }
    return json.dumps(board, indent=1) + "\n"


def _panel(place: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": WIDTH * (place % 3), "y": HEIGHT * (place // 3), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    """Rewrite the files."""
    for name, (title, uid, panels) in DASHBOARDS.items():
        (FOLDER / name).write_text(render(title, uid, panels), encoding="utf-8")


if __name__ == "__main__":
    main()
