"""Hook of mkdocs: adds the pages that are written at build time, and turns links between files into ones of the site.

The README is the site's first page; runbooks stay in `ops`, next to the alerts, and are shown too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts import docs_catalogue, docs_http, docs_reference

ROOT = Path(__file__).resolve().parent.parent
RUNBOOKS = ROOT / "ops" / "runbooks"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def shown() -> dict[str, str]:
    """Page of the site by file of the repository, for files outside of docs/."""
    runbooks = {path.relative_to(ROOT).as_posix(): f"runbooks/{path.name}" for path in sorted(RUNBOOKS.glob("*.md"))}
    return {"README.md": "index.md", **runbooks}


def generated() -> dict[str, str]:
    """Markdown by page, for pages that are no file of the repository."""
    return {**docs_catalogue.pages(), **docs_reference.pages(), **docs_http.pages()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the page of every public module under Reference."""
    reference = next(group["Reference"] for group in config.nav or [] if "Reference" in group)
    reference.append({"Python": sorted(docs_reference.python_pages())})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for source, page in shown().items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page, text in generated().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; others are only named."""
    return relinked(markdown, page.file.src_uri, frozenset(files.src_uris))


def relinked(markdown: str, here: str, known: frozenset[str]) -> str:
    """A page's text with its links as the site needs them.

    Args:
        here: the page.
        known: pages and pictures of the site.
    """
    pages = shown()
    source = next((name for name, shown_as in pages.items() if shown_as == here), f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        mark, text, target, anchor = (group or "" for group in found.groups())
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) if target else source
        inside = pages.get(place, place.removeprefix("docs/") if place.startswith("docs/") else "")
        if inside in known:
            return f"{mark}[{text}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{anchor})"
        if (ROOT / place).exists():
            return text if text.startswith("`") else f"`{text}`"
        return found[0]  # a file that does not exist: mkdocs says so

    parts = FENCE.split(markdown)
    fences = [*FENCE.findall(markdown), ""]
    return "".join(LINK.sub(link, part) + fence for part, fence in zip(parts, fences, strict=True))
