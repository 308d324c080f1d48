"""What tests of structures share: small vocabularies, random schemas, and what a walk along a grammar must keep to."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from decoding.constraints.base import Constraint, Mask, Vocabulary
from decoding.structures import Compiler
from training.random_models import byte_tokenizer
from turnout.structure import Structure

CHARS = "abcdefghijklmnopqrstuvwxyz0123456789;,"
END = 1


def char_vocabulary(chars: str = CHARS) -> Vocabulary:
    """Ids 0 (padding) and 1 (the end), then one for each character."""
    ids = {"<pad>": 0, "<end>": END} | {char: place for place, char in enumerate(chars, 2)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<end>", special=True)])
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer.to_str(), frozenset({END}))


@cache
def char_compiler(chars: str = CHARS) -> Compiler:
    return Compiler(char_vocabulary(chars))


@cache
def byte_compiler() -> Compiler:
    """One token per byte."""
    made = byte_tokenizer()
    return Compiler(Vocabulary(made.backend_tokenizer.to_str(), frozenset({made.eos_token_id})))


def ids_of(text: str) -> list[int]:
    """Of a text in `byte_compiler`'s vocabulary."""
    ids: list[int] = byte_tokenizer_once().encode(text, add_special_tokens=False)
    return ids


@cache
def byte_tokenizer_once() -> Any:
    return byte_tokenizer()


def allowed_ids(constraint: Constraint, answer: list[int], path: tuple[int, ...] = ()) -> list[int] | None:
    [mask] = constraint.masks(answer, [path])
    return ids_in(mask)


def ids_in(mask: Mask | None) -> list[int] | None:
    """The tokens that a mask allows."""
    if mask is None:
        return None
    ids: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return ids


def fits(compiler: Compiler, structure: Structure, text: str) -> bool:
    """Whether a whole text fits, in bytes."""
    return compiler.compile(structure).clone().accepts(ids_of(text))


def exists(schema: Any, place: str) -> bool:
    """Whether a place in a refusal is one of the schema that was given."""
    node = schema
    for quoted, plain in re.findall(r'("(?:[^"\\]|\\.)*")|([^.]+)', place):
        step = json.loads(quoted) if quoted else plain
        if isinstance(node, list):
            if not (step.isdigit() and int(step) < len(node)):
                return False
            node = node[int(step)]
        elif isinstance(node, dict):
            names = [name for name in node if name == step or (step.endswith("...") and name.startswith(step[:-3]))]
            if not names:
                return False
            node = node[names[0]]
        else:
            return False
    return True


def random_schema(draw: random.Random) -> dict[str, Any]:
    """A schema of what is supported, small enough that random answers to it end."""
    return {"$defs": {"it": _schema(draw, 0)}, **_schema(draw, 3)}


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "bounded"]
    if depth:
        kinds += ["object", "object", "array", "anyOf", "ref"]
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "minLength": draw.randrange(2), "maxLength": draw.randrange(2, 6)}
        case "integer":
            low = draw.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(200)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": draw.choice([1, 2.5, 10])}
        case "enum":
            values = ["red", 3, None, True, 1.5, {"a": [1]}, 'gr\u00fcn "x"']
            return {"enum": draw.sample(values, draw.randrange(1, 4))}
        case "const":
            return {"const": draw.choice(["x", 7, [1, "y"], {"k": None}])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[a-c]{1,4}$", "^(on|off)$", "^[0-9]{2}-[0-9]{2}$"])}
        case "bounded":
            return {"type": ["boolean", "null"]}
        case "array":
            least = draw.randrange(3)
            return {
                "type": "array",
                "items": _schema(draw, depth - 1),
                "minItems": least,
                "maxItems": least + draw.randrange(3),
            }
        case "anyOf":
            return {"anyOf": [_schema(draw, depth - 1) for _ in range(2)]}
        case "ref":
            return {"$ref": "#/$defs/it"}
        case "object":
            names = draw.sample(["a", "b", "size", "name", "x y"], draw.randrange(1, 4))
            made = {
                "type": "object",
                "properties": {name: _schema(draw, depth - 1) for name in names},
                "required": [name for name in names if draw.random() < 0.7],
                "additionalProperties": False,
            }
            if draw.random() < 0.3:
                made["patternProperties"] = {"^[v-z]$": {"type": ["boolean", "null"]}}
            return made
        case simple:
            return {"type": simple}
