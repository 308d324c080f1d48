"""What answers hold beyond OpenAI's fields: the stop that ended them, token ids, log-probabilities of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from deployments import fan_out as answering
from deployments.openai_format import Choice, Format, Part, usage_object
from deployments.openapi.extras import PromptLogprob, TokenCounts
from deployments.response_format import format_of
from deployments.schemas import Job
from deployments.service import GenerationService
from turnout.calls import Chunk, Usage

CHAT = "chat.completion"


@dataclass(frozen=True, slots=True)
class PromptRead:
    """One prompt as the model reads it.

    Attributes:
        ids: its tokens.
        logprobs: of each token, those of the token itself and of its alternatives, by id; the first token has none.
            None: not asked for.
    """

    ids: tuple[int, ...]
    logprobs: list[dict[str, PromptLogprob] | None] | None = None


async def check_readable(service: GenerationService, job: Job) -> None:
    """Refuse a job whose answer is to tell of prompts that cannot be read, before anything is written for it.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the pool has endpoints, whose tokens are not known.
    """
    if job.extras.read_prompts:
        await answering.check_prompt(service, job.calls[0])


async def read_prompts(service: GenerationService, job: Job) -> list[PromptRead]:
    """Read the prompts of a job as far as its answer is to tell of them; empty where it tells nothing."""
    if not job.extras.read_prompts:
        return []
    return list(await answering.together([_read(service, job, place) for place in range(len(job.calls))]))


async def _read(service: GenerationService, job: Job, place: int) -> PromptRead:
    call, top = job.calls[place], job.extras.prompt_logprobs
    if top is None:
        return PromptRead((await service.tokens(call))[0])
    ids, _, scored = await answering.score_prompt(service, call, top)
    logprobs: list[dict[str, PromptLogprob] | None] = [None]
    for token, rank in zip(scored.tokens, scored.ranks or [None] * len(scored.tokens), strict=True):
        # Most probable first, and the token itself, with its own rank, behind them if it is none of them.
        shown: dict[str, PromptLogprob] = {
            str(each): {"logprob": logprob, "rank": at, "decoded_token": text}
            for at, (each, text, logprob) in enumerate(token.top[:top], 1)
        }
        shown[str(token.id)] = {"logprob": cast("float", token.logprob), "rank": rank, "decoded_token": token.text}
        logprobs.append(shown)
    return PromptRead(ids, logprobs)


class ExtendedFormat:
    """A format of choices with what a body asks for besides.

    Args:
        form: of the endpoint.
        job: the request.
        prompts: of `read_prompts`.
    """

    def __init__(self, form: Format, job: Job, prompts: Sequence[PromptRead]) -> None:
        self._form = format_of(form, job.calls[0])
        self._extras = job.extras
        self._prompts = prompts
        self._per_prompt = job.calls[0].sampling.n
        self._begun: set[int] = set()
        self.prefix, self.whole, self.part = form.prefix, form.whole, form.part

    def choice(self, chunk: Chunk, logprobs: bool) -> Choice:
        """Write a finished choice."""
        made = self._form.choice(chunk, logprobs)
        self._extend(made, chunk)
        return made

    def delta(self, chunk: Chunk, logprobs: bool) -> Part:
        """Write new output of a choice."""
        made = self._form.delta(chunk, logprobs)
        self._extend(made, chunk)
        return made

    def _extend(self, made: Any, chunk: Chunk) -> None:
        if chunk.finish_reason is not None:
            made["stop_reason"] = chunk.stop
        if self._extras.token_ids:
            made["token_ids"] = [token.id for token in chunk.tokens]
        if self._extras.tokens_as_ids and made["logprobs"] is not None:
            _name_by_id(made["logprobs"], chunk)
        if self.whole != CHAT and self._prompts and chunk.index not in self._begun:
            self._begun.add(chunk.index)
            made |= _of_prompt(self._prompts[chunk.index // self._per_prompt], self._extras.token_ids)


def _of_prompt(prompt: PromptRead, ids: bool) -> dict[str, Any]:
    members: dict[str, Any] = {"prompt_token_ids": list(prompt.ids)} if ids else {}
    return members if prompt.logprobs is None else {**members, "prompt_logprobs": prompt.logprobs}


def _name_by_id(logprobs: Any, chunk: Chunk) -> None:
    """Put ids in place of texts: in the lists of /v1/completions, or in the list of objects of a chat."""
    names = [f"token_id:{token.id}" for token in chunk.tokens]
    if "content" not in logprobs:
        logprobs["tokens"] = names
        logprobs["top_logprobs"] = [
            None if token.logprob is None else {f"token_id:{each}": logprob for each, _, logprob in token.top}
            for token in chunk.tokens
        ]
        return
    for named, name, token in zip(logprobs["content"], names, chunk.tokens, strict=True):
        named["token"] = name
        for other, (each, _, _) in zip(named["top_logprobs"], token.top, strict=True):
            other["token"] = f"token_id:{each}"


def whole_answer(
    common: Mapping[str, Any],
    form: Format,
    job: Job,
    prompts: Sequence[PromptRead],
    chunks: Sequence[Chunk],
    usage: Usage,
) -> dict[str, Any]:
    """Write a whole answer: a chunk for each choice, in order.

    Args:
        common: id, time, model, fingerprint.
        form: of the endpoint.
        job: the request.
        prompts: of `read_prompts`.
        chunks: a whole one for each choice.
        usage: of all of them.
    """
    extended, logprobs = ExtendedFormat(form, job, prompts), job.calls[0].sampling.logprobs is not None
    choices = [extended.choice(chunk, logprobs) for chunk in chunks]
    members: dict[str, Any] = {**common, "object": form.whole, "choices": choices, "usage": usage_object(usage)}
    if form.whole == CHAT:
        members["service_tier"] = "default"
        for prompt in prompts:
            members |= _of_prompt(prompt, job.extras.token_ids)
    return members


class CountedParts:
    """Usage and prompt of the parts of a stream.

    Args:
        job: the request.
        prompts: of `read_prompts`.
    """

    def __init__(self, job: Job, prompts: Sequence[PromptRead]) -> None:
        self._job = job
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._written = 0
        chat = bool(prompts) and job.calls[0].messages is not None
        self._first = _of_prompt(prompts[0], job.extras.token_ids) if chat else {}

    def of(self, chunk: Chunk) -> dict[str, Any]:
        """Return the members of a part next to its choice."""
        self._written += len(chunk.tokens)
        members, self._first = self._first, {}
        if not self._job.include_usage:
            return members
        counts: TokenCounts | None = None
        if self._job.extras.continuous_usage:
            counts = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._written,
                "total_tokens": self._prompt_tokens + self._written,
            }
        return {**members, "usage": counts}
