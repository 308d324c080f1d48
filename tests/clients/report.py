"""Writes what the clients did, as docs/results/clients.md shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEAD = """\
# Clients

What foreign clients and fuzzers made of a served application: the demo pair in float32 behind Ray Serve, with tenants.
Written by `make test-clients PYTEST_ARGS="--clients-report docs/results/clients.md"` when everything passed.
"""


def write_report(path: Path, report: dict[str, Any]) -> None:
    """One page: figures of the fuzzers and tools, then every case with every client."""
    lines = [HEAD]
    figures = report.get("figures", {})
    if figures:
        lines += ["| what | result |", "| --- | --- |"]
        lines += [f"| {name} | {figures[name]} |" for name in sorted(figures)] + [""]
    clients, cases = report.get("clients", {}), report.get("cases", {})
    if cases:
        names = list(clients)
        lines += [f"## {len(cases)} cases", "", "OpenAI's own clients, unmodified: " +
                  "; ".join(f"{name}: {clients[name]}" for name in names) + ".", ""]  # fmt: skip
        lines += [f"| case | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
        for case, passed in cases.items():
            lines.append(
                f"| {case} | " + " | ".join("passes" if name in passed else "not run" for name in names) + " |"
            )
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
