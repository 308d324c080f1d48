"""Showing results to whoever ran the benchmark."""

from __future__ import annotations

from rich.console import Console
from rich.markdown import Markdown


def show(markdown: str) -> None:
    """Print a result page; tables are drawn where the terminal allows it."""
    console = Console()
    if console.is_terminal:
        console.print(Markdown(markdown))
    else:
        console.out(markdown)


def note(text: str) -> None:
    """Say on stderr what a long run is at."""
    Console(stderr=True, highlight=False).print(text, style="dim")
