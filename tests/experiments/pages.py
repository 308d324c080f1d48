"""Looking at pages without a browser."""

from __future__ import annotations

from html.parser import HTMLParser


class _Tags(HTMLParser):
    VOID = frozenset({"meta", "input", "line", "rect", "circle", "polyline", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def unclosed(page: str) -> list[str]:
    """Elements of a page that are opened and not closed; one that is closed in another's place fails the test."""
    tags = _Tags()
    tags.feed(page)
    return tags.open
