"""Sampling parameters that hold where a request names none: the pool's, over those of generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnout.pool_config import PoolConfig
from turnout.types import SamplingParams

FILE = "generation_config.json"
# Those that change what is written, which usage reports; the first five stand in files of Hugging Face's.
NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a pool fills into the sampling parameters of a request.

    Attributes:
        values: by name, each valid.
        max_answer_tokens: most tokens of an answer whose request sets no limit; None: what the context has room for.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    max_answer_tokens: int | None = None

    @classmethod
    def of(cls, pool: PoolConfig, generation: Mapping[str, Any]) -> SamplingDefaults:
        """Those of a pool.

        Args:
            pool: whose own settings come first.
            generation: of `generation_sampling`, of the large model.
        """
        return cls({**generation, **pool.sampling.given}, pool.max_answer_tokens)

    def applied(self, given: SamplingParams) -> SamplingParams:
        """The parameters with these in place of what the request leaves open."""
        filled = dict(self.values)
        if self.max_answer_tokens is not None:
            filled["max_tokens"] = self.max_answer_tokens
        missing = {name: value for name, value in filled.items() if name not in given.model_fields_set}
        return given.model_copy(update=missing) if missing else given


NO_DEFAULTS = SamplingDefaults()


def used(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that an answer was written with, for its usage."""
    return {name: getattr(sampling, name) for name in (*NAMES, "max_tokens")}


def generation_sampling(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Sampling parameters of a checkpoint's generation_config.json, and notes on those that cannot be used.

    As in vLLM and SGLang, only what the file says counts: not the defaults of `GenerationConfig`, and not `do_sample`.

    Args:
        folder: of a checkpoint; it need not have the file.
    """
    file = folder / FILE
    said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    values: dict[str, Any] = {}
    notes: list[str] = []
    for name in NAMES:
        if (value := said.get(name)) is None:
            continue
        try:
            values[name] = getattr(SamplingParams.model_validate({name: value}), name)
        except ValidationError as error:
            notes.append(f"{FILE}: {name} = {value!r} is not used ({error.errors()[0]['msg'].lower()})")
    return values, notes
