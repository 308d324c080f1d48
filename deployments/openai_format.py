"""Answers in the shape of OpenAI's API: whole objects and stream chunks, usage, errors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Protocol, cast

from deployments.openapi.answers import (
    AnyLogprob,
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    ChoiceDetails,
    CompletionChoice,
    ErrorAnswer,
    Logprobs,
    Message,
    ModelObject,
    SpeculationDetails,
    TokenDetails,
    UsageObject,
)
from deployments.openapi.events import ChatPart, CompletionPart, MessagePart
from turnout.calls import Chunk, ModelDescription, TokenOut, Usage
from turnout.candidate_sets import values_of
from turnout.cost import SpeculationMeter
from turnout.errors import Code, TurnoutError
from turnout.types import FinishReason
from turnout.utf8 import name_of_part

HTTP_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}

ErrorKind = Literal["invalid_request_error", "rate_limit_error", "server_error"]


def error_body(error: TurnoutError) -> ErrorAnswer:
    """Return OpenAI's error object."""
    status = HTTP_STATUS[error.code]
    kind: ErrorKind = "server_error" if status >= 500 else "invalid_request_error"
    code = error.code.value.lower()
    if error.code is Code.RESOURCE_EXHAUSTED:
        code = "insufficient_quota" if error.field == "tenant.budget" else "rate_limit_exceeded"
        kind = "rate_limit_error"
    elif error.code is Code.UNAUTHENTICATED:
        code = "invalid_api_key"
    elif error.code is Code.NOT_FOUND and error.field == "model":
        code = "model_not_found"
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": code}}


def model_object(model: ModelDescription, created: int) -> ModelObject:
    """Return one entry of /v1/models; `turnout` holds what OpenAI has no field for."""
    details = asdict(model)
    return {
        "id": details.pop("name"),
        "object": "model",
        "created": created,
        "owned_by": "turnout",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_length or None,
        "turnout": details,
    }


def usage_object(usage: Usage) -> UsageObject:
    """OpenAI's counts, and `turnout`: work by model and the four cost meters relative to the large model alone."""
    models = {name: {**_flat(meter), "flops": meter.flops} for name, meter in usage.models.items()}
    cost = _flat(usage.cost) | {"spent": _flat(usage.cost.spent), "large_only": _flat(usage.cost.large_only)}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.speculation.accepted_tokens,
            "rejected_prediction_tokens": usage.speculation.draft_tokens - usage.speculation.accepted_tokens,
        },
        "turnout": {
            "method": usage.method,
            "params": usage.params,
            "seed": usage.seed,
            "sampling": usage.sampling,
            "models": models,
            "speculation": speculation_details(usage.speculation),
            "switches": usage.switches,
            "cost": cost,
            "ttft_s": usage.ttft_s,
            "wall_s": usage.wall_s,
            "queue_s": usage.queue_s,
            "notes": list(usage.notes),
            "measures": usage.measures,
            "candidates": values_of(usage.candidates),
            "doubts": values_of(usage.doubts),
            "drift": asdict(usage.drift) if usage.drift is not None else None,
            "route": usage.route,
        },
    }


def speculation_details(meter: SpeculationMeter) -> SpeculationDetails:
    """What drafting brought, with the rates that follow from the counts."""
    rates = {
        "tokens_per_round": meter.tokens_per_round,
        "acceptance": meter.acceptance,
        "draft_time_share": meter.draft_time_share,
    }
    return _flat(meter) | rates


def _flat(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are. `asdict` copies each value, which takes most of an answer's accounting."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


Choice = CompletionChoice | ChatChoice
Part = CompletionPart | ChatPart


class Format(Protocol):
    """Format of one endpoint's choices."""

    prefix: str
    whole: str
    part: str

    def choice(self, chunk: Chunk, logprobs: bool) -> Choice:
        """Write a finished choice."""
        ...

    def delta(self, chunk: Chunk, logprobs: bool) -> Part:
        """Write new output of a choice."""
        ...


class CompletionFormat:
    """/v1/completions; remembers where each choice's text has got to, for `text_offset`."""

    prefix = "cmpl-"
    whole = part = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def choice(self, chunk: Chunk, logprobs: bool) -> CompletionChoice:
        """Write a finished choice."""
        # The same members; `finish_reason` is set in a finished one.
        return cast("CompletionChoice", self.delta(chunk, logprobs))

    def delta(self, chunk: Chunk, logprobs: bool) -> CompletionPart:
        """Write new output of a choice."""
        return {
            "index": chunk.index,
            "text": chunk.text,
            "logprobs": self._logprobs(chunk) if logprobs else None,
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(self, chunk: Chunk) -> Logprobs:
        offset = self._offsets.get(chunk.index, 0)
        offsets = []
        for token in chunk.tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[chunk.index] = offset
        return {
            "tokens": [token.text for token in chunk.tokens],
            "token_logprobs": [token.logprob for token in chunk.tokens],
            "top_logprobs": [_by_text(token) if token.logprob is not None else None for token in chunk.tokens],
            "text_offset": offsets,
        }


def _by_text(token: TokenOut) -> dict[str, float]:
    """Log-probabilities by text, one for each alternative: where two have one text, the less likely is named by id.

    Only the token that was written stands under its own text, as it does among `tokens`.
    """
    texts, taken = top_texts(token), {token.text}
    by_text: dict[str, float] = {}
    for each, _, logprob in token.top:
        key = texts[each]
        if each != token.id:
            key = f"token_id:{each}" if key in taken else key
            taken.add(key)
        by_text[key] = logprob
    return by_text


def top_texts(token: TokenOut) -> dict[int, str]:
    """Text of each alternative by id; one that is a part of a character is named by its bytes."""
    broken = dict(token.broken)
    texts = {each: name_of_part(text, broken.get(each)) for each, text, _ in token.top}
    return {**texts, token.id: token.text} if token.id in texts else texts


class ChatFormat:
    """/v1/chat/completions; the first chunk of a choice names the role."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def choice(self, chunk: Chunk, logprobs: bool) -> ChatChoice:
        """Write a finished choice."""
        message: Message = {"role": "assistant", "content": chunk.text, "refusal": None, "annotations": []}
        if chunk.reasoning:
            message |= {"reasoning": chunk.reasoning, "reasoning_content": chunk.reasoning}
        return {
            "index": chunk.index,
            "message": message,
            "logprobs": _chat_logprobs(chunk) if logprobs else None,
            "finish_reason": cast("FinishReason", chunk.finish_reason),
        }

    def delta(self, chunk: Chunk, logprobs: bool) -> ChatPart:
        """Write new output of a choice."""
        delta: MessagePart = {"content": chunk.text}
        if chunk.reasoning:
            delta = {"reasoning": chunk.reasoning, "reasoning_content": chunk.reasoning}
            delta |= {"content": chunk.text} if chunk.text else {}
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            delta = {"role": "assistant", **delta}
        return {
            "index": chunk.index,
            "delta": delta,
            "logprobs": _chat_logprobs(chunk) if logprobs else None,
            "finish_reason": chunk.finish_reason,
        }


def _chat_logprobs(chunk: Chunk) -> ChatLogprobs:
    return {"content": [chat_token(token) for token in chunk.tokens], "refusal": None}


def chat_token(token: TokenOut) -> ChatLogprob:
    """Write a token with its alternatives."""
    broken, texts = dict(token.broken), top_texts(token)
    return {
        **_with_bytes(token.text, token.logprob, broken.get(token.id)),
        "top_logprobs": [_with_bytes(texts[each], logprob, broken.get(each)) for each, _, logprob in token.top],
    }


def _with_bytes(text: str, logprob: float | None, data: bytes | None) -> AnyLogprob:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode() if data is None else data)}


class DetailedFormat:
    """An endpoint's format, with a `turnout` part in every choice, whole or new output."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self.prefix, self.whole, self.part = form.prefix, form.whole, form.part

    def choice(self, chunk: Chunk, logprobs: bool) -> Choice:
        """Write a finished choice."""
        made = self._form.choice(chunk, logprobs)
        made["turnout"] = _details(chunk)
        return made

    def delta(self, chunk: Chunk, logprobs: bool) -> Part:
        """Write new output of a choice."""
        made = self._form.delta(chunk, logprobs)
        made["turnout"] = _details(chunk)
        return made


def _details(chunk: Chunk) -> ChoiceDetails:
    return {"tokens": [token_object(token) for token in chunk.tokens]}


def token_object(token: TokenOut) -> TokenDetails:
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
        "kind": token.kind,
        "entropy_bits": token.entropy_bits,
        "logprob": token.logprob,
        "top": [{"text": texts[each], "logprob": logprob} for each, _, logprob in token.top],
        "rejected": list(token.rejected),
        "thinking": token.thinking,
    }
