"""Code that a cell runs: the digest of the modules it reaches, so that a method added next to it changes nothing."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from router.base import policy_class
from turnout.config import POLICIES_PACKAGE
from turnout.registry import METHODS_PACKAGE, get_method
from turnout.sources import ROOT, SUFFIXES

PACKAGES = ("turnout", "decoding", "engine", "kvstore", "pool", "router", "training", "experiments")
# What every cell runs, whatever it asks; all modules these import belong to it.
CORE = ("pool.local_pool", "experiments.grid.answering", "experiments.grid.loads")
# Not reached by imports, and yet they decide numbers.
COMPILED = "engine/backends/native"
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Module:
    """A file of code: its digest, the modules it imports, and the words it holds, among which are names of parts."""

    digest: str
    imports: frozenset[str]
    words: frozenset[str]


@cache
def modules(root: Path = ROOT) -> dict[str, Module]:
    """Every module of the packages that cells are made of, as its file is now, by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = _module(path.read_bytes())
    return found


@cache
def _module(source: bytes) -> Module:
    """Parse a file, once per content: two folders of the same code have most files in common."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # being edited: its import will say so
        tree = ast.Module([], [])
    words, imports = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and len(node.value) <= LONGEST_NAME:
                words.add(node.value)
        elif isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imports.add(node.module)
            imports.update(f"{node.module}.{alias.name}" for alias in node.names)
    return Module(hashlib.blake2b(source, digest_size=16).hexdigest(), frozenset(imports), frozenset(words))


def reached(starts: Iterable[str], known: dict[str, Module]) -> set[str]:
    """Modules that these import, and those import, and so on; and parts that parts of them name."""
    slots = _parts(known)
    waiting, found = [name for name in starts if name in known], set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        module = known[name]
        waiting += [each for each in module.imports if each in known]
        if name in slots:
            waiting += [each for each in slots if each.rpartition(".")[2] in module.words]
    return found


def _parts(known: dict[str, Module]) -> set[str]:
    """Modules that are found by their name: methods, drafters, verifiers and all other slots of `decoding`."""
    return {
        name
        for name in known
        if name.count(".") == 2
        and name.startswith("decoding.")
        and not name.rpartition(".")[2].startswith("_")
        and name.rpartition(".")[2] != "base"
    }


def named(method: str, params: dict[str, Any], known: dict[str, Module], policy: str = "") -> set[str]:
    """The module of the method or the policy, and those of parts that its parameters name, absent ones included.

    A policy names methods in its own code too, and may lead to other policies, which are named like parts.
    """
    words = set(_given(method, params, policy))
    mine = {f"{METHODS_PACKAGE}.{method}"}
    if policy:
        mine = {f"{POLICIES_PACKAGE}.{policy}", *_policies(words, known)}
        words = words.union(*(known[module].words for module in mine))
    return mine | {name for name in _parts(known) if name.rpartition(".")[2] in words}


def _policies(words: Iterable[str], known: dict[str, Module]) -> set[str]:
    return {module for word in words if (module := f"{POLICIES_PACKAGE}.{word}") in known}


def _given(method: str, params: dict[str, Any], policy: str) -> Iterator[str]:
    """Words in all parameters, absent ones included."""
    parsed = (
        policy_class(policy, "policy").parse_params(params, "params") if policy else get_method(method).parse(params)
    )
    return _words(parsed.model_dump(mode="json"))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _words(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _words(each)
    elif isinstance(value, str):
        yield value


def code_digest(method: str, params: dict[str, Any], scorer: str, policy: str = "", root: Path = ROOT) -> str:
    """Digest of the code that a cell's numbers come from: 16 hexadecimal digits.

    Args:
        method: registered name.
        params: its parameters, or the policy's.
        scorer: kind.
        policy: that chooses methods; empty: none.
        root: folder of the packages.
    """
    starts = {*CORE, f"experiments.grid.scorers.{scorer}", *named(method, params, modules(root), policy)}
    return reached_digest(frozenset(starts), root)


@cache
def reached_digest(starts: frozenset[str], root: Path = ROOT) -> str:
    """Digest of all code that these modules reach, the native included: 16 hexadecimal digits."""
    known = modules(root)
    digest = hashlib.blake2b(_compiled(root), digest_size=8)
    for name in sorted(reached(starts, known)):
        digest.update(f"{name} {known[name].digest}\n".encode())
    return digest.hexdigest()


@cache
def _compiled(root: Path) -> bytes:
    paths = sorted(p for p in (root / COMPILED).rglob("*") if p.suffix in SUFFIXES - {".py"})
    return hashlib.blake2b(b"".join(path.read_bytes() for path in paths), digest_size=16).digest()


def words_of(method: str, params: dict[str, Any], policy: str = "", root: Path = ROOT) -> frozenset[str]:
    """Words that a way of answering may mean artifacts with: those in its parameters and in the parts it is made of."""
    known = modules(root)
    mine = named(method, params, known, policy)
    found = set(_given(method, params, policy))
    # What is absent from the parameters of a policy inside another stands in its own code.
    inner = _policies(found, known) if policy else set()
    for name in (reached(mine, known) & _parts(known)) | inner:
        found |= known[name].words
    return frozenset(found)
