"""Write the tables of methods, parts and papers into the pages that hold them; a test refuses a stale page.

A page marks the place of a table with `<!-- table: decoding.drafters -->`, and its end with `<!-- end -->`. Titles of
papers, and what a row says beyond the names of methods and parts, are in docs/papers.csv.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from cli.parts import fits
from deployments.extra_fields import UNSUPPORTED
from deployments.schemas import IGNORED_FIELDS, SAMPLING_FIELDS, ChatBody, CompletionBody
from scripts.docs_catalogue import cell
from turnout.config import POLICIES_PACKAGE
from turnout.registry import METHODS_PACKAGE, all_methods, load, names, slots
from turnout.types import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ROOT / "docs" / "papers.csv"
CODECS = "kvstore.codecs"
PACKAGES = (*(f"decoding.{slot}" for slot in slots()), POLICIES_PACKAGE)
BLOCK = re.compile(r"(<!-- table: ([\w.]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
NAMED = re.compile(r"\b[Pp]aper #(\d+)\b")


def pages() -> list[Path]:
    """Pages that hold generated tables."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


def render(page: Path) -> str:
    """A page with its tables written anew."""
    text = page.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: found[1] + "".join(table(found[2])) + found[3], text)


def table(source: str) -> Iterator[str]:
    """Lines of one table.

    Args:
        source: a package of methods or parts, `papers`, or `fields.taken`, `fields.ignored`, `fields.refused`.
    """
    if source.startswith("fields."):
        yield from _fields(source.removeprefix("fields."))
    elif source == "papers":
        yield "| number | paper | methods and parts |\n| --- | --- | --- |\n"
        yield from _papers()
    elif source == METHODS_PACKAGE:
        yield "| method | what it does | lossless | papers |\n| --- | --- | --- | --- |\n"
        for info in all_methods():
            lossless = "yes" if info.lossless else "no"
            yield f"| `{info.name}` | {cell(info.summary)} | {lossless} | {_numbers(info.papers)} |\n"
    else:
        yield "| name | what it is | fits | papers |\n| --- | --- | --- | --- |\n"
        for part in (load(source, name, "part").PART for name in names(source)):
            summary = (sys.modules[part.__module__].__doc__ or "").strip().split("\n")[0].rstrip(".")
            yield f"| `{part.name}` | {cell(summary)} | {fits(part)} | {_numbers(part.papers)} |\n"


def _fields(kind: str) -> Iterator[str]:
    """Rows of the fields of request bodies: those taken, ignored or refused."""
    if kind == "ignored":
        yield ", ".join(f"`{name}`" for name in sorted(IGNORED_FIELDS)) + "\n"
    elif kind == "refused":
        yield "| field | accepted | instead |\n| --- | --- | --- |\n"
        for name, known in sorted(UNSUPPORTED.items()):
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in known.neutral)
            yield f"| `{name}` | {neutral} | {cell(known.why)} |\n"
    else:
        yield "| field | chat | completions | what it is |\n| --- | --- | --- | --- |\n"
        bodies: list[tuple[type[BaseModel], frozenset[str]]] = [
            (ChatBody, SAMPLING_FIELDS - {"logprobs"}), (CompletionBody, SAMPLING_FIELDS),
        ]  # fmt: skip
        by_body = [{**{name: SamplingParams.model_fields[name] for name in names}, **body.model_fields}
                   for body, names in bodies]  # fmt: skip
        by_body[0]["max_completion_tokens"] = by_body[0]["max_tokens"]
        for name in sorted({*by_body[0], *by_body[1]}):
            here = ["yes" if name in fields else "" for fields in by_body]
            [info, *_] = [fields[name] for fields in by_body if name in fields]
            yield f"| `{name}` | {here[0]} | {here[1]} | {cell(info.description or 'as in the API of OpenAI')} |\n"


def _numbers(papers: tuple[int, ...]) -> str:
    return ", ".join(f"#{number}" for number in papers)


def _papers() -> Iterator[str]:
    """A row for every paper that a method, a part, a codec, a docstring or a note names."""
    users, files = _users(), _files()
    with PAPERS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            number = int(row["number"])
            uses = ", ".join(f"`{name}`" for name in sorted(users.pop(number, ())))
            places = files.pop(number, ())
            note = row["note"] or ("" if uses or not places else f"see `{min(places)}`")
            if uses or note:
                yield f"| #{number} | {cell(row['title'])} | {uses}{'; ' if uses and note else ''}{cell(note)} |\n"
    if users or files:
        raise ValueError(f"papers without a title in {PAPERS.name}: {sorted({*users, *files})}")


def _users() -> dict[int, set[str]]:
    """Names of methods, parts and codecs by the papers they implement."""
    found: dict[int, set[str]] = defaultdict(set)
    parts = [load(package, name, "part").PART for package in PACKAGES for name in names(package)]
    for used in (*all_methods(), *parts):
        for number in used.papers:
            found[number].add(used.name)
    for name in names(CODECS):
        for number in getattr(load(CODECS, name, "codec"), "PAPERS", ()):
            found[number].add(name)
    return found


def _files() -> dict[int, set[str]]:
    """Source files by the papers that their text names."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in ROOT.glob("*/**/*.py"):
        place = path.relative_to(ROOT)
        if not place.parts[0].startswith(".") and place.parts[0] not in ("tests", "scripts"):
            for number in NAMED.findall(path.read_text(encoding="utf-8")):
                found[int(number)].add(place.as_posix())
    return found


if __name__ == "__main__":
    for each in pages():
        each.write_text(render(each), encoding="utf-8")
        print(each.relative_to(ROOT))  # noqa: T201
