"""Fields of other servers' bodies: those that are taken, by their names there, and those that are not supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from llguidance.gbnf_to_lark import any_to_lark
from pydantic import Field

from deployments.beam_fields import BeamFields
from deployments.request_fields import MAX_REQUEST_ID_LENGTH, MAX_SALT_LENGTH, BodyPart
from turnout.errors import invalid


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that would change the answer.

    Attributes:
        why: what to do instead.
        neutral: values that ask for nothing, and are taken.
    """

    why: str
    neutral: tuple[Any, ...] = ()


NOT_IN_STREAMS = "is not available in a stream"
IMAGES = "only texts are supported"
UNSUPPORTED = {
    "audio": Unsupported(IMAGES),
    "chat_template": Unsupported("the model's own is used; `chat_template_kwargs` are its variables"),
    "custom_logit_processor": Unsupported("code of requests is not run"),
    "documents": Unsupported("put them into a message", ([],)),
    "function_call": Unsupported("use `tool_choice`", ("none", "auto")),
    "functions": Unsupported("use `tools`", ([],)),
    "kv_transfer_params": Unsupported("the server moves caches by itself", ({},)),
    "logits_processors": Unsupported("code of requests is not run", ([],)),
    "lora_path": Unsupported("adapters are not supported"),
    "media_io_kwargs": Unsupported(IMAGES, ({},)),
    "mm_processor_kwargs": Unsupported(IMAGES, ({},)),
    "modalities": Unsupported(IMAGES, (["text"],)),
    "prompt_embeds": Unsupported("give a text or token ids"),
    "session_id": Unsupported("use `decoding.session`"),
    "suffix": Unsupported("models here only continue a text", ("",)),
    "vllm_xargs": Unsupported("use `decoding`", ({},)),
}


def refuse_unsupported(name: str, value: Any) -> None:
    """Raise where a field asks for what is not supported.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if (known := UNSUPPORTED.get(name)) is not None and value not in known.neutral:
        allowed = f"; allowed: {', '.join(map(repr, known.neutral))}" if known.neutral else ""
        raise invalid(name, f"is not supported: {known.why}{allowed}")


@dataclass(frozen=True, slots=True)
class Extras:
    """What a body wants its answer to hold besides OpenAI's fields.

    Attributes:
        token_ids: ids of the prompt's and the answers' tokens.
        tokens_as_ids: log-probabilities name tokens by id.
        prompt_logprobs: alternatives to each token of the prompt; None: no log-probabilities of it.
        continuous_usage: whether each part of a stream counts the tokens so far.
    """

    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    continuous_usage: bool = False

    @property
    def read_prompts(self) -> bool:
        """Whether the tokens of prompts have to be known."""
        return self.token_ids or self.continuous_usage or self.prompt_logprobs is not None


NO_EXTRAS = Extras()


class StructuredOutputs(BodyPart):
    """`structured_outputs`: vLLM's name for `decoding.structure`; exactly one kind."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str | None, Field(description="in Lark's notation, or GBNF")] = None
    json_object: bool | None = None


Same = "the same as decoding.structure.{}"


class CallFields(BodyPart):
    """Fields of vLLM that say how a request waits and shares caches."""

    priority: Annotated[
        int, Field(ge=-(2**63), lt=2**63, description="of the tenant's waiting requests, the lowest is answered first")
    ] = 0
    cache_salt: Annotated[
        str,
        Field(max_length=MAX_SALT_LENGTH, description="prefix caches are shared only with requests of the same salt"),
    ] = ""


class PromptFields(BodyPart):
    """What an answer reports of its prompt."""

    prompt_logprobs: Annotated[
        int | None, Field(ge=0, le=20, description="alternatives reported to each token of the prompt; not in streams")
    ] = None


class ExtraFields(CallFields, PromptFields, BeamFields):
    """Fields of vLLM and SGLang in the bodies of both endpoints."""

    request_id: Annotated[
        str, Field(max_length=MAX_REQUEST_ID_LENGTH, description="names the answer and its log lines; see X-Request-Id")
    ] = ""
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="the same as decoding.structure; one of its members")
    ] = None
    guided_json: Annotated[dict[str, Any] | bool | str | None, Field(description=Same.format("json_schema"))] = None
    guided_regex: Annotated[str | None, Field(description=Same.format("regex"))] = None
    guided_choice: Annotated[list[str] | None, Field(description=Same.format("choice"))] = None
    guided_grammar: Annotated[str | None, Field(description=f"{Same.format('grammar')}, or GBNF")] = None
    json_schema: Annotated[dict[str, Any] | bool | str | None, Field(description=Same.format("json_schema"))] = None
    regex: Annotated[str | None, Field(description=Same.format("regex"))] = None
    ebnf: Annotated[str | None, Field(description=f"{Same.format('grammar')}, or GBNF")] = None
    return_token_ids: Annotated[bool, Field(description="report ids of the prompt's and the answer's tokens")] = False
    return_tokens_as_token_ids: Annotated[bool, Field(description="name tokens in logprobs as token_id:N")] = False

    def structure(self) -> tuple[str, dict[str, Any]] | None:
        """Return the name of the field that asks for a structure, and what it asks for as `decoding.structure` does.

        Raises:
            TurnoutError: INVALID_ARGUMENT: there are several.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        asked = {
            "structured_outputs.json": ("json_schema", outputs.json_),
            "structured_outputs.regex": ("regex", outputs.regex),
            "structured_outputs.choice": ("choice", outputs.choice),
            "structured_outputs.grammar": ("grammar", outputs.grammar),
            "structured_outputs.json_object": ("json_object", outputs.json_object or None),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
            "json_schema": ("json_schema", self.json_schema),
            "regex": ("regex", self.regex),
            "ebnf": ("grammar", self.ebnf),
        }
        given = {field: (kind, value) for field, (kind, value) in asked.items() if value is not None}
        if not given:
            return None
        field, *others = given
        if others:
            raise invalid(others[0], f"conflicts with {field}; give one of them")
        kind, value = given[field]
        return field, {kind: _lark(field, value) if kind == "grammar" and isinstance(value, str) else value}

    def extras(self, continuous_usage: bool) -> Extras:
        """Return what the answer is to hold."""
        return Extras(self.return_token_ids, self.return_tokens_as_token_ids, self.prompt_logprobs, continuous_usage)


def _lark(field: str, grammar: str) -> str:
    """Return a grammar in Lark's notation; other servers take llama.cpp's."""
    if "::=" not in grammar:
        return grammar
    try:
        lark: str = any_to_lark(grammar)
    except Exception as error:  # whatever the converter stumbles over
        raise invalid(field, f"is neither Lark's notation nor GBNF: {str(error)[:200]}") from None
    return lark.replace("%llguidance {}", "", 1).lstrip()
