"""Finding methods: one module per name in a package, imported only when asked for.

A slot (whole programs, drafters, verifiers, ...) is a package; a method is a module in it whose file name is
the method's name. Nothing lists them twice.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnout.errors import FieldError, TurnoutError, invalid, not_found

METHODS_PACKAGE = "decoding.methods"
ALONE = "plain"  # the method by which one model answers alone: what a request for a member is answered with
M = TypeVar("M", bound=BaseModel)

IS_ROLE = object()  # marks a parameter that names a role
# A parameter that names the role of a model: any that the pool fills.
ModelRole = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64, examples=["large", "small"]), IS_ROLE]


class MethodParams(BaseModel):
    """Base of every method's parameters: unknown names are refused, values are immutable.

    Attributes:
        example: values with which a method has something to do on small random models, for conformance tests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    example: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def over(cls, defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Parameters given for a request over a pool's, neither validated yet.

        Parameters that exclude each other leave out those of the pool's that would contradict the request.
        """
        return {**defaults, **given}

    def untimed(self) -> Self:
        """Return parameters of which nothing left open is chosen by measured times: for who acts where segments end."""
        return self

    def check_parts(self, models: Any) -> None:
        """Refuse a pool that the chosen parts cannot work with, say for want of a file, before the first request.

        Args:
            models: the pool, with its artifacts.

        Raises:
            TurnoutError: as the first request would be refused.
        """

    @property
    def beyond_text(self) -> str:
        """Name of a parameter whose value needs more of a model than texts and log-probabilities; "": none does."""
        return ""


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A registered method.

    Attributes:
        name: its name everywhere: module, command line, APIs, reports.
        run: `async def run(request, models, params) -> AsyncIterator[Segment]`.
        params: the pydantic model of its parameters.
        papers: numbers, as in docs/papers.md, of the papers it implements.
        lossless: whether its output law is exactly the target model's, unless parameters with a property `lossless`
            say that it is not.
        needs: roles ("small", "large", "judge", ...) the pool must fill; parameters with a property `needs` add theirs.
        resumable: whether an answer may be gone on with from its first tokens: the next one depends only on the tokens
            so far, the seed and the position, unless parameters with a property `resumable` say that it does not.
        joint: whether one run writes all `n` answers of a request (`Request.answers`), and says of each segment which
            answer it belongs to; otherwise each answer is a run of its own.
        across_vocabularies: whether it can use models whose tokens are not the large one's, but for the roles that its
            parameters name; it then refuses parts of its own that cannot.
        over_text: whether it needs no more of a model than texts and log-probabilities, so that models may be
            endpoints: `pool.endpoints.methods` has it over texts.
        contrasts: whether all it writes comes from `extend`, `decode` and `verify` of the model that answers, so that
            the request's contrast holds in it (`decoding.contrasted_model`).
        drafts: whether it judges tokens before those that they follow are written, or chooses them by a search: logits
            processors whose rows depend on more than tokens (`prefix_pure`) are refused.
        draws: whether it draws tokens itself, from raw logits: logits processors that read more than these are refused.
    """

    name: str
    run: Callable[..., AsyncIterator[Any]]
    params: type[MethodParams]
    papers: tuple[int, ...]
    lossless: bool
    needs: frozenset[str]
    resumable: bool = False
    joint: bool = False
    across_vocabularies: bool = False
    over_text: bool = False
    contrasts: bool = False
    drafts: bool = False
    draws: bool = False

    @property
    def summary(self) -> str:
        """First line of the method's docstring."""
        return (self.run.__doc__ or "").strip().split("\n")[0]

    def keeps_law(self, params: MethodParams) -> bool:
        """Whether the output law is the target model's with these parameters."""
        return bool(self.lossless and getattr(params, "lossless", True))

    def continues(self, params: MethodParams, greedy: bool) -> bool:
        """Whether tokens written elsewhere with the same seed can be gone on with, to the same answer.

        A method that keeps the law of the model leaves a greedy request no choice: its tokens are the model's own.
        A joint method must declare it: where one of its answers ends may depend on the others.
        """
        resumable = bool(self.resumable and getattr(params, "resumable", True))
        return resumable or (greedy and not self.joint and self.keeps_law(params))

    def parse(self, values: dict[str, Any], field: str = "method.params") -> MethodParams:
        """Validate parameters.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the parameter and what is allowed.
        """
        try:
            return self.params.model_validate(values)
        except ValidationError as error:
            raise explain(error, field, self.params) from None

    def check_vocabularies(self, params: MethodParams, foreign: Mapping[str, str], field: str = "method") -> None:
        """Refuse a pool in which a model that the method asks has other tokens than the large one.

        Args:
            params: the method's.
            foreign: the models with other tokens, by role.
            field: the field that chose the method; its parameters are in `field.params`.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the field and the model.
        """
        needed = frozenset[str]() if self.across_vocabularies else self.needs | getattr(params, "needs", frozenset())
        asked = dict.fromkeys(needed, field)
        for each, info in type(params).model_fields.items():
            if IS_ROLE in info.metadata:
                asked.setdefault(getattr(params, each), f"{field}.params.{each}")
        for role in sorted(asked.keys() & foreign):
            raise invalid(
                asked[role],
                f"{self.name!r} needs one vocabulary, and that of {foreign[role]!r} ({role}) is not the large model's;"
                " across vocabularies, `speculative` drafts by text_chain or shared_vocabulary",
            )

    def check_text(
        self,
        params: MethodParams,
        endpoints: Mapping[str, str],
        name: str = "method",
        field: str = "method.params",
    ) -> None:
        """Refuse a pool with endpoints where the method needs the tokens of its models, or what is behind them.

        Args:
            params: the method's.
            endpoints: models that are endpoints, by role.
            name: the field that chose the method.
            field: the field that holds the parameters.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the field and a model.
        """
        if not endpoints:
            return
        role, model = next(iter(endpoints.items()))
        why = f"needs the tokens of its models, and {model!r} ({role}) is an endpoint"
        if not self.over_text:
            known = ", ".join(info.name for info in all_methods() if info.over_text)
            raise invalid(name, f"{self.name!r} {why}; over endpoints: {known}")
        if params.beyond_text:
            raise invalid(f"{field}.{params.beyond_text}", f"this value {why}")

    def check_roles(
        self, params: MethodParams, roles: Collection[str], name: str = "method", field: str = "method.params"
    ) -> None:
        """Refuse a pool without a model for a role that the method, or one of its parameters, names.

        Args:
            params: the method's.
            roles: that the pool fills.
            name: the field that chose the method.
            field: the field that holds the parameters.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the field and the pool's roles.
        """
        filled = f"the pool's roles: {', '.join(sorted(roles))}"
        for role in sorted(self.needs | getattr(params, "needs", frozenset())):
            if role not in roles:
                raise invalid(name, f"{self.name!r} needs a model with the role {role!r}; {filled}")
        for each, info in type(params).model_fields.items():
            if IS_ROLE in info.metadata and getattr(params, each) not in roles:
                *rest, last = sorted(map(repr, roles))
                allowed = f"{', '.join(rest)} or {last}" if rest else last
                message = f"must be {allowed}: the pool's roles (got {getattr(params, each)!r})"
                raise invalid(f"{field}.{each}", message)


def method(
    *,
    params: type[MethodParams],
    papers: tuple[int, ...] = (),
    lossless: bool,
    needs: frozenset[str],
    resumable: bool = False,
    joint: bool = False,
    across_vocabularies: bool = False,
    over_text: bool = False,
    contrasts: bool = False,
    drafts: bool = False,
    draws: bool = False,
) -> Callable[[Callable[..., AsyncIterator[Any]]], MethodInfo]:
    """Register the decorated async generator as the method named after its module."""

    def register(run: Callable[..., AsyncIterator[Any]]) -> MethodInfo:
        name = run.__module__.rpartition(".")[2]
        traits = (lossless, needs, resumable, joint, across_vocabularies, over_text, contrasts, drafts, draws)
        return MethodInfo(name, run, params, papers, *traits)

    return register


def names(package: str) -> list[str]:
    """Names of a slot's modules, sorted: files of its package, and what installed packages add to it.

    Private modules and `base` are no parts. An installed package adds a module with an entry point in the group
    `turnout.SLOT`, where SLOT is the last part of `package`: `turnout.methods`, `turnout.drafters`, ...
    """
    folders = tuple(importlib.import_module(package).__path__)
    listed, added = _listed(folders, tuple(map(_changed, folders))), added_modules(package)
    return sorted({*listed, *added}) if added else list(listed)


@cache
def added_modules(package: str) -> dict[str, EntryPoint]:
    """Entry points that add modules to a slot, by the name of the part; read once in a process."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"turnout.{package.rpartition('.')[2]}"):
        if entry.value.rpartition(".")[2] != entry.name or entry.name.startswith("_"):
            raise invalid(
                f"entry point {entry.group}: {entry.name} = {entry.value}",
                "must name a module whose last part is the name of the entry point",
            )
        if entry.name in found and found[entry.name].value != entry.value:
            raise invalid(f"entry point {entry.group}: {entry.name}", "is defined by two installed packages")
        found[entry.name] = entry
    return found


def slots() -> list[str]:
    """Names of the packages of `decoding` whose modules are parts; `methods` is left out."""
    folders = importlib.import_module(METHODS_PACKAGE.partition(".")[0]).__path__
    found = sorted(each.name for each in pkgutil.iter_modules(folders) if each.ispkg)
    return [slot for slot in found if _holds_parts(f"decoding.{slot}")]


def _holds_parts(package: str) -> bool:
    found = names(package)
    return bool(found) and hasattr(load(package, found[0], "part"), "PART")


def _changed(folder: str) -> int:
    """When a file of a folder came or went last, ns; 0 for what is no folder, as an archive."""
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116 (asked ten times a request: a path object is half of the cost)
    except OSError:
        return 0


@cache
def _listed(folders: tuple[str, ...], changed: tuple[int, ...]) -> tuple[str, ...]:
    """What `names` finds in folders that changed last at these times: every request asks, several times."""
    found = (module.name for module in pkgutil.iter_modules(folders))
    return tuple(sorted(name for name in found if not name.startswith("_") and name != "base"))


def load(package: str, name: str, field: str) -> ModuleType:
    """Import one module of a slot.

    Raises:
        TurnoutError: NOT_FOUND, listing what exists; INVALID_ARGUMENT: two modules have the name.
    """
    known = names(package)
    if name not in known:
        raise not_found(field, name, known)
    added = added_modules(package).get(name)
    if added is None:
        return importlib.import_module(f"{package}.{name}")
    if find_spec(f"{package}.{name}") is not None:
        raise invalid(field, f"{name!r} is both {package}.{name} and {added.value} of an installed package")
    return importlib.import_module(added.value)


@cache
def get_method(name: str, field: str = "method") -> MethodInfo:
    """The method of that name; `field` is where the caller gave it.

    Raises:
        TurnoutError: NOT_FOUND, listing the methods that exist.
    """
    module = load(METHODS_PACKAGE, name, field)
    found = [value for value in vars(module).values() if isinstance(value, MethodInfo) and value.name == name]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must define exactly one @method, found {len(found)}")
    return found[0]


def all_methods() -> list[MethodInfo]:
    """Every method, by name."""
    return [get_method(name) for name in names(METHODS_PACKAGE)]


def explain(error: ValidationError, prefix: str, model: type[BaseModel]) -> TurnoutError:
    """Turn the first fault pydantic found into a refusal that names the field and what is allowed."""
    fault = error.errors(include_url=False)[0]
    said = fault.get("ctx", {}).get("error")
    place = (*fault["loc"], said.field) if isinstance(said, FieldError) else fault["loc"]
    where = ".".join(str(part) for part in place)
    field = f"{prefix}.{where}" if prefix and where else (where or prefix)
    if fault["type"] == "extra_forbidden":
        owner = _model_at(model, fault["loc"][:-1])
        known = ", ".join(sorted(owner.model_fields)) if owner is not None else ""
        return invalid(field, f"unknown; allowed here: {known or 'nothing'}")
    if isinstance(said, FieldError):
        return invalid(field, said.message)
    shown = repr(fault.get("input"))
    given = f" (got {shown})" if len(shown) <= 80 and fault["type"] != "missing" else ""
    return invalid(field, f"{fault['msg'][:1].lower()}{fault['msg'][1:]}{given}")


def validated(model: type[M], values: Mapping[str, Any], prefix: str) -> M:
    """Values as a model.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field (after `prefix`) and what is allowed.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error, prefix, model) from None


def _model_at(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model whose fields stand at `path` below `model`: field names, keys of mappings, indices of lists."""
    here: Any = model
    for part in path:
        owner = _as_model(here)
        if owner is not None:
            info = owner.model_fields.get(str(part))
            here = info.annotation if info is not None else None
        else:  # a key or an index: what a mapping or a list holds is its last argument that holds anything
            here = next((arg for arg in reversed(get_args(here)) if arg not in (Ellipsis, NoneType)), None)
    return _as_model(here)


def _as_model(annotation: Any) -> type[BaseModel] | None:
    """The model an annotation allows: itself, or the one behind `Annotated` and `| None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return next((found for found in map(_as_model, get_args(annotation)) if found is not None), None)
    return None
