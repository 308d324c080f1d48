"""Descriptions of what can be asked for: models and decoding methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EndToken:
    """A token that ends an answer: its id and its text."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A name a request may put in `model`. `roles` is empty for a member model, role -> member for a pool.

    `default_params` are the pool's own for `default_method`; `routed`: a router chooses where none is named.
    `ends` are the tokens that end an answer, by id; `ends_source`: generation_config.json, config.json or tokenizer, of
    the pool's large model; empty where none of them names one. `revision`: the commit of a hub's model; empty for a
    pool and for models of other places. `other_vocabulary`: of a member whose tokens are not the pool's: it drafts
    across vocabularies, and cannot be asked alone. `tool_format`: how a pool's models write calls of tools.
    """

    name: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_length: int
    roles: dict[str, str]
    default_method: str
    default_params: dict[str, Any] = field(default_factory=dict)
    routed: bool = False
    ends: tuple[EndToken, ...] = ()
    ends_source: str = ""
    revision: str = ""
    other_vocabulary: bool = False
    tool_format: str = ""


@dataclass(frozen=True, slots=True)
class MethodDescription:
    """A decoding method: `params_schema` is the JSON schema of its parameters."""

    name: str
    summary: str
    seeds: tuple[int, ...]
    lossless: bool
    params_schema: dict[str, Any]
