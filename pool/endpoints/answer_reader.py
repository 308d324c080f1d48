"""From the JSON values of an endpoint's answer, streamed or whole, to chunks."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from turnout.calls import READ, Chunk, TokenOut
from turnout.cost import ModelMeter
from turnout.tools import ToolCall, ToolCallPart
from turnout.types import FinishReason, TokenKind


@dataclass(slots=True)
class _Call:
    """A call of a tool as far as it has come."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class _Answer:
    """One of the answers as far as it has come."""

    def __init__(self) -> None:
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.calls: list[_Call] = []
        self.places: dict[tuple[int, str], int] = {}  # of calls, by the server's index and id
        self.finished = False


class AnswerReader:
    """Reader of one answer of an endpoint.

    An endpoint's tokens have no ids here: each has 0, its alternatives have 1, 2, and so on. Where no log-probabilities
    were asked for, the pieces in which the text came stand for tokens.

    Args:
        source: name of the model.
        n: answers that were asked for.
        alternatives: whether alternatives to a token were asked for; otherwise those that a server adds are left out.
    """

    def __init__(self, source: str, n: int, alternatives: bool = True) -> None:
        self._source = source
        self._with_alternatives = alternatives
        self._answers = [_Answer() for _ in range(n)]
        self._usage: dict[str, Any] = {}
        self.pieces = 0
        self.notes: list[str] = []

    @property
    def whole(self) -> bool:
        """Whether every answer has come to its end."""
        return all(answer.finished for answer in self._answers)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking, as the endpoint counts them; 0 where it does not."""
        details = self._usage.get("completion_tokens_details")
        return _count(details.get("reasoning_tokens")) if isinstance(details, dict) else 0

    def read(self, value: Any) -> list[Chunk]:
        """What is new in an event, or in a whole answer.

        Raises:
            ValueError: it is none of OpenAI's API.
        """
        try:
            if usage := value.get("usage") or _usage_of_timings(value.get("timings")):
                self._usage = dict(usage)
            found = [self._choice(choice) for choice in value.get("choices") or ()]
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"it sent what is no answer of OpenAI's API ({type(error).__name__})") from None
        return [chunk for chunk in found if chunk is not None]

    def meter(self, num_parameters: int, prompt_estimate: int) -> ModelMeter:
        """What the endpoint says it did; estimates, with a note, where it says nothing."""
        usage = self._usage
        details, cached = usage.get("prompt_tokens_details"), 0
        if isinstance(details, dict):
            cached = _count(details.get("cached_tokens"))
        if not usage:
            self.notes.append(f"endpoint {self._source!r} reports no usage: its tokens are estimates")
        prompt = _count(usage.get("prompt_tokens")) if usage else prompt_estimate
        written = _count(usage.get("completion_tokens")) if usage else self.pieces
        return ModelMeter(
            num_parameters,
            prompt_tokens=max(prompt - cached, 0),
            cached_tokens=cached,
            decode_tokens=written,
            generated_tokens=written,
        )

    def _choice(self, choice: dict[str, Any]) -> Chunk | None:
        index = choice.get("index") or 0
        if index < 0:
            raise IndexError
        answer = self._answers[index]
        delta = choice.get("delta") or choice.get("message") or {}
        text, reasoning = _content(delta.get("content") if delta else choice.get("text"))
        reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        text += delta.get("refusal") or ""
        parts = tuple(
            part
            for place, call in enumerate(delta.get("tool_calls") or ())
            for part in [self._call_part(answer, call, place)]
        )
        tokens = self._tokens(answer, choice.get("logprobs"), reasoning + text)
        self.pieces += max(len(tokens), bool(parts))
        reason, calls = self._end(answer, choice.get("finish_reason"))
        if not (text or reasoning or parts or tokens or reason):
            return None
        stop = choice.get("stop_reason") if reason is FinishReason.STOP else None
        stop = stop if isinstance(stop, str | int) else None
        if reasoning and not text:
            tokens = tuple(replace(token, thinking=True) for token in tokens)
        return Chunk(index, text, tokens, reason, calls, parts, reasoning, stop, READ)

    def _end(self, answer: _Answer, given: str | None) -> tuple[FinishReason | None, tuple[ToolCall, ...]]:
        if given is None or answer.finished:
            return None, ()
        answer.finished = True
        if given == "content_filter":
            self.notes.append(f"endpoint {self._source!r} has filtered the answer")
        calls = tuple(ToolCall(each.id, each.name, "".join(each.arguments) or "{}") for each in answer.calls)
        return (FinishReason.LENGTH if given == "length" else FinishReason.STOP), calls

    @staticmethod
    def _call_part(answer: _Answer, given: dict[str, Any], place: int) -> ToolCallPart:
        function = given.get("function") or {}
        at, name = given.get("index", place), function.get("name") or ""
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        named = given.get("id") or ""
        # Some servers give all calls one index, and tell them apart by their ids.
        key = (at, named) if named else next((each for each in reversed(answer.places) if each[0] == at), (at, ""))
        if key in answer.places:
            number = answer.places[key]
            answer.calls[number].arguments.append(arguments)
            return ToolCallPart(number, arguments=arguments)
        number = answer.places[key] = len(answer.calls)
        call = _Call(named or f"call_{uuid4().hex[:24]}", name, [arguments])
        answer.calls.append(call)
        return ToolCallPart(number, call.id, name, arguments)

    def _tokens(self, answer: _Answer, logprobs: Any, text: str) -> tuple[TokenOut, ...]:
        if isinstance(logprobs, dict):
            if logprobs.get("content"):
                return tuple(self._chat_token(answer, each) for each in logprobs["content"])
            if logprobs.get("tokens"):
                tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
                triples = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
                return tuple(self._token(token, logprob, (top or {}).items()) for token, logprob, top in triples)
        return (TokenOut(0, text, self._source, TokenKind.DECODED),) if text else ()

    def _chat_token(self, answer: _Answer, given: dict[str, Any]) -> TokenOut:
        text, data = given["token"], given.get("bytes")
        top = [(each["token"], each["logprob"]) for each in given.get("top_logprobs") or ()]
        if not isinstance(data, list):
            return self._token(text, given["logprob"], top)
        made = self._token(text, given["logprob"], top)
        whole = answer.utf8.decode(bytes(data))  # a token may hold a part of a character
        broken = ((0, bytes(data)),) if whole.encode() != bytes(data) else ()
        own = tuple((each, whole if each == 0 else other, logprob) for each, other, logprob in made.top)
        return TokenOut(0, whole, self._source, TokenKind.DECODED, made.logprob, None, own, (), broken)

    def _token(self, text: str, logprob: float | None, top: Any) -> TokenOut:
        alternatives, seen = [], False
        for place, (other, value) in enumerate(top if self._with_alternatives else (), start=1):
            mine = other == text and not seen
            seen = seen or mine
            alternatives.append((0 if mine else place, str(other), float(value)))
        chance = float(logprob) if logprob is not None else None
        return TokenOut(0, str(text), self._source, TokenKind.DECODED, chance, None, tuple(alternatives))


def _content(given: Any) -> tuple[str, str]:
    """Text and thinking of a message's content, which some servers give in parts."""
    if given is None or isinstance(given, str):
        return given or "", ""
    text, thought = "", ""
    for part in given:
        if part.get("type") == "thinking":
            inner = part.get("thinking") or ""
            thought += inner if isinstance(inner, str) else _content(inner)[0]
        else:
            text += part.get("text") or ""
    return text, thought


def _usage_of_timings(timings: Any) -> dict[str, Any] | None:
    """Usage so far, where an event of llama.cpp has its timings."""
    if not isinstance(timings, dict):
        return None
    cached = _count(timings.get("cache_n"))
    return {
        "prompt_tokens": cached + _count(timings.get("prompt_n")),
        "completion_tokens": _count(timings.get("predicted_n")),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
