"""Write the table of metrics in docs/observability.md from the catalogue; a test refuses a stale page."""

from __future__ import annotations

from pathlib import Path

from deployments.telemetry.catalogue import table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "observability.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"


def render(page: str) -> str:
    """The page with the table as it is to be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
