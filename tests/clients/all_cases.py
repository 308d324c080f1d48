"""The cases, in the order in which a client is asked: models, completions, chat, refusals, giving up."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.clients import responses_cases
from tests.clients.cases import (
    NO_ANSWER,
    OTHER,
    QUESTION,
    Case,
    Check,
    Result,
    both,
    chat,
    choices,
    completion,
    freed,
    ids,
    refused,
    same_as,
    texts,
    tokenizer,
    usage,
)
from tests.clients.field_cases import FIELDS

Others = dict[str, Result]
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 7, "n": 3}
DIGIT = {"type": "object", "properties": {"digit": {"enum": [1, 2, 3]}}, "required": ["digit"],
         "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT, "strict": True}}
TOOL = {"type": "function", "function": {"name": "press", "description": "Presses a key.", "parameters": DIGIT}}
TOOLS: dict[str, Any] = {
    "model": "tools",
    "tools": [TOOL],
    "tool_choice": "required",
    "max_tokens": 200,
    "parallel_tool_calls": False,
}
SIXES = ids("6")[0]
STOP = " "  # in whatever a model of texts writes


def lists_all(got: Result, _: Others) -> None:
    real = {"demo", "small", "large", "tools", "tools-small", "tools-large"}
    assert {each["id"] for each in got["value"]} == real | {"slow", "gone", "fake-small", "fake-large"}
    for each in got["value"]:
        assert (each["object"], each["owned_by"]) == ("model", "turnout")
        assert each["created"] > 1_700_000_000


def lists_its_own(got: Result, _: Others) -> None:
    assert {each["id"] for each in got["value"]} == {"demo", "small", "large"}


def is_the_pool(got: Result, _: Others) -> None:
    assert got["value"]["id"] == "demo"
    assert got["value"]["turnout"]["roles"] == {"small": "small", "large": "large"}


def one_text(got: Result, _: Others) -> None:
    value = got["value"]
    assert (value["object"], value["model"]) == ("text_completion", "demo")
    assert value["id"].startswith("cmpl-")
    [choice] = choices(got)
    assert choice.text
    assert choice.reasons in (["stop"], ["length"])
    assert usage(got)["prompt_tokens"] == len(ids(QUESTION))
    assert 1 <= usage(got)["completion_tokens"] <= 12


def two_prompts(got: Result, others: Others) -> None:
    assert texts(got)[0] == texts(others["completions: a text"])[0]
    assert len(texts(got)) == 2
    assert usage(got)["prompt_tokens"] == len(ids(QUESTION)) + len(ids(OTHER))


def three_of_each(got: Result, others: Others) -> None:
    assert len(texts(got)) == 6
    assert texts(got)[:3] == texts(others["completions: n with a seed"])


def three_answers(got: Result, _: Others) -> None:
    assert len(set(texts(got))) > 1
    assert len(texts(got)) == 3


def differs_from_seed_7(got: Result, others: Others) -> None:
    assert texts(got) != texts(others["completions: n with a seed"])


def completion_logprobs(got: Result, _: Others) -> None:
    [choice] = choices(got)
    assert "".join(choice.tokens) == choice.text
    assert all(each is not None and -math.inf < each <= 0 for each in choice.logprobs)
    told = got["value"]["choices"][0]["logprobs"]
    assert len(told["top_logprobs"]) == len(choice.tokens) == usage(got)["completion_tokens"]
    for token, logprob, top in zip(choice.tokens, choice.logprobs, told["top_logprobs"], strict=True):
        assert 1 <= len(top) <= 3
        assert top[token] == logprob == max(top.values()), "greedy: the most probable token"
    at = 0
    for token, offset in zip(choice.tokens, told["text_offset"], strict=True):
        assert offset == at
        at += len(token)


def no_alternatives(got: Result, _: Others) -> None:
    assert all(not each for each in got["value"]["choices"][0]["logprobs"]["top_logprobs"])


def echoed(got: Result, others: Others) -> None:
    assert texts(got) == [QUESTION + texts(others["completions: a text"])[0]]


def echoed_ids(got: Result, others: Others) -> None:
    assert texts(got) == texts(others["completions: echo"])


def echo_scored(got: Result, _: Others) -> None:
    [choice] = choices(got)
    assert choice.logprobs[0] is None
    assert all(each is not None and each <= 0 for each in choice.logprobs[1:])
    assert "".join(choice.tokens) == choice.text
    assert len(choice.tokens) == len(ids(QUESTION)) + usage(got)["completion_tokens"]


def stopped(name: str, stop: str) -> Check:
    """The text of another case, up to what ends it."""

    def check(got: Result, others: Others) -> None:
        [choice] = choices(got)
        [whole] = texts(others[name])
        assert choice.text == whole.partition(stop)[0] != whole
        assert choice.reasons == ["stop"]

    return check


def only_sixes(got: Result, _: Others) -> None:
    assert texts(got) == [tokenizer().decode([SIXES] * 5)]
    assert choices(got)[0].reasons == ["length"]


def no_sixes(got: Result, _: Others) -> None:
    assert "6" not in texts(got)[0]


def in_pieces(got: Result, _: Others) -> None:
    assert len(got["chunks"]) > 1
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in got["chunks"]}) == 1
    assert all(len(choice.reasons) == 1 for choice in choices(got)), "each answer ends once"


def no_usage(got: Result, _: Others) -> None:
    assert all(chunk.get("usage") is None for chunk in got["chunks"])


def usage_last(name: str) -> Any:
    def check(got: Result, others: Others) -> None:
        *before, last = got["chunks"]
        assert all(chunk.get("usage") is None and chunk["choices"] for chunk in before)
        assert last["choices"] == []
        counts = ("prompt_tokens", "completion_tokens")
        assert [usage(got)[count] for count in counts] == [usage(others[name])[count] for count in counts]

    return check


def one_message(got: Result, _: Others) -> None:
    value = got["value"]
    assert (value["object"], value["model"]) == ("chat.completion", "demo")
    [choice] = choices(got)
    assert choice.role == "assistant"
    assert choice.text
    assert usage(got)["completion_tokens"] >= 1


def longer_prompt(got: Result, others: Others) -> None:
    one_message(got, others)
    assert usage(got)["prompt_tokens"] > usage(others["chat: one turn"])["prompt_tokens"]


def role_first(got: Result, _: Others) -> None:
    first: dict[int, dict[str, Any]] = {}
    for chunk in got["chunks"]:
        for each in chunk["choices"]:
            first.setdefault(each["index"], each["delta"])
    assert all(delta["role"] == "assistant" for delta in first.values())
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in got["chunks"])


def cut_after_one(got: Result, _: Others) -> None:
    assert usage(got)["completion_tokens"] == 1
    assert choices(got)[0].reasons == ["length"]


def chat_logprobs(got: Result, _: Others) -> None:
    [choice] = choices(got)
    told = got["value"]["choices"][0]["logprobs"]["content"]
    assert len(told) == usage(got)["completion_tokens"]
    assert choice.text.startswith("".join(choice.tokens)[:10])
    assert bytes(byte for each in told for byte in each["bytes"]).decode().startswith(choice.text)
    for each in told:
        assert each["logprob"] <= 0
        assert len(each["top_logprobs"]) == 2
        assert each["top_logprobs"][0]["logprob"] == each["logprob"]


def fits_the_schema(got: Result, _: Others) -> None:
    [choice] = choices(got)
    assert choice.reasons == ["stop"]
    assert json.loads(choice.text)["digit"] in (1, 2, 3)


def begins_an_object(got: Result, _: Others) -> None:
    [choice] = choices(got)
    if choice.reasons == ["stop"]:
        assert isinstance(json.loads(choice.text), dict)
    assert choice.text.startswith("{")


def is_yes_or_no(got: Result, _: Others) -> None:
    assert texts(got)[0] in ("yes", "no")


def calls_the_tool(got: Result, _: Others) -> None:
    [choice] = choices(got)
    [(name, arguments)] = choice.calls
    assert name == "press"
    assert json.loads(arguments)["digit"] in (1, 2, 3)
    assert choice.reasons == ["tool_calls"]
    assert choice.text == ""


def no_call(got: Result, _: Others) -> None:
    [choice] = choices(got)
    assert choice.calls == []
    assert choice.text


def told_when(seconds: range) -> Any:
    def check(got: Result, _: Others) -> None:
        assert int(got["error"]["retry_after"]) in seconds, got["error"]

    return check


def timed_out(got: Result, others: Others) -> None:
    assert got["error"]["class"] in ("APITimeoutError", "APIConnectionTimeoutError"), got
    freed(got, others)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


STREAM: dict[str, Any] = {"stream": True}
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SLOW: dict[str, Any] = {"model": "slow", "prompt": "slow", "max_tokens": 400}

MODELS = [
    Case("models: list", "models.list", {}, lists_all),
    Case("models: list of a tenant with one pool", "models.list", {}, lists_its_own, "narrow"),
    Case("models: retrieve", "models.retrieve", {"model": "demo"}, is_the_pool),
    Case("models: retrieve an unknown one", "models.retrieve", {"model": "gpt"},
         refused("NotFoundError", 404, "model", "model_not_found")),
]  # fmt: skip

COMPLETIONS = [
    completion("a text", one_text),
    completion("a list of texts", two_prompts, prompt=[QUESTION, OTHER]),
    completion("token ids", same_as("completions: a text"), prompt=ids(QUESTION)),
    completion("a list of token ids", same_as("completions: a list of texts"), prompt=[ids(QUESTION), ids(OTHER)]),
    completion("n with a seed", three_answers, **SEEDED),
    completion("the same seed again", same_as("completions: n with a seed"), **SEEDED),
    completion("another seed", differs_from_seed_7, **SEEDED | {"seed": 8}),
    completion("several prompts, n of each", three_of_each, prompt=[QUESTION, OTHER], **SEEDED),
    completion("top_p, penalties and user", one_text,
               top_p=0.5, presence_penalty=0.5, frequency_penalty=0.5, user="me"),
    completion("logprobs", completion_logprobs, logprobs=3),
    completion("logprobs of 0", no_alternatives, logprobs=0),
    completion("echo", echoed, echo=True),
    completion("echo of token ids", echoed_ids, echo=True, prompt=ids(QUESTION)),
    completion("echo with logprobs", echo_scored, echo=True, logprobs=1, max_tokens=1),
    completion("stop", stopped("completions: a text", STOP), stop=STOP),
    completion("several stops", stopped("completions: a text", STOP), stop=["never this", STOP]),
    completion("logit_bias for a token", only_sixes, logit_bias={str(SIXES): 100}, max_tokens=5),
    completion("logit_bias against a token", no_sixes, logit_bias={str(SIXES): -100}),
    completion("stream", both(in_pieces, no_usage, same_as("completions: a text")), **STREAM),
    completion("stream with usage", both(usage_last("completions: a text"), same_as("completions: a text")),
               **WITH_USAGE),
    completion("stream of a seed", both(in_pieces, same_as("completions: n with a seed")), **SEEDED, **STREAM),
    completion("stream of several prompts", same_as("completions: several prompts, n of each"),
               prompt=[QUESTION, OTHER], **SEEDED, **STREAM),
    completion("stream with logprobs", same_as("completions: logprobs"), logprobs=3, **STREAM),
    completion("stream with echo", same_as("completions: echo"), echo=True, **STREAM),
    completion("stream with stop", same_as("completions: stop"), stop=STOP, **STREAM),
    completion("a member alone", same_as("completions: a decoding method"), model="large"),
    completion("a decoding method", one_text, decoding={"method": "speculative"}),
]  # fmt: skip

CHAT = [
    chat("one turn", one_message),
    chat("system", longer_prompt, messages=[{"role": "system", "content": "Add."}, user(QUESTION)]),
    chat("developer", same_as("chat: system"), messages=[{"role": "developer", "content": "Add."}, user(QUESTION)]),
    chat("several turns", longer_prompt,
         messages=[user(OTHER), {"role": "assistant", "content": "42"}, user(QUESTION)]),
    chat("an answer goes back as it came", longer_prompt, then="go on"),
    chat("content in parts", same_as("chat: one turn"),
         messages=[user([{"type": "text", "text": QUESTION[:9]}, {"type": "text", "text": QUESTION[9:]}])]),
    chat("max_completion_tokens", cut_after_one, max_tokens=None, max_completion_tokens=1),
    chat("n with a seed", three_answers, **SEEDED),
    chat("the same seed again", same_as("chat: n with a seed"), **SEEDED),
    chat("stop", stopped("chat: one turn", "="), stop=["="]),
    chat("logprobs and top_logprobs", chat_logprobs, logprobs=True, top_logprobs=2),
    chat("stream", both(in_pieces, role_first, no_usage, same_as("chat: one turn")), **STREAM),
    chat("stream with usage", both(usage_last("chat: one turn"), same_as("chat: one turn")), **WITH_USAGE),
    chat("stream of a seed", both(in_pieces, same_as("chat: n with a seed")), **SEEDED, **STREAM),
    chat("stream with logprobs", same_as("chat: logprobs and top_logprobs"), logprobs=True, top_logprobs=2, **STREAM),
    chat("stream with stop", both(in_pieces, same_as("chat: stop")), stop=["="], **STREAM),
    chat("response_format json_schema", fits_the_schema, response_format=FORM, max_tokens=100),
    chat("response_format json_schema, stream", same_as("chat: response_format json_schema"),
         response_format=FORM, max_tokens=100, **STREAM),
    chat("response_format json_object", begins_an_object, response_format={"type": "json_object"}),
    chat("response_format text", same_as("chat: one turn"), response_format={"type": "text"}),
    chat("a choice of texts", is_yes_or_no, decoding={"structure": {"choice": ["yes", "no"]}}),
    chat("tools", calls_the_tool, **TOOLS),
    chat("tools, stream", both(calls_the_tool, same_as("chat: tools")), **TOOLS, **STREAM),
    chat("tools, a named one", calls_the_tool,
         **TOOLS | {"tool_choice": {"type": "function", "function": {"name": "press"}}}),
    chat("tools, what one answered", no_call, model="tools", tools=[TOOL], tool_choice="none",
         messages=[user("x"), {"role": "assistant", "tool_calls": [
             {"id": "c", "type": "function", "function": {"name": "press", "arguments": "{}"}}]},
             {"role": "tool", "tool_call_id": "c", "content": "done"}]),
    chat("tools, a call goes back as it came", calls_the_tool, **TOOLS, then="go on"),
    chat("tools, null for what is not given", calls_the_tool,
         **TOOLS | {"tools": [{**TOOL, "function": {**TOOL["function"], "description": None, "strict": None}}]}),
    chat("tools, none", no_call, **TOOLS | {"tool_choice": "none"}),
]  # fmt: skip

REFUSALS = [
    completion("best_of", refused("BadRequestError", 400, "best_of"), best_of=3),
    completion("suffix", refused("BadRequestError", 400, "suffix"), suffix="end"),
    completion("a temperature of 3", refused("BadRequestError", 400, "temperature"), temperature=3),
    completion("the same in a stream", refused("BadRequestError", 400, "temperature"), temperature=3, **STREAM),
    completion("21 logprobs", refused("BadRequestError", 400, "logprobs"), logprobs=21),
    completion("an empty prompt", refused("BadRequestError", 400, "prompt"), prompt=""),
    completion("no prompts", refused("BadRequestError", 400, "prompt"), prompt=[]),
    completion("a token that is none", refused("BadRequestError", 400, "prompt"), prompt=[1 << 40]),
    completion("a prompt that does not fit", refused("BadRequestError", 400, "prompt"), prompt=ids(QUESTION) * 200),
    completion("an unknown model", refused("NotFoundError", 404, "model", "model_not_found"), model="gpt"),
    completion("an unknown model, stream", refused("NotFoundError", 404, "model", "model_not_found"),
               model="gpt", **STREAM),
    completion("an unknown method", refused("NotFoundError", 404, "decoding.method"), decoding={"method": "magic"}),
    completion("an unknown key", refused("AuthenticationError", 401, code="invalid_api_key"), tenant="nobody"),
    completion("a pool that is not the tenant's", refused("PermissionDeniedError", 403, "model"),
               tenant="narrow", model="slow"),
    completion("the only request of a minute", one_text, tenant="once"),
    completion("one more", both(refused("RateLimitError", 429, code="rate_limit_exceeded"), told_when(range(1, 61))),
               tenant="once"),
    completion("the whole budget", one_text, tenant="poor"),
    completion("beyond the budget", refused("RateLimitError", 429, code="insufficient_quota"), tenant="poor"),
    completion("a pool that is gone", both(refused("InternalServerError", 503), told_when(range(2, 3))), model="gone"),
    completion("a deadline", refused("InternalServerError", 504, "deadline_s"),
               **SLOW | {"prompt": NO_ANSWER}, deadline_s=0.3),
    chat("no messages", refused("BadRequestError", 400, "messages"), messages=[]),
    chat("an unknown role", refused("BadRequestError", 400, "messages.0.role"),
         messages=[{"role": "poet", "content": "x"}]),
    chat("a picture", refused("BadRequestError", 400, "messages.0.content.0"),
         messages=[user([{"type": "image_url", "image_url": {"url": "data:,"}}])]),
    chat("top_logprobs without logprobs", refused("BadRequestError", 400, "top_logprobs"), top_logprobs=1),
    chat("a schema that nothing fits", refused("BadRequestError", 400, "response_format"),
         response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": False}}),
    chat("tools that the template has no place for", calls_the_tool, **TOOLS | {"model": "demo"}),
    chat("a tool's answer that the template has no place for", no_call, max_tokens=5,
         messages=[user("x"), {"role": "assistant", "tool_calls": [
             {"id": "c", "type": "function", "function": {"name": "press", "arguments": "{}"}}]},
             {"role": "tool", "tool_call_id": "c", "content": "done"}]),
    chat("a choice of tools without tools", refused("BadRequestError", 400, "tool_choice"), tool_choice="required"),
]  # fmt: skip

GIVING_UP = [
    completion("a stream closed after its first chunk", freed, **SLOW, **STREAM, then="close"),
    chat("a stream closed after its first chunk", freed, then="close",
         model="slow", messages=[user("slow")], max_tokens=400, **STREAM),
    completion("a stream given up before its first chunk", timed_out,
               **SLOW | {"prompt": NO_ANSWER}, **STREAM, then="give up"),
    completion("a whole answer given up", timed_out, **SLOW | {"prompt": NO_ANSWER}, then="give up"),
]  # fmt: skip

CASES = [*MODELS, *COMPLETIONS, *CHAT, *FIELDS, *responses_cases.CASES, *REFUSALS, *GIVING_UP]
