"""Types of what answers hold beyond OpenAI's fields."""

from __future__ import annotations

from typing import NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict


class Answer(TypedDict):
    """A JSON object that has these members and no others."""


Answer.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]  # not a member of the object


class PromptLogprob(Answer):
    """Log-probability of a token of a prompt, in nats; `rank` is its place among all tokens, from 1."""

    logprob: float
    rank: int | None
    decoded_token: str


class PromptExtras(Answer):
    """A prompt's tokens where `return_token_ids` asks for them, and their log-probabilities by id, the first null."""

    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class ChoiceExtras(Answer):
    """The stop string or token id that ended the answer, null where none did, with its finish reason; its tokens."""

    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class TokenCounts(Answer):
    """Tokens so far, of all prompts and answers of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Version(Answer):
    """The version of Turnout."""

    version: str


class Load(Answer):
    """Requests in progress or waiting, of all pools."""

    server_load: int
