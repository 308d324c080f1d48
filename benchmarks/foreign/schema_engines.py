"""Runs one engine of structured output over JSON schemas, in an environment that has it.

`python schema_engines.py ENGINE FILE FIRST`: reads `tokenizer` (definition, as JSON of the tokenizers library), `words`
(hexadecimal bytes by token), `end`, `form` (blanks, as llguidance calls them), `longest` (tokens of a drawn text) and
`schemas` from the file: each has `schema`, `instances` (tokens of texts) and `seeds`. It writes `ready` once the engine
is made, and for each schema from FIRST on a line of JSON: why it is `refused`, or microseconds of CPU to `compile`, of
each `masks`, which of the instances were `taken` as whole texts, and `drawn`: tokens that a random walk along the masks
chose, null where it did not end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

CLOSING = frozenset(b'"}]0')  # what a walk prefers, so that it ends
LIKELY = 0.5


class Ours:
    """The compiler of this project, with its refusals; `any_json` is the same for the schema `true`."""

    def __init__(self, given: dict[str, Any], is_free: bool = False) -> None:
        from decoding.constraints.base import Vocabulary
        from decoding.structures import Compiler

        self._compiler = Compiler(Vocabulary(given["tokenizer"], frozenset({given["end"]})))
        self._is_free = is_free

    def compile(self, schema: Any) -> None:
        """Raises what refuses the schema."""
        from turnout.structure import Structure

        value = json.dumps(True if self._is_free else schema)
        self._made = self._compiler.compile(Structure(kind="json_schema", value=value))

    def begin(self) -> None:
        """Begin a text."""
        self._at: list[int] = []
        self._matcher = self._made.clone()

    def mask(self) -> bytes | None:
        """Return one bit per token, the lowest of the first byte first; None: nothing may follow."""
        [mask] = self._matcher.masks(self._at, [()])
        return None if mask is None else mask.tobytes()

    def take(self, token: int) -> None:
        """Take the next token, which the mask allows."""
        self._at.append(token)


class XGrammar:
    """xgrammar, in the mode that allows what a schema does not mention, as JSON Schema says."""

    def __init__(self, given: dict[str, Any]) -> None:
        import xgrammar

        self._xgrammar, self._form = xgrammar, given["form"]
        words = [bytes.fromhex(word) for word in given["words"]]
        info = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[given["end"]])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, schema: Any) -> None:
        """See `Ours.compile`."""
        separators = (self._form["item_separator"], self._form["key_separator"])
        self._made = self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=separators, strict_mode=False
        )

    def begin(self) -> None:
        """See `Ours.begin`."""
        self._matcher = self._xgrammar.GrammarMatcher(self._made)

    def mask(self) -> bytes | None:
        """See `Ours.mask`."""
        self._bits.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        found: bytes = self._bits.numpy().tobytes()
        return found

    def take(self, token: int) -> None:
        """See `Ours.take`."""
        assert self._matcher.accept_token(token)


class Outlines:
    """outlines-core: a schema becomes a regular expression, and this an index of the vocabulary."""

    def __init__(self, given: dict[str, Any]) -> None:
        import outlines_core
        from outlines_core.json_schema import build_regex_from_schema

        self._core, self._regex, self._end = outlines_core, build_regex_from_schema, given["end"]
        self._size = len(given["words"])
        ids: dict[bytes, list[int]] = {}
        for token, word in enumerate(given["words"]):
            if word and token != self._end:
                ids.setdefault(bytes.fromhex(word), []).append(token)
        self._vocabulary = outlines_core.Vocabulary(self._end, ids)

    def compile(self, schema: Any) -> None:
        """See `Ours.compile`."""
        self._made = self._core.Index(self._regex(json.dumps(schema)), self._vocabulary)

    def begin(self) -> None:
        """See `Ours.begin`."""
        self._guide = self._core.Guide(self._made)

    def mask(self) -> bytes | None:
        """See `Ours.mask`."""
        found = bytearray(-(-self._size // 8))
        for token in self._guide.get_tokens():
            found[token // 8] |= 1 << token % 8
        return bytes(found)

    def take(self, token: int) -> None:
        """See `Ours.take`."""
        self._guide.advance(token)


ENGINES = {
    "ours": Ours,
    "any_json": lambda given: Ours(given, is_free=True),
    "xgrammar": XGrammar,
    "outlines": Outlines,
}


def allows(mask: bytes | None, token: int) -> bool:
    """Return whether a mask allows a token."""
    return mask is not None and token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def takes(engine: Any, tokens: list[int], end: int, times: list[float]) -> bool:
    """Return whether a text may be written token by token, and end there; the time of each mask is kept."""
    engine.begin()
    for token in [*tokens, end]:
        began = time.process_time_ns()
        mask = engine.mask()
        times.append((time.process_time_ns() - began) / 1000)
        if not allows(mask, token):
            return False
        if token != end:
            engine.take(token)
    return True


def walk(engine: Any, words: list[bytes], end: int, longest: int, seed: int) -> list[int] | None:
    """Return a text drawn from the masks, each token alike but for those that close something; None: it did not end."""
    draw, found = random.Random(seed), list[int]()
    closes = {token for token, word in enumerate(words) if token == end or CLOSING.intersection(word)}
    engine.begin()
    while len(found) < longest:
        mask = engine.mask()
        bits = b"" if mask is None else mask
        allowed = [token for token in range(min(len(words), 8 * len(bits))) if bits[token >> 3] >> (token & 7) & 1]
        if not allowed:
            return None
        closing = [token for token in allowed if token in closes]
        token = draw.choice(closing if closing and draw.random() < LIKELY else allowed)
        if token == end:
            return found
        engine.take(token)
        found.append(token)
    return None


def judged(engine: Any, each: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What became of one schema."""
    words, end = [bytes.fromhex(word) for word in given["words"]], given["end"]
    began = time.process_time_ns()
    try:
        engine.compile(each["schema"])
    except Exception as error:  # each engine has its own
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    compiled, times = (time.process_time_ns() - began) / 1000, list[float]()
    try:
        taken = [takes(engine, tokens, end, times) for tokens in each["instances"]]
        drawn = [walk(engine, words, end, given["longest"], seed) for seed in each["seeds"]]
    except Exception as error:
        return {"refused": f"while writing: {type(error).__name__}: {error}"[:300]}
    return {"compile": compiled, "masks": times, "taken": taken, "drawn": drawn}


def main(name: str, path: Path, first: int) -> None:
    """Judge schema after schema."""
    given = json.loads(path.read_text(encoding="utf-8"))
    engine = ENGINES[name](given)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for each in given["schemas"][first:]:
        sys.stdout.write(json.dumps(judged(engine, each, given)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
