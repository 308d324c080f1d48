"""Options of a client's calls, by name and type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from turnout.calls import CacheClass, ReasoningMode
from turnout.tools import Tool


class Sampling(TypedDict, total=False):
    """Sampling parameters; what is absent takes the server's default. See `turnout.types.SamplingParams`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    processors: Sequence[str | Mapping[str, Any]]
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int
    max_tokens: int
    n: int
    logprobs: int
    thinking_token_budget: int
    min_tokens: int
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    truncate_prompt_tokens: int


class Options(Sampling, total=False):
    """What a call may ask for.

    Keys besides the sampling parameters: `model` (a pool or a member; may be absent where there is one pool),
    `method` and `params` (how to decode), `deadline_s` (seconds the call may take), `request_id` (for logs), and for
    routing `session`, `limits` (any of max_cost, max_latency_s, quality) and `explain` (say why in the usage).
    `cache` is exact, or lossy: KV that was stored or reused with a loss may be used; `cache_salt` names a part of the
    tenant's prefix caches that only requests with the same salt share. `priority` (0) orders the tenant's requests that
    wait, the lowest number first.
    `prompt_logprobs` (0 to 20; not of streams) reports the tokens of the prompt with that many alternatives to each.
    `token_details` reports each token's entropy, and drafted tokens that were refused in its place; `candidates`
    reports in the usage what answers were chosen from, or a search found.
    `parse_special` (True) takes special tokens that a prompt spells out as meant; in messages they never are.
    `structure` is what the answer's text must fit: one of json_schema, json_object (True), regex, grammar and choice.
    With `messages`, `tools` are functions that the answer may call, as `Tool` or in OpenAI's form, and `tool_choice` is
    none, auto, required or the name of the one that must be called; `parallel_tool_calls` (True): an answer may call
    several. `contrast` is a name, or an object with one and its parameters: streams that the logits are combined with;
    `context` is text that the question is about, before the prompt or the last user message. `chat_template_kwargs` are
    variables of the model's chat template, `reasoning_effort` is none, minimal, low, medium, high or xhigh (or as the
    pool is configured), and `continue_final_message` continues the last message, which is the assistant's. `reasoning`
    says where the thinking goes: split (apart from the text), hide or raw (into the text). `uncertainty` is a name, or
    an object with one and its parameters: what measures the doubt about each answer; above `abstain_above`, a text that
    says so stands in place of the answer.
    """

    model: str
    method: str | None
    params: Mapping[str, Any]
    deadline_s: float | None
    request_id: str
    session: str
    explain: bool
    limits: Mapping[str, float]
    cache: CacheClass
    cache_salt: str
    priority: int
    token_details: bool
    candidates: bool
    parse_special: bool
    structure: Mapping[str, Any]
    tools: Iterable[Tool | Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    reasoning_effort: str
    add_generation_prompt: bool
    continue_final_message: bool
    reasoning: ReasoningMode
    prompt_logprobs: int
    contrast: str | Mapping[str, Any] | None
    context: str
    uncertainty: str | Mapping[str, Any] | None
    abstain_above: float | None
