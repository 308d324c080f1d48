"""Tokens with their provenance in HTTP answers: `turnout.tokens` of a choice, where the request asked for it."""

from __future__ import annotations

from typing import Any

from deployments.openai_format import Format, top_texts
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

    `text` is its part of the answer's text: a character that several tokens hold is the last one's. `bytes` are those
    that it holds, given where its text is not all of them.
    """
    part, texts = dict(token.broken).get(token.id), top_texts(token)
    return {
        "id": token.id,
        "text": token.text,
        "bytes": None if part is None else list(part),
        "source": token.source,
        "kind": token.kind.value,
        "entropy_bits": token.entropy_bits,
        "logprob": token.logprob,
        "top": [{"text": texts[each], "logprob": logprob} for each, _, logprob in token.top],
        "rejected": list(token.rejected),
    }
