"""Write the tables of metrics in docs/observability.md from the catalogue; a test refuses a stale page."""

from __future__ import annotations

from pathlib import Path

from deployments.telemetry.catalogue import ALL, GATEWAY, GEN_AI, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "observability.md"
TABLES = {"metrics": ALL, "gen_ai metrics": GEN_AI, "gateway metrics": GATEWAY}


def render(page: str) -> str:
    """The page with the tables as they are to be."""
    for name, metrics in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table(metrics)}\n{end}{after}"
    return page


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
