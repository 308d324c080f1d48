"""Cases with fields that other servers have, which OpenAI's clients pass on: `extra_body` in Python."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.cases import (
    OTHER,
    QUESTION,
    ROUNDING,
    Check,
    Result,
    both,
    chat,
    choices,
    completion,
    ids,
    refused,
    same_as,
    texts,
    tokenizer,
    usage,
)

Others = dict[str, Result]
DIGITS = sorted({token for digit in "0123456789" for token in ids(digit)})
SIX = ids("6")[0]
STOP = " "
LONG: dict[str, Any] = {"max_tokens": 40, "min_tokens": 40}
SPECULATIVE = {"decoding": {"method": "speculative", "params": {"drafter": "model_chain", "length": "fixed"}}}
COUNTED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def of_length(count: int) -> Check:
    """The answer has this number of tokens."""

    def check(got: Result, _: Others) -> None:
        assert usage(got)["completion_tokens"] == count
        assert choices(got)[0].reasons == ["length"]

    return check


def only_digits(got: Result, _: Others) -> None:
    assert texts(got)[0].isdigit()


def no_sixes(got: Result, _: Others) -> None:
    assert texts(got)[0]
    assert "6" not in texts(got)[0]


def stop_left_in(got: Result, others: Others) -> None:
    [whole] = texts(others["completions: a text"])
    assert texts(got) == [whole.partition(STOP)[0] + STOP]
    assert got["value"]["choices"][0]["stop_reason"] == STOP


def stopped_by_a_token(got: Result, others: Others) -> None:
    [whole] = texts(others["completions: a text"])
    assert "6" in whole
    assert got["value"]["choices"][0]["stop_reason"] == SIX
    assert texts(got) == [whole.partition("6")[0]]


def prompt_scored(got: Result, others: Others) -> None:
    choice = got["value"]["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    echoed = choices(others["completions: echo with logprobs"])[0].logprobs
    found = [entry[str(token)] for entry, token in zip(rest, ids(QUESTION)[1:], strict=True)]
    assert [each["logprob"] for each in found] == pytest.approx(echoed[1 : len(found) + 1], abs=ROUNDING)
    for entry, own in zip(rest, found, strict=True):
        assert len(entry) in (2, 3)
        assert (own["rank"] <= 2) == (len(entry) == 2)
        assert own["logprob"] <= max(each["logprob"] for each in entry.values()) <= 0


def told_ids(got: Result, others: Others) -> None:
    choice = got["value"]["choices"][0]
    assert choice["prompt_token_ids"] == ids(QUESTION)
    assert len(choice["token_ids"]) == usage(got)["completion_tokens"]
    assert tokenizer().decode(choice["token_ids"]) == texts(got)[0] == texts(others["completions: a text"])[0]


def ids_for_names(got: Result, others: Others) -> None:
    named = got["value"]["choices"][0]["logprobs"]["content"]
    plain = others["chat: logprobs and top_logprobs"]["value"]["choices"][0]["logprobs"]["content"]
    assert [tokenizer().decode([int(each["token"].removeprefix("token_id:"))]) for each in named][:3] == [
        each["token"] for each in plain
    ][:3]


def counted(got: Result, _: Others) -> None:
    *parts, last = [chunk["usage"] for chunk in got["chunks"]]
    assert [each["completion_tokens"] for each in parts][-1] == last["completion_tokens"]
    assert {each["prompt_tokens"] for each in parts} == {last["prompt_tokens"]}


def is_one_of(*allowed: str) -> Check:
    """The answer is one of these texts."""

    def check(got: Result, _: Others) -> None:
        assert texts(got)[0] in allowed

    return check


def read_five(got: Result, _: Others) -> None:
    assert usage(got)["prompt_tokens"] == 5


def prompt_alone(got: Result, others: Others) -> None:
    [choice] = choices(got)
    whole = choices(others["completions: echo with logprobs"])[0].logprobs
    assert choice.text == QUESTION
    assert usage(got)["completion_tokens"] == 0
    assert choice.logprobs[0] is None
    assert choice.logprobs[1:] == pytest.approx(whole[1 : len(choice.logprobs)], abs=ROUNDING)


def goes_on(got: Result, others: Others) -> None:
    assert (BEGUN + texts(got)[0]).startswith(texts(others["chat: one turn"])[0])


def several(got: Result, _: Others) -> None:
    assert len(texts(got)) == 3


OPEN: dict[str, Any] = {"top_k": -1, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
RETURNED = {
    "role": "assistant", "content": "42", "refusal": None, "annotations": [], "audio": None, "function_call": None,
    "tool_calls": None, "reasoning": "30 and 12", "reasoning_content": "30 and 12",
}  # fmt: skip
TURNS = [{"role": "user", "content": OTHER}, RETURNED, {"role": "user", "content": QUESTION}]
BEGUN = "69*9="
CONTINUED: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": BEGUN}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}
IGNORED: dict[str, Any] = {
    "verbosity": "low", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "web_search_options": {},
    "prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "user": "me",
    "function_call": "none", "use_beam_search": False, "length_penalty": 1.0, "best_of": 1,
}  # fmt: skip

FIELDS = [
    completion("no end before 40 tokens", of_length(40), model="large", **LONG),
    completion("no end before 40 tokens, speculative", same_as("completions: no end before 40 tokens"),
               **LONG, **SPECULATIVE),
    completion("allowed_token_ids", only_digits, allowed_token_ids=DIGITS, model="large"),
    completion("allowed_token_ids, speculative", same_as("completions: allowed_token_ids"),
               allowed_token_ids=DIGITS, **SPECULATIVE),
    completion("bad_words", no_sixes, bad_words=["6"], min_tokens=3, model="large"),
    completion("bad_words, speculative", same_as("completions: bad_words"),
               bad_words=["6"], min_tokens=3, **SPECULATIVE),
    completion("include_stop_str_in_output", stop_left_in, stop=STOP, include_stop_str_in_output=True),
    completion("stop_token_ids and stop_reason", stopped_by_a_token, stop_token_ids=[SIX]),
    completion("prompt_logprobs", prompt_scored, prompt_logprobs=2),
    completion("return_token_ids", told_ids, return_token_ids=True),
    completion("truncate_prompt_tokens", read_five, truncate_prompt_tokens=5),
    completion("max_tokens of 0", prompt_alone, max_tokens=0, echo=True, logprobs=1),
    completion("a negative seed", several, seed=-7, temperature=1, n=3),
    completion("a negative seed again", same_as("completions: a negative seed"), seed=-7, temperature=1, n=3),
    completion("a grammar of SGLang", is_one_of("yes", "no"), ebnf='root ::= "yes" | "no"'),
    completion("priority, cache_salt", same_as("completions: a text"), priority=3, cache_salt="mine"),
    chat("fields that are ignored", same_as("chat: one turn"), **IGNORED),
    chat("top_k of -1, effort and variables of the template", same_as("chat: one turn"), **OPEN),
    chat("fields of an answer that go back", same_as("chat: several turns"), messages=TURNS),
    chat("continue_final_message", goes_on, **CONTINUED),
    chat("guided_choice", is_one_of("yes", "no"), guided_choice=["yes", "no"]),
    chat("structured_outputs", is_one_of("yes", "no"), structured_outputs={"choice": ["yes", "no"]}),
    chat("return_tokens_as_token_ids", ids_for_names, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
    chat("continuous_usage_stats", both(counted, same_as("chat: one turn")), **COUNTED),
    chat("beams", refused("BadRequestError", 400, "best_of"), best_of=2),
    chat("functions", refused("BadRequestError", 400, "functions"), functions=[{"name": "f"}]),
    chat("speech", refused("BadRequestError", 400, "modalities"), modalities=["text", "audio"]),
]  # fmt: skip
