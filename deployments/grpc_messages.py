"""Translation between `turnout.v1` messages and the calls and events of `turnout.calls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from decoding.structures import checked_structure
from deployments.backend import Batch
from deployments.extra_fields import NOT_IN_STREAMS, PromptFields
from deployments.fan_out import first_token
from deployments.grpc_chat import conversation, reasoning_mode, template, tool_choice
from deployments.grpc_values import part_of, struct, struct_values
from deployments.request_fields import checked_salt, parse_sampling, request_id, session_name
from deployments.service import Answer
from deployments.tools import CallReader
from turnout.calls import (
    Chunk,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    ScoreCall,
    ScoredTokens,
    TokenOut,
    Usage,
    cache_class,
)
from turnout.candidate_messages import candidate_set_message, doubt_message
from turnout.cost import Cost, ModelMeter
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import invalid
from turnout.proto import generation_pb2 as pb
from turnout.registry import validated
from turnout.structure import Structure
from turnout.types import FinishReason, RouteLimits, SamplingParams, TokenKind

KINDS: dict[TokenKind, Any] = {kind: pb.TokenKind.Value(f"TOKEN_KIND_{kind.name}") for kind in TokenKind}
FINISH_REASONS: dict[FinishReason, Any] = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
METER_COUNTS = tuple(field.name for field in fields(ModelMeter))


def generate_call(request: pb.GenerateRequest) -> GenerateCall:
    """Raises TurnoutError where the message says something that no model could accept."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid("prompt", "is needed: set one of prompt, prompt_ids and chat")
    prompt: str | tuple[int, ...] | None = None
    if kind == "prompt":
        prompt = request.prompt
    elif kind == "prompt_ids":
        prompt = tuple(request.prompt_ids.ids)
    sampling = parse_sampling(_sampling_values(request), "sampling")
    messages, tools, structure = conversation(request.chat, sampling.structure)
    if structure is not sampling.structure:
        sampling = sampling.model_copy(update={"structure": structure})
    return GenerateCall(
        request_id=request_id(request.request_id),
        model=request.model,
        sampling=sampling,
        prompt=prompt,
        messages=messages if kind == "chat" else None,
        method=request.method or None,
        params=struct_values(request.params, "params"),
        deadline_s=request.deadline_s if request.HasField("deadline_s") else None,
        session=session_name(request.session),
        explain=request.explain,
        candidates=request.candidates,
        cache=cache_class(request.cache),
        parse_special=not request.HasField("parse_special") or request.parse_special,
        rank=request.priority,
        cache_salt=checked_salt(request.cache_salt),
        contrast=part_of(request.contrast, "contrast") if request.HasField("contrast") else None,
        context=request.context,
        uncertainty=part_of(request.uncertainty, "uncertainty") if request.HasField("uncertainty") else None,
        abstain_above=request.abstain_above if request.HasField("abstain_above") else None,
        limits=validated(RouteLimits, {field.name: value for field, value in request.limits.ListFields()}, "limits"),
        tools=tools,
        reasoning=reasoning_mode(request.chat),
        tool_choice=tool_choice(request.chat),
        template=template(request.chat, struct_values(request.chat.chat_template_kwargs, "chat.chat_template_kwargs")),
    )


def prompt_logprobs(request: pb.GenerateRequest, stream: bool) -> int | None:
    """Return the number of alternatives to each token of the prompt that the answer reports; None: nothing of it.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there are too many, or the answer is a stream.
    """
    if not request.HasField("prompt_logprobs"):
        return None
    if stream:
        raise invalid("prompt_logprobs", NOT_IN_STREAMS)
    return validated(PromptFields, {"prompt_logprobs": request.prompt_logprobs}, "").prompt_logprobs


def spelling(request: pb.GenerateRequest) -> dict[str, str]:
    """What our field names are called in this message."""
    names = {name: f"sampling.{name}" for name in SamplingParams.model_fields}
    names |= {"messages": "chat.messages", "tools": "chat.tools", "method.params": "params"}
    names["reasoning_effort"] = "chat.reasoning_effort"
    names |= {"method.params.uncertainty": "uncertainty"} if request.HasField("uncertainty") else {}
    calls = len(request.chat.tools) > 0 and request.chat.tool_choice.mode != "none"
    names["structure"] = "chat.tools" if calls else "structure"
    names["structure.answer"] = "structure"
    names |= {f"structure.{place}.function": f"chat.tools.{place}" for place in range(len(request.chat.tools))}
    if request.WhichOneof("input") == "prompt_ids":
        names["prompt"] = "prompt_ids"
    return names


def score_call(request: pb.ScoreRequest) -> ScoreCall:
    """Raises TurnoutError when a text is missing."""
    completions = tuple(
        _text_or_ids(completion, f"completions.{place}") for place, completion in enumerate(request.completions)
    )
    return ScoreCall(
        request_id=request_id(request.request_id),
        model=request.model,
        prompt=_text_or_ids(request.prompt, "prompt"),
        completions=completions,
        top=request.top,
        parse_special=not request.HasField("parse_special") or request.parse_special,
    )


def embed_call(request: pb.EmbedRequest) -> EmbedCall:
    """Raises TurnoutError when a text is missing."""
    truncate = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    pooling: Any = request.pooling or None
    return EmbedCall(
        request_id=request_id(request.request_id),
        model=request.model,
        input=tuple(_text_or_ids(each, f"input.{place}") for place, each in enumerate(request.input)),
        pooling=pooling,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        truncate=truncate,
        parse_special=not request.HasField("parse_special") or request.parse_special,
    )


def embed_message(call_id: str, made: Embeddings) -> pb.EmbedResponse:
    """Embeddings, in the order asked for."""
    message = pb.EmbedResponse(id=call_id)
    for vector, tokens in zip(made.vectors, made.prompt_tokens, strict=True):
        message.embeddings.add(values=np.frombuffer(vector, "<f4").tolist(), prompt_tokens=tokens)
    return message


def task_call(request: pb.RunTaskRequest) -> TaskCall:
    """Raises TurnoutError when a parameter is a number that is not finite."""
    return TaskCall(
        request_id=request_id(request.request_id),
        model=request.model,
        name=request.name,
        params=struct_values(request.params, "params"),
        deadline_s=request.deadline_s if request.HasField("deadline_s") else None,
    )


def task_message(call_id: str, made: TaskAnswer) -> pb.RunTaskResponse:
    """What a task came to."""
    return pb.RunTaskResponse(id=call_id, result=struct(dict(made.result)), prompt_tokens=made.prompt_tokens)


def _text_or_ids(value: pb.TextOrIds, field: str) -> str | tuple[int, ...]:
    match value.WhichOneof("value"):
        case "text":
            return value.text
        case "token_ids":
            return tuple(value.token_ids.ids)
        case _:
            raise invalid(field, "is needed: set text or token_ids")


def _sampling_values(request: pb.GenerateRequest) -> dict[str, Any]:
    values: dict[str, Any] = {"token_details": request.token_details, "structure": _structure(request)}
    for field, value in request.sampling.ListFields():
        if field.name == "logit_bias":
            values[field.name] = dict(value)
        elif field.name == "processors":
            values[field.name] = tuple(part_of(each, f"processors.{place}") for place, each in enumerate(value))
        else:
            values[field.name] = tuple(value) if field.is_repeated else value
    return values


def _structure(request: pb.GenerateRequest) -> Structure | None:
    kind = request.structure.WhichOneof("kind")
    if kind is None:
        return checked_structure({}, "structure") if request.HasField("structure") else None
    value = getattr(request.structure, kind)
    if kind == "other":
        return checked_structure({"kind": value.kind, "value": value.value}, "structure")
    return checked_structure({kind: list(value.texts) if kind == "choice" else value}, "structure")


def chunk_message(call_id: str, model: str, batch: Batch, reader: CallReader | None = None) -> pb.GenerateChunk:
    """A batch of events; `reader` is the stream's, where its answers may call tools."""
    message = pb.GenerateChunk(id=call_id, model=model)
    for event in batch:
        if isinstance(event, Chunk):
            _fill_choice(message.choices.add(), event if reader is None else reader.part(event))
        elif isinstance(event, Usage):
            message.usage.CopyFrom(usage_message(event))
    return message


def answer_message(call_id: str, model: str, answer: Answer, reader: CallReader | None = None) -> pb.GenerateResponse:
    """A whole answer; `reader` is there where it may call tools."""
    message = pb.GenerateResponse(id=call_id, model=model, usage=usage_message(answer.usage))
    for choice in answer.choices:
        _fill_choice(message.choices.add(), choice if reader is None else reader.whole(choice))
    return message


def fill_prompt(message: pb.GenerateResponse, ids: Sequence[int], text: str, scored: ScoredTokens, top: int) -> None:
    """Report the tokens of a prompt.

    Args:
        message: the answer.
        ids: of all tokens.
        text: of all of them.
        scored: those behind the first one.
        top: most alternatives to each.
    """
    tokens = (first_token(ids[0], text, scored.tokens), *scored.tokens)
    ranks = (None, *(scored.ranks or [None] * len(scored.tokens)))
    for token, rank in zip(tokens, ranks, strict=True):
        broken = dict(token.broken)
        made = message.prompt_tokens.add(id=token.id, text=token.text, logprob=token.logprob, rank=rank)
        made.raw = broken.get(token.id, b"")
        _fill_top(made, token.top[:top], broken)


def _fill_choice(message: pb.Choice | pb.ChoiceDelta, chunk: Chunk) -> None:
    """Set what is not as usual: setting a field takes longer than asking whether it has to be."""
    message.index = chunk.index
    message.text = chunk.text
    if chunk.reasoning:
        message.reasoning = chunk.reasoning
    if chunk.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[chunk.finish_reason]
    if chunk.tool_calls and chunk.finish_reason is FinishReason.STOP:
        message.finish_reason = pb.FINISH_REASON_TOOL_CALLS
    if isinstance(chunk.stop, str):
        message.stop_string = chunk.stop
    elif chunk.stop is not None:
        message.stop_token_id = chunk.stop
    if isinstance(message, pb.ChoiceDelta):
        for part in chunk.call_parts:
            message.call_parts.add(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
    for call in chunk.tool_calls:
        message.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    add = message.tokens.add
    for token in chunk.tokens:
        _fill_token(add(), token)


def _fill_token(message: pb.TokenInfo, token: TokenOut) -> None:
    """See `_fill_choice`."""
    message.id = token.id
    message.text = token.text
    message.source = token.source
    message.kind = KINDS[token.kind]
    if token.logprob is not None:
        message.logprob = token.logprob
    if token.entropy_bits is not None:
        message.entropy_bits = token.entropy_bits
    if token.thinking:
        message.thinking = True
    if not (token.broken or token.top or token.rejected):
        return
    broken = dict(token.broken)
    message.raw = broken.get(token.id, b"")
    _fill_top(message, token.top, broken)
    message.rejected.extend(token.rejected)


def _fill_top(
    message: pb.TokenInfo | pb.PromptToken, top: Sequence[tuple[int, str, float]], broken: Mapping[int, bytes]
) -> None:
    for top_id, text, logprob in top:
        message.top.add(id=top_id, text=text, logprob=logprob, raw=broken.get(top_id, b""))


def usage_message(usage: Usage) -> pb.Usage:
    """What a call used, with its four cost meters."""
    message = pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        speculation=pb.Speculation(**asdict(usage.speculation)),
        switches=usage.switches,
        spent=_cost_message(usage.cost.spent),
        large_only=_cost_message(usage.cost.large_only),
        large_share=usage.cost.large_share,
        large_kept_share=usage.cost.large_kept_share,
        method=usage.method,
        params=struct(usage.params),
        sampling=struct(usage.sampling),
        seed=usage.seed,
        ttft_s=usage.ttft_s,
        wall_s=usage.wall_s,
        notes=usage.notes,
        queue_s=usage.queue_s,
        reasoning_tokens=usage.reasoning_tokens,
        measures=usage.measures,
        candidates=map(candidate_set_message, usage.candidates),
        doubts=map(doubt_message, usage.doubts),
    )
    if usage.route is not None:
        _fill_route(message.route, usage.route)
    if usage.drift is not None:
        message.drift.CopyFrom(pb.Drift(**asdict(usage.drift)))
    for name, meter in usage.models.items():
        counts = {count: getattr(meter, count) for count in METER_COUNTS}
        message.models.add(model=name, flops=meter.flops, **counts)
    return message


def _fill_route(message: pb.Route, route: dict[str, Any]) -> None:
    for name in ("method", "policy", "version", "reason", "suffix", "arm", "kept_from"):
        setattr(message, name, route[name])
    for name in ("features", "scores", "limits"):
        getattr(message, name).update(route[name])
    message.params.update(route["params"])
    message.sampling.update(route["sampling"])


def _cost_message(cost: Cost) -> pb.Cost:
    return pb.Cost(paper=cost.paper, flops=cost.flops, wall_s=cost.wall_s, usd=cost.usd)


def score_message(call_id: str, scored: list[ScoredTokens]) -> pb.ScoreResponse:
    """Scored completions, in the order asked for."""
    message = pb.ScoreResponse(id=call_id)
    for completion in scored:
        entry = message.scored.add(greedy=completion.greedy)
        for token in completion.tokens:
            _fill_token(entry.tokens.add(), token)
    return message


def models_message(models: list[ModelDescription]) -> pb.ListModelsResponse:
    """Every name a request may use."""
    message = pb.ListModelsResponse()
    for model in models:
        message.models.add(
            name=model.name,
            architecture=model.architecture,
            num_parameters=model.num_parameters,
            vocab_size=model.vocab_size,
            max_length=model.max_length,
            roles=model.roles,
            default_method=model.default_method,
            default_params=struct(model.default_params),
            routed=model.routed,
            ends=[pb.EndToken(id=end.id, text=end.text) for end in model.ends],
            ends_source=model.ends_source,
            revision=model.revision,
            other_vocabulary=model.other_vocabulary,
            tool_format=model.tool_format,
        )
    return message


def methods_message(methods: list[MethodDescription]) -> pb.ListMethodsResponse:
    """Every decoding method, with the schema of its parameters."""
    message = pb.ListMethodsResponse()
    for method in methods:
        message.methods.add(
            name=method.name,
            summary=method.summary,
            seeds=method.seeds,
            lossless=method.lossless,
            params_schema=struct(method.params_schema),
        )
    return message
