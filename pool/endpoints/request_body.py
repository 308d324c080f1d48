"""From a call to the body of a request to an endpoint, in the fields that its dialect knows."""

from __future__ import annotations

import json
from typing import Any

from turnout.calls import ChatMessage, GenerateCall
from turnout.endpoint_config import Dialect, EndpointConfig
from turnout.errors import TurnoutError, invalid
from turnout.structure import Structure
from turnout.tool_formats.grammar import CallRules
from turnout.types import MOST_TOKENS, SamplingParams

CHAT, COMPLETIONS = "/chat/completions", "/completions"
COMMON = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# What else a dialect knows, and its name there.
MORE: dict[Dialect, dict[str, str]] = {
    "openai": {},
    "vllm": {
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "stop_token_ids": "stop_token_ids",
        "ignore_eos": "ignore_eos",
        "min_tokens": "min_tokens",
        "bad_words": "bad_words",
        "allowed_token_ids": "allowed_token_ids",
        "include_stop_str_in_output": "include_stop_str_in_output",
        "skip_special_tokens": "skip_special_tokens",
        "truncate_prompt_tokens": "truncate_prompt_tokens",
    },
    "llama.cpp": {
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repeat_penalty",
        "ignore_eos": "ignore_eos",
    },
}
EXTRA = (*MORE["vllm"], "processors")
SEED_MASK = 2**31 - 1  # seeds that every server takes
STRUCTURES = {"regex": "regex", "grammar": "grammar", "choice": "choice"}  # of vLLM's structured_outputs


def request_body(call: GenerateCall, name: str, config: EndpointConfig) -> tuple[str, dict[str, Any]]:
    """Path and body of a request.

    Args:
        call: asks one model for `sampling.n` answers.
        name: the model's in the configuration, for messages.
        config: of the endpoint.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the call has what the endpoint's dialect has no field for; names the field.
    """
    usage = {"include_usage": True}
    body: dict[str, Any] = {"model": config.model, "stream": True, "stream_options": usage}
    if config.dialect == "vllm":  # counts in each event, so that what breaks off is paid for as well
        usage["continuous_usage_stats"] = True
    elif config.dialect == "llama.cpp":
        body["timings_per_token"] = True
    if call.messages is not None:
        path = CHAT
        body["messages"] = [_message(turn) for turn in call.messages]
        _add_tools(body, call)
        _add_template(body, call, name, config.dialect)
    else:
        path = COMPLETIONS
        if not isinstance(call.prompt, str):
            raise invalid("prompt", f"token ids need the tokens of the model, and {name!r} is an endpoint; send text")
        body["prompt"] = call.prompt
    _add_sampling(body, call.sampling, name, config.dialect, path == CHAT)
    if call.cache_salt:
        if config.dialect != "vllm":
            raise _unknown("cache_salt", name, config.dialect)
        body["cache_salt"] = call.cache_salt
    if call.sampling.thinking_token_budget is not None and config.dialect == "vllm":
        body["thinking_token_budget"] = call.sampling.thinking_token_budget
    structure = call.sampling.structure
    if structure is not None and structure.kind == "tools":
        structure = CallRules.of(structure).answer
    if structure is not None:
        _add_structure(body, structure, name, config.dialect)
    return path, body


def _message(turn: ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        made["content"] = turn.content or None
        made["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in turn.tool_calls
        ]
    if turn.reasoning:
        made["reasoning_content"] = turn.reasoning
    if turn.tool_call_id:
        made["tool_call_id"] = turn.tool_call_id
    return made


def _add_tools(body: dict[str, Any], call: GenerateCall) -> None:
    if not call.tools:
        return
    structure = call.sampling.structure
    rules = CallRules.of(structure) if structure is not None and structure.kind == "tools" else None
    body["tools"] = [
        {
            "type": "function",
            "function": {"name": each.name, "description": each.description, "parameters": json.loads(each.parameters)},
        }
        for each in call.tools
        if rules is None or each.name in rules.functions
    ]
    if rules is not None and not rules.parallel:
        body["parallel_tool_calls"] = False
    if call.tool_choice in ("none", "required"):
        body["tool_choice"] = call.tool_choice
    elif call.tool_choice:
        body["tool_choice"] = {"type": "function", "function": {"name": call.tool_choice}}


def _add_template(body: dict[str, Any], call: GenerateCall, name: str, dialect: Dialect) -> None:
    template = call.template
    if template.effort:
        body["reasoning_effort"] = template.effort
    if template.kwargs:
        if dialect == "openai":
            raise _unknown("chat_template_kwargs", name, dialect)
        body["chat_template_kwargs"] = template.kwargs
    if template.continue_final_message:
        if dialect == "openai":
            raise _unknown("continue_final_message", name, dialect)
        if dialect == "vllm":  # llama.cpp continues a last message of the assistant by itself
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif template.add_generation_prompt is False:
        if dialect != "vllm":
            raise _unknown("add_generation_prompt", name, dialect)
        body["add_generation_prompt"] = False


def _add_sampling(body: dict[str, Any], sampling: SamplingParams, name: str, dialect: Dialect, chat: bool) -> None:
    """What the request or the pool sets; the rest is left to the server's own defaults."""
    set_, usual = sampling.model_fields_set, SamplingParams()
    for field in COMMON:
        if field in set_ or getattr(sampling, field) != getattr(usual, field):
            body[field] = getattr(sampling, field)
    known = MORE[dialect]
    for field in EXTRA:
        value, differs = getattr(sampling, field), getattr(sampling, field) != getattr(usual, field)
        if field not in known:
            if differs:
                raise _unknown(field, name, dialect)
        elif differs or field in set_:
            body[known[field]] = list(value) if isinstance(value, tuple) else value
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.seed is not None:
        body["seed"] = sampling.seed & SEED_MASK
    if sampling.max_tokens < MOST_TOKENS:
        body["max_completion_tokens" if chat and dialect == "openai" else "max_tokens"] = sampling.max_tokens
    if sampling.n > 1:
        body["n"] = sampling.n
    if sampling.logprobs is not None:
        # llama.cpp takes 0 for none at all in completions, and an absence for twenty in chats.
        most = max(sampling.logprobs, 1) if dialect == "llama.cpp" else sampling.logprobs
        if chat:
            body["logprobs"] = True
            if most:
                body["top_logprobs"] = most
        else:
            body["logprobs"] = most


def _add_structure(body: dict[str, Any], structure: Structure, name: str, dialect: Dialect) -> None:
    if structure.kind == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif structure.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(structure.value), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif dialect == "vllm" and structure.kind in STRUCTURES:
        value = json.loads(structure.value) if structure.kind == "choice" else structure.value
        body["structured_outputs"] = {STRUCTURES[structure.kind]: value}
    else:
        raise _unknown("structure", name, dialect, f"{structure.kind}; it has json_schema and json_object")


def _unknown(field: str, name: str, dialect: Dialect, what: str = "") -> TurnoutError:
    about = f"endpoint {name!r} speaks the dialect {dialect}, which has no {what or 'such field'}"
    return invalid(field, f"{about}; leave it out, or see models.{name}.endpoint.dialect")
