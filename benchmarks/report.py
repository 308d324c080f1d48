"""Showing results to whoever ran the benchmark, and saving them."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from turnout.standard_streams import replace_unencodable


def show(markdown: str) -> None:
    """Print a result page; tables are drawn where the terminal allows it."""
    replace_unencodable()
    console = Console()
    if console.is_terminal:
        console.print(Markdown(markdown))
    else:
        console.out(markdown)


def publish(markdown: str, out: Path | None, values: object = None) -> None:
    """Save a result page, and what it was made from beside it as JSON, and show it.

    Args:
        markdown: the page.
        out: where it goes, whatever the suffix; None: nowhere.
        values: for the JSON file; None: there is none.
    """
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".md").write_text(markdown, encoding="utf-8")
        if values is not None:
            out.with_suffix(".json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    show(markdown)


def note(text: str) -> None:
    """Say on stderr what a long run is at."""
    replace_unencodable()
    Console(stderr=True, highlight=False).print(text, style="dim")
