"""Limits of calls that only read: scores, embeddings and tasks."""

from __future__ import annotations

from typing import get_args

from turnout.calls import ScoreCall
from turnout.embed_calls import WHOLE_CONTEXT, EmbedCall, Pooling, ReadCall, TaskCall
from turnout.errors import invalid

MAX_COMPLETIONS = 1024  # that are scored at once
MAX_INPUTS = 2048  # that are embedded at once
MOST_DIMENSIONS = 1 << 20


def check_read(call: ReadCall) -> None:
    """Refuse what no pool would be asked.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    if isinstance(call, TaskCall):
        if not call.name:
            raise invalid("name", "must be the name of a task")
        return
    if isinstance(call, ScoreCall):
        _check_score(call)
    else:
        _check_embed(call)
    if call.truncate is not None and call.truncate != WHOLE_CONTEXT and call.truncate < 1:
        raise invalid("truncate_prompt_tokens", f"must be positive, or -1: what the model reads (got {call.truncate})")


def _check_score(call: ScoreCall) -> None:
    if not call.completions:
        raise invalid("completions", "must not be empty")
    if len(call.completions) > MAX_COMPLETIONS:
        raise invalid("completions", f"at most {MAX_COMPLETIONS} at once (got {len(call.completions)})")
    if not 0 <= call.top <= 20:
        raise invalid("top", f"must be from 0 to 20 (got {call.top})")


def _check_embed(call: EmbedCall) -> None:
    if not call.input:
        raise invalid("input", "must not be empty")
    if len(call.input) > MAX_INPUTS:
        raise invalid("input", f"at most {MAX_INPUTS} at once (got {len(call.input)})")
    if call.pooling not in (None, *get_args(Pooling)):
        raise invalid("pooling", f"must be {' or '.join(get_args(Pooling))} (got {str(call.pooling)[:40]!r})")
    if call.dimensions is not None and not 1 <= call.dimensions <= MOST_DIMENSIONS:
        raise invalid("dimensions", f"must be positive, and at most the width of the model (got {call.dimensions})")
