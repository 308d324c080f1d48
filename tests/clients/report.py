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
    by_case = [name for name in clients if any(name in passed for passed in cases.values())]
    others = [clients[name] for name in sorted(clients) if name not in by_case]
    if others:
        lines += ["Further clients, unmodified, whose tests passed: " + "; ".join(others) + ".", ""]
    if cases:
        versions = "; ".join(f"{name}: {clients[name]}" for name in by_case)
        lines += [f"## {len(cases)} cases", "", f"OpenAI's own clients, unmodified: {versions}.", ""]
        lines += [f"| case | {' | '.join(by_case)} |", "| --- |" + " --- |" * len(by_case)]
        for case, passed in cases.items():
            lines.append(
                f"| {case} | " + " | ".join("passes" if name in passed else "not run" for name in by_case) + " |"
            )
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
