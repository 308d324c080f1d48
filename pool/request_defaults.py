"""What holds where a request leaves it open: the pool's sampling parameters and variables of the chat template.

Sampling parameters are the pool's own, over those of the large model's generation_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnout.calls import GenerateCall
from turnout.chat_template import EFFORTS, TemplateOptions, default_effort
from turnout.embed_calls import Pooling
from turnout.errors import invalid
from turnout.pool_config import PoolConfig
from turnout.types import SamplingParams

FILE = "generation_config.json"
# Those that change what is written, which usage reports; the first five stand in files of Hugging Face's.
NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What a pool fills into a request.

    Attributes:
        sampling: parameters by name, each valid.
        max_answer_tokens: most tokens of an answer whose request sets no limit; None: what the context has room for.
        template: variables of the chat template, by name.
        efforts: variables by `reasoning_effort`; empty: those of `default_effort`.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_answer_tokens: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    efforts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pooling: Pooling = "mean"

    @classmethod
    def of(cls, pool: PoolConfig, generation: Mapping[str, Any]) -> RequestDefaults:
        """Those of a pool.

        Args:
            pool: whose own settings come first.
            generation: of `generation_sampling`, of the large model.
        """
        sampling = {**generation, **pool.sampling.given}
        efforts = pool.reasoning_effort
        return cls(sampling, pool.max_answer_tokens, pool.chat_template_kwargs, efforts, pool.embedding_pooling)

    def applied(self, call: GenerateCall) -> GenerateCall:
        """The call with these in place of what it leaves open; applied to that again, it stays as it is.

        Raises:
            TurnoutError: INVALID_ARGUMENT: a `reasoning_effort` that the pool does not know.
        """
        return replace(call, sampling=self.filled(call.sampling), template=self._template(call.template))

    def filled(self, given: SamplingParams) -> SamplingParams:
        """Sampling parameters with these in place of those that are left open."""
        filled = dict(self.sampling)
        if self.max_answer_tokens is not None:
            filled["max_tokens"] = self.max_answer_tokens
        missing = {name: value for name, value in filled.items() if name not in given.model_fields_set}
        return given.model_copy(update=missing) if missing else given

    def _template(self, given: TemplateOptions) -> TemplateOptions:
        by_effort: Mapping[str, Any] = {}
        if given.effort:
            known = tuple(self.efforts) or EFFORTS
            if given.effort not in known:
                raise invalid("reasoning_effort", f"must be one of {', '.join(known)} (got {given.effort[:40]!r})")
            by_effort = self.efforts[given.effort] if self.efforts else default_effort(given.effort)
        if not self.template and not by_effort:
            return given
        return replace(given, kwargs={**self.template, **by_effort, **given.kwargs}, effort="")


NO_DEFAULTS = RequestDefaults()


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
