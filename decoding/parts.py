"""Parts of a method that a request chooses by name: drafters, length policies, verifiers, selectors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from turnout.registry import METHODS_PACKAGE, MethodParams, get_method, load, names

if TYPE_CHECKING:
    from decoding.length_heads import Head
    from decoding.model import ModelPool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that an untrained head must fit.

    Attributes:
        width: of its hidden states.
        vocab_size: rows of its output matrix.
        layers: how many it has.
    """

    width: int
    vocab_size: int
    layers: int


@dataclass(frozen=True, slots=True)
class Example:
    """Parameters and an untrained artifact with which a part runs on any models: what conformance tests give it.

    Attributes:
        params: with which it has something to do on a small vocabulary.
        kind: of the artifact; "": it needs none.
        head: the artifact's network; its weights are drawn by who saves it.
        settings: what else the artifact says.
        roles: of the models that the artifact belongs to.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    head: Head | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ("large",)


class Part:
    """Base of every part: a class whose module assigns it to `PART`; the module's name is the part's.

    Made for each request anew, with validated parameters; what must outlive a request belongs into `Stores`.

    Attributes:
        Params: its parameters.
        papers: numbers, as in docs/papers.md, of the papers it implements.
        name: its module's name.
        where: which field of the request chose it, for refusals.
    """

    Params: ClassVar[type[MethodParams]] = MethodParams
    papers: ClassVar[tuple[int, ...]] = ()
    name: ClassVar[str]
    where: str = "method.params"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__module__.rpartition(".")[2]

    def __init__(self, params: Any = None) -> None:
        self.params = params if params is not None else self.Params()

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """Make what the part needs to run on a model of that shape; a part with an artifact must say what is in it."""
        return Example()

    @classmethod
    def summary(cls) -> str:
        """Return what it is, in a sentence: the first line of its module."""
        return (sys.modules[cls.__module__].__doc__ or "").strip().split("\n")[0]

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """JSON schema of its parameters."""
        return cls.Params.model_json_schema()

    def check(self, models: ModelPool) -> None:
        """Refuse models it cannot work with, before the first token.

        Raises:
            TurnoutError: FAILED_PRECONDITION or INVALID_ARGUMENT, saying what is missing.
        """


def with_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """A method's JSON schema, with `x-parts`: by slot, then by name, the schemas of what a field may choose.

    A field says its slot in `x-slot`: the package in `decoding` whose modules are what it chooses from.
    """
    found = part_schemas(slots_in(schema))
    return {**schema, "x-parts": found} if found else schema


def part_schemas(slots: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By slot, then by name, the JSON schemas of parts; of slots that their fields choose from too."""
    wanted, found = set(slots), dict[str, dict[str, Any]]()
    while wanted:
        slot = wanted.pop()
        package = f"decoding.{slot}"
        found[slot] = {name: _schema_of(package, name) for name in names(package)}
        wanted |= slots_in(found[slot]) - set(found)
    return found


def slots_in(value: Any) -> set[str]:
    """The slots that fields of a JSON schema choose from."""
    if isinstance(value, list):
        return set[str]().union(*map(slots_in, value))
    if not isinstance(value, dict):
        return set()
    own = {value["x-slot"]} if isinstance(value.get("x-slot"), str) else set()
    return own.union(*map(slots_in, value.values()))


def _schema_of(package: str, name: str) -> dict[str, Any]:
    if package == METHODS_PACKAGE:
        return get_method(name).params.model_json_schema()
    part: type[Part] = load(package, name, "part").PART
    return part.schema()
