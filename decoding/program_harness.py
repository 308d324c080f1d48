"""The program that runs in a sandbox around a sampled one: its signature, or what it does on inputs.

Its text is handed to the sandbox, so it uses the standard library alone. `GIVEN` is the task, `RESULT` the findings.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import io
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

LONGEST = 120  # characters of a value that are kept as they are; of longer ones a digest
MOST_ITEMS = 10_000  # of an iterator that are looked at
MOST_OUTPUT = 1 << 20  # characters that a script writes for one input
DEEPEST = 50
LATE, SCRIPT = "late", ""


class LateError(BaseException):
    """The processor time for one input is used up."""


def signature(code: str, entry: str) -> dict[str, Any]:
    """Find what is called in a program, without running it.

    Args:
        code: Python source.
        entry: a function, or a method as Class.method; "": the last public function, else the last public method,
            if it takes anything, else the program is a script.

    Returns:
        `parses`; where it does, also `name` ("": a script), and `params`: the annotation of each parameter that must
        be given; None: there is no such function.
    """
    try:
        found = dict(_callables(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {"parses": False}
    functions = [name for name in found if "." not in name and not name.startswith("_")]
    methods = [name for name in found if "." in name and not name.split(".")[1].startswith("_")]
    name = entry or next(reversed(functions or methods), SCRIPT)
    if name not in found:
        return {"parses": True, "name": name, "params": None if name else []}
    args, bound = found[name].args, "." in name
    taken = [*args.posonlyargs, *args.args][int(bound) :]
    if not (entry or taken or args.vararg):
        return {"parses": True, "name": SCRIPT, "params": []}
    needed = taken[: len(taken) - len(args.defaults)] if args.defaults else taken
    return {"parses": True, "name": name, "params": [ast.unparse(a.annotation) if a.annotation else "" for a in needed]}


def _callables(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield f"{node.name}.{each.name}", each


def behaviour(code: str, name: str, inputs: list[Any], seconds: float) -> list[str]:
    """Run a program on inputs.

    Args:
        code: Python source.
        name: what is called with the arguments in each input; "": the program runs with each as its standard input.
        inputs: lists of arguments, or texts.
        seconds: of processor time, for each.

    Returns:
        What it did on each: "= VALUE", "! EXCEPTION" or "late".
    """
    if not name:
        compiled = compile(code, "answer", "exec", dont_inherit=True)
        return [_outcome(partial(_script, compiled, each), seconds) for each in inputs]
    loaded: dict[str, Any] = {"__name__": "answer"}
    failed = _outcome(partial(_load, code, loaded), seconds)
    if not failed.startswith("="):
        return [failed] * len(inputs)
    return [_outcome(partial(_called, loaded, name, each), seconds) for each in inputs]


def _load(code: str, loaded: dict[str, Any]) -> str:
    exec(compile(code, "answer", "exec", dont_inherit=True), loaded)
    return ""


def _script(compiled: Any, given: str) -> str:
    with _captured(given) as written, suppress(SystemExit):  # which is an ordinary end of a script
        exec(compiled, {"__name__": "__main__"})
    return _printed(written)


@contextmanager
def _captured(given: str = "") -> Iterator[io.StringIO]:
    kept, written = (sys.stdin, sys.stdout), io.StringIO()
    sys.stdin, sys.stdout = io.StringIO(given), written
    try:
        yield written
    finally:
        sys.stdin, sys.stdout = kept


def _printed(written: io.StringIO) -> str:
    lines = written.getvalue()[:MOST_OUTPUT].rstrip().splitlines()
    return shown("\n".join(line.rstrip() for line in lines))


def _called(loaded: dict[str, Any], name: str, given: list[Any]) -> str:
    target, _, method = name.partition(".")
    function: Callable[..., Any] = getattr(loaded[target](), method) if method else loaded[target]
    arguments = copy.deepcopy(given)
    with _captured() as written:
        value = function(*arguments)
    if value is not None:
        return shown(value)
    return f"None, {shown(arguments)}, {_printed(written)}"  # it may have changed what it got, or printed


def _outcome(run: Callable[[], str], seconds: float) -> str:
    try:
        with _timed(seconds):
            return f"= {run()}"
    except LateError:
        return LATE
    except BaseException as error:
        return f"! {type(error).__name__}"


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    """Raise once this much processor time is used up; again and again, should the program catch it."""

    def late(*_: Any) -> None:
        raise LateError

    signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def shown(value: Any) -> str:
    """A value as text, the same for equal values of a built-in type; a long one as a digest."""
    text = _text(value, 0)
    return text if len(text) <= LONGEST else hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def _text(value: Any, depth: int) -> str:
    if depth > DEEPEST:
        return "..."
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))  # 2.0 == 2
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return repr(value)
    if isinstance(value, dict):
        pairs = sorted(f"{_text(key, depth + 1)}: {_text(each, depth + 1)}" for key, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_text(each, depth + 1) for each in value)) + "}"
    if isinstance(value, list | tuple):
        parts = ", ".join(_text(each, depth + 1) for each in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if isinstance(value, Iterator):
        return "iterator" + _text(list(itertools.islice(value, MOST_ITEMS)), depth + 1)
    fields = getattr(value, "__dict__", None)
    return type(value).__name__ + (_text(fields, depth + 1) if isinstance(fields, dict) and fields else "")


def examine(task: dict[str, Any]) -> Any:
    """Do what is asked: a signature, or with inputs a behaviour."""
    if "inputs" not in task:
        return signature(task["code"], task["entry"])
    return behaviour(task["code"], task["name"], task["inputs"], task["seconds"])


if __name__ == "__main__":
    RESULT = examine(globals()["GIVEN"])
