"""The pages of the documentation that list methods and parts, written from the registries when the site is built."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cli.methods import bounds, type_name
from cli.parts import fits
from turnout.config import POLICIES_PACKAGE
from turnout.registry import METHODS_PACKAGE, MethodParams, all_methods, load, names, slots


@dataclass(frozen=True, slots=True)
class Slot:
    """A package whose modules can be chosen by name, and how its page is called.

    Attributes:
        package: where its modules are.
        title: heading of its page.
        about: what its modules decide; Markdown.
    """

    package: str
    title: str
    about: str

    @property
    def page(self) -> str:
        """Its page in the site."""
        return f"catalogue/{self.package.rpartition('.')[2]}.md"


@dataclass(frozen=True, slots=True)
class Entry:
    """One method or part, as a page shows it.

    Attributes:
        facts: (what, how it is), each a line of its section.
        text: what its docstring says beyond the summary.
    """

    name: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    text: str
    params: type[MethodParams]


@cache
def catalogue_slots() -> tuple[Slot, ...]:
    """Methods, every slot of `decoding/` and routing policies: each title and subject from its package's docstring."""
    return tuple(map(_slot, (METHODS_PACKAGE, *(f"decoding.{slot}" for slot in slots()), POLICIES_PACKAGE)))


def _slot(package: str) -> Slot:
    doc = (importlib.import_module(package).__doc__ or "").strip().split("\n")[0]
    title, _, about = doc.removesuffix(" One file each.").partition(": ")
    return Slot(package, title, about[:1].upper() + about[1:])


def pages() -> dict[str, str]:
    """Markdown by page."""
    return {slot.page: "".join(_page(slot)) for slot in catalogue_slots()}


def entries(slot: Slot) -> list[Entry]:
    """What a slot's package holds, by name."""
    if slot.package == METHODS_PACKAGE:
        return [_method(info) for info in all_methods()]
    return [_part(load(slot.package, name, "part").PART) for name in names(slot.package)]


def _method(info: Any) -> Entry:
    needs = " and ".join(sorted(info.needs, reverse=True)) or "one"
    conditional = hasattr(info.params, "lossless")  # a property of parameters that can break the law
    facts = [
        ("Lossless", ("with parameters that keep the law" if conditional else "yes") if info.lossless else "no"),
        ("Needs", f"{needs} model" + "s" * (len(info.needs) > 1)),
        ("Papers", _papers(info.papers)),
    ]
    return Entry(info.name, info.summary, tuple(facts), _rest(info.run.__doc__), info.params)


def _part(part: Any) -> Entry:
    module = sys.modules[part.__module__]
    doc = inspect.cleandoc(part.__doc__ or "")
    facts = [("Fits", fits(part)), ("Runs on", str(getattr(part, "runs_on", ""))), ("Papers", _papers(part.papers))]
    summary = (module.__doc__ or "").strip().split("\n")[0]
    return Entry(part.name, summary, tuple(fact for fact in facts if fact[1]), doc, part.Params)


def _papers(papers: tuple[int, ...]) -> str:
    return ", ".join(f"[#{number}](../papers.md)" for number in papers)


def _rest(doc: str | None) -> str:
    return inspect.cleandoc(doc or "").partition("\n")[2].strip()


def _page(slot: Slot) -> Iterator[str]:
    found = entries(slot)
    yield f"# {slot.title}\n\n{slot.about}\n\n"
    folder = slot.package.replace(".", "/")
    yield f"Written from the registry when this site was built: a file put into `{folder}/` stands here without more "
    yield "([adding a method](../adding_a_method.md)).\n\n"
    yield "| name | what it is |\n| --- | --- |\n"
    yield from (f"| [`{entry.name}`](#{entry.name}) | {cell(entry.summary)} |\n" for entry in found)
    for entry in found:
        yield f"\n## `{entry.name}` {{ #{entry.name} }}\n\n{entry.summary}\n\n"
        yield from (f"- {what}: {how}\n" for what, how in entry.facts if how)
        yield f"\n{entry.text}\n\n" if entry.text else "\n"
        yield parameters(entry.params.model_json_schema())


def parameters(schema: dict[str, Any]) -> str:
    """A table of a JSON schema's fields, with what each allows and its default."""
    fields = schema.get("properties", {})
    if not fields:
        return "It has no parameters.\n"
    required = schema.get("required", [])
    lines = ["| parameter | type | allowed | default | meaning |\n", "| --- | --- | --- | --- | --- |\n"]
    for name, field in fields.items():
        default = "required" if name in required else _default(field)
        meaning = cell(field.get("description", "")) + _choice(field)
        cells = (f"`{name}`", type_name(field, schema), allowed(field, schema), default, meaning)
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "absent" if value is None else f"`{cell(str(value))}`"


def allowed(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a field allows beyond its type, for a cell; a pattern stands as code: its brackets are no links."""
    return re.sub(r"(?<=matches )\S+?(?=,? |$)", r"`\g<0>`", cell(bounds(field, schema)))


def _choice(field: dict[str, Any]) -> str:
    """Where a field chooses a part, the page that lists them."""
    slot = next((each for each in catalogue_slots() if each.package == f"decoding.{field.get('x-slot')}"), None)
    return f" ([which]({slot.page.rpartition('/')[2]}))" if slot is not None else ""


def cell(text: str) -> str:
    """Text that does not end its cell."""
    return text.replace("|", "\\|").replace("\n", " ")
