"""The queries of dashboards and alerts, and what they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "ops" / "grafana" / "dashboards").glob("*.json"))
ALERTS = ROOT / "ops" / "prometheus" / "alerts.yml"


def panels() -> list[tuple[str, str]]:
    """(dashboard and panel, query) of every query that a panel makes."""
    found = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            found += [(f"{board['title']}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def names_in(query: str) -> set[str]:
    """Metrics of ours in a query, without what a histogram or a counter puts behind their names."""
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"turnout_\w+", query)}
