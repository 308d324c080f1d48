"""Tokens with their provenance in HTTP answers: `turnout.tokens` of a choice, where the request asked for it."""

from __future__ import annotations

from typing import Any

from deployments.openai_format import Format
from turnout.calls import Chunk, TokenOut


class DetailedFormat:
    """An endpoint's format, with a `turnout` part in every choice, whole or new output."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self.prefix, self.whole, self.part = form.prefix, form.whole, form.part

    def choice(self, chunk: Chunk, logprobs: bool) -> dict[str, Any]:
        """A finished choice."""
        return self._form.choice(chunk, logprobs) | _details(chunk)

    def delta(self, chunk: Chunk, logprobs: bool) -> dict[str, Any]:
        """New output of a choice."""
        return self._form.delta(chunk, logprobs) | _details(chunk)


def _details(chunk: Chunk) -> dict[str, Any]:
    return {"turnout": {"tokens": [token_object(token) for token in chunk.tokens]}}


def token_object(token: TokenOut) -> dict[str, Any]:
    """One token: entropy in bits, log-probabilities in nats, `rejected` the drafts that were refused in its place.

    `bytes` are there where it is a part of a character, which no text can tell.
    """
    part = dict(token.broken).get(token.id)
    return {
        "id": token.id,
        "text": token.text,
        "bytes": None if part is None else list(part),
        "source": token.source,
        "kind": token.kind.value,
        "entropy_bits": token.entropy_bits,
        "logprob": token.logprob,
        "top": [{"text": text, "logprob": logprob} for _, text, logprob in token.top],
        "rejected": list(token.rejected),
    }
