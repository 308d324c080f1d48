"""What the served real model answers is what Hugging Face computes: alone, together, drafted for, with penalties."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.real.equality import prompts
from experiments.grid.contenders import Family, contenders, lacking
from tests.engine.harness import Reference
from tests.engine.margin import assert_best, assert_same_tokens
from tests.real.conftest import KINDS, TOKENS, Served
from training.data import real_text

pytestmark = pytest.mark.real

SPECIAL = "<|im_start|>user\nSay hello in French.<|im_end|>\n<|im_start|>assistant\n"
RAW = ("Once upon a time, in a village by the sea,", "def fibonacci(n):\n", SPECIAL, f"{SPECIAL}Bonjour<|im_end|>\n")


def generated(plain: Reference, prompt: tuple[int, ...], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = plain.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=plain.model.config.pad_token_id,
            **options,
        )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def assert_generated(plain: Reference, prompt: tuple[int, ...], answer: list[int], label: str) -> None:
    expected = generated(plain, prompt)

    def scores_at(place: int) -> torch.Tensor:
        return plain.logits([*prompt, *expected[:place]])[-1].log_softmax(-1)

    assert_same_tokens(expected, answer, scores_at, label)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_generate(served: Served, plain: Reference, kind: str) -> None:
    prompts = [served.chat(text) for text in real_text.prompts(kind)[:3]]
    for number, (prompt, answer) in enumerate(zip(prompts, served.ask(list(prompts)), strict=True)):
        assert_generated(plain, prompt, answer, f"{kind} {number}")


def test_an_answer_after_a_long_prompt_is_that_of_generate(served: Served, plain: Reference) -> None:
    prompt = served.chat(prompts("long")[0])
    assert len(prompt) > 1000
    [answer] = served.ask([prompt])
    assert_generated(plain, prompt, answer, "long")


@pytest.mark.parametrize("text", RAW)
def test_special_tokens_that_a_raw_prompt_spells_out_are_meant(served: Served, plain: Reference, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plain.model.config._name_or_path)
    ids = tuple(tokenizer.encode(text))
    assert served.pool.tokenizer.encode(text) == list(ids)
    assert served.ask([text]) == served.ask([ids])
    assert_generated(plain, ids, served.ask([text])[0], text[:20])


def test_eighteen_at_once_are_answered_as_alone(served: Served, plain: Reference) -> None:
    texts = [text for kind in KINDS for text in real_text.prompts(kind)[3:7]][:18]
    prompts = [served.chat(text) for text in texts]
    assert len(prompts) == 18
    together = served.ask(list(prompts))
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = served.ask([prompt])

        def scores_at(place: int, prompt: tuple[int, ...] = prompt, alone: list[int] = alone) -> torch.Tensor:
            return plain.logits([*prompt, *alone[:place]])[-1].log_softmax(-1)

        assert_same_tokens(alone, answer, scores_at)


def drafters() -> list[str]:
    return [name for name, each in contenders().items() if each.family is Family.DRAFTER]


@pytest.mark.parametrize("name", drafters())
def test_what_a_drafter_proposes_changes_no_answer(served: Served, plain: Reference, name: str) -> None:
    contender = contenders()[name]
    why = lacking(contender, served.pool.model_pool)
    if why is not None:
        pytest.skip(why)
    assert_as_plain(served, plain, "speculative", contender.params or {})


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("speculative", {}),
        ("cascade", {}),
        ("entropy_adaptive", {"threshold": 1.0, "window": 2, "min_stay": 2}),
        ("random_switch", {"share": 0.5, "mean_run": 4.0, "min_stay": 2}),
    ],
)
def test_methods_of_two_models_answer_as_the_one_that_is_both(
    served: Served, plain: Reference, method: str, params: dict[str, Any]
) -> None:
    assert_as_plain(served, plain, method, params)


@cache
def answered_plainly(served: Served, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return served.ask(list(prompts))


def assert_as_plain(served: Served, plain: Reference, method: str, params: dict[str, Any]) -> None:
    prompts = [served.chat(real_text.prompts(kind)[0]) for kind in real_text.KINDS]
    expected = answered_plainly(served, tuple(prompts))
    for prompt, before, answer in zip(prompts, expected, served.ask(list(prompts), method, params), strict=True):

        def scores_at(place: int, prompt: tuple[int, ...] = prompt, before: list[int] = before) -> torch.Tensor:
            return plain.logits([*prompt, *before[:place]])[-1].log_softmax(-1)

        assert_same_tokens(before, answer, scores_at, method)


def test_log_probabilities_of_a_text_are_those_of_one_forward(served: Served, plain: Reference) -> None:
    prompt, completion = "The capital of France is", " Paris, and the capital of Spain is Madrid."
    scored = served.score(prompt, completion)
    ids = served.pool.tokenizer.encode(prompt)
    answer = [token.id for token in scored.tokens]
    rows = plain.logits([*ids, *answer])[len(ids) - 1 : -1].log_softmax(-1)
    expected = rows.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    found = torch.tensor([token.logprob for token in scored.tokens])
    assert torch.allclose(found, expected, atol=5e-4)
    assert list(scored.greedy) == (rows.argmax(-1) == torch.tensor(answer)).tolist()


def test_a_repetition_penalty_is_that_of_generate(served: Served, plain: Reference) -> None:
    prompts = [served.chat(text) for text in real_text.prompts("question")[:3]]
    for prompt, answer in zip(prompts, served.ask(list(prompts), repetition_penalty=1.3), strict=True):
        expected = generated(plain, prompt, repetition_penalty=1.3)
        assert expected != generated(plain, prompt)
        assert answer == expected


def test_presence_and_frequency_penalties_are_subtracted_for_what_was_written(served: Served, plain: Reference) -> None:
    presence, frequency = 0.6, 0.4
    prompt = served.chat(real_text.prompts("question")[3])
    [answer] = served.ask([prompt], presence_penalty=presence, frequency_penalty=frequency)
    assert [answer] != served.ask([prompt])
    rows = plain.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    for place, token in enumerate(answer):
        scores = rows[place].clone()
        for seen in set(answer[:place]):
            scores[seen] -= presence + frequency * answer[:place].count(seen)
        assert_best(token, scores, f"token {place}")
