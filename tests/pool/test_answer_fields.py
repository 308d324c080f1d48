"""Fields that shape an answer's prompt and text: least length, stop strings left in, special tokens shown, cuts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pool.local_pool import LocalPool
from pool.prompt_ids import bad_word_ids
from pool.request_defaults import RequestDefaults
from pool.stop_strings import StopStrings
from pool.text import TextTokenizer
from tests.engine.harness import answer, call_of
from tests.tokenizer_kinds import save_kind
from training.random_models import byte_tokenizer
from turnout.calls import GenerateCall, ScoreCall
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

METHODS = [("plain", {}), ("speculative", {"drafter": "model_chain", "length": "fixed"}), ("cascade", {})]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer().save_pretrained(folder)
    return TextTokenizer(folder)


@pytest.mark.parametrize(
    ("text", "stop", "least", "included", "shown"),
    [
        ("one END two", ("END",), 0, True, "one END"),
        ("one END two", ("END",), 7, False, "one END two"),  # its last character is the seventh
        ("one END two", ("END",), 6, False, "one "),
        ("one END two END", ("END",), 8, False, "one END two "),
        ("xEND", ("END", "xEND!"), 4, False, "xEND"),  # the longer one looks further back
        ("xEND!", ("END", "xEND!"), 4, True, "xEND!"),
        ("aab", ("aab", "b"), 0, True, "aab"),
    ],
)
def test_stop_strings(
    tokenizer: TextTokenizer, text: str, stop: tuple[str, ...], least: int, included: bool, shown: str
) -> None:
    watcher = StopStrings(tokenizer.detokenizer(), stop, included, least)
    chunks = []
    for place, token in enumerate(tokenizer.encode(text), 1):
        assert watcher.clone()._early == watcher._early
        stopped = watcher.feed(token)
        assert not (stopped and place <= least)
        chunks.append(watcher.take(final=stopped))
        if stopped:
            break
    else:
        chunks.append(watcher.take(final=True))
    assert "".join(chunks) == shown


def test_words_as_they_stand_in_a_text(tokenizer: TextTokenizer) -> None:
    words = [tuple(tokenizer.encode(text)) for text in ("ab", " ab", "ü", " ü")]
    assert list(bad_word_ids(("ab", " ab", "ü"), tokenizer)) == words


async def written(pool: LocalPool, method: tuple[str, dict[str, Any]] = METHODS[0], **sampling: Any) -> Any:
    asked = {"max_tokens": 12, "temperature": 0.0, "seed": 1, **sampling}
    return await answer(pool, call_of([65, 66, 67], *method, **asked))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method[0])
async def test_the_same_answer_with_every_method(pool: LocalPool, method: tuple[str, dict[str, Any]]) -> None:
    letters = tuple(pool.tokenizer.encode("abcdefgh"))
    free = (await written(pool, allowed_token_ids=letters)).ids
    asked: dict[str, Any] = {"min_tokens": 6, "stop_token_ids": (free[1],), "allowed_token_ids": letters}
    asked |= {"bad_words": (pool.tokenizer.decode(free[:2]), pool.tokenizer.decode(free[3:5]))}
    got, plain = (await written(pool, method, **asked)).ids, (await written(pool, **asked)).ids
    assert got == plain or method[0] == "cascade"
    assert len(got) > 6
    assert free[1] not in got[:6]
    assert set(got) <= set(letters)
    assert not any(word in pool.tokenizer.decode(got) for word in asked["bad_words"])


async def test_the_token_that_ends_an_answer_is_shown_where_asked(pool: LocalPool) -> None:
    special = pool.tokenizer._tokenizer.all_special_ids[0]
    name = pool.tokenizer._tokenizer.convert_ids_to_tokens(special)
    [letter] = pool.tokenizer.encode("F")
    ends: dict[str, Any] = {"stop_token_ids": (letter,), "allowed_token_ids": (letter,)}
    assert (await written(pool, **ends)).text == ""
    assert (await written(pool, **ends, include_stop_str_in_output=True)).text == "F"
    shown: dict[str, Any] = {"allowed_token_ids": (special,), "max_tokens": 2, "ignore_eos": True}
    assert (await written(pool, **shown)).text == ""
    assert (await written(pool, **shown, skip_special_tokens=False)).text == 2 * name
    ends = {"allowed_token_ids": (special,), "stop_token_ids": (special,), "skip_special_tokens": False}
    assert (await written(pool, **ends)).text == ""
    assert (await written(pool, **ends, include_stop_str_in_output=True)).text == name


@pytest.mark.parametrize(
    ("kept", "most", "left"), [(3, 5, 3), (511, 5, 511), (-1, 12, 500), (-1, None, 496), (600, 5, None)]
)
async def test_the_last_tokens_of_a_prompt_are_kept(pool: LocalPool, kept: int, most: int | None, left: Any) -> None:
    prompt = [65 + place % 26 for place in range(700)]
    call = call_of(prompt, truncate_prompt_tokens=kept, **({} if most is None else {"max_tokens": most}))
    if left is None:
        with pytest.raises(TurnoutError, match="truncate_prompt_tokens: at most 511 fit") as caught:
            pool.intake().prepare(call)
        assert caught.value.code is Code.OUT_OF_RANGE
        return
    assert pool.intake().prepare(call).prompt == prompt[-left:]
    assert await pool.tokens(call) == prompt[-left:]


@pytest.mark.parametrize(
    "wrong", [{"min_tokens": 3, "max_tokens": 2}, {"truncate_prompt_tokens": 0}, {"allowed_token_ids": ()}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_bad_words_of_a_tokenizer_with_marks_for_spaces(tmp_path: Path) -> None:
    """Where a text begins as if after a space, the word within a line is another one."""
    tokenizer = TextTokenizer(save_kind("byte_fallback_strip", tmp_path))
    words = {tuple(tokenizer._tokenizer.convert_ids_to_tokens(ids)) for ids in bad_word_ids(("cat",), tokenizer)}
    assert words >= {("▁cat",), ("cat",)}


async def test_another_salt_finds_no_cache(pool: LocalPool) -> None:
    prompt = [65 + place * place % 26 for place in range(100)]

    async def cached(salt: str) -> int:
        call = replace(call_of(prompt, "plain", max_tokens=2), cache_salt=salt)
        return (await answer(pool, call)).usage.cached_tokens

    async def scored(salt: str) -> tuple[int, float]:
        found = pool.stats().cached_blocks
        call = ScoreCall("s", "pair", tuple(prompt), ((65,),), cache_salt=salt)
        [score] = await pool.score(call)
        return pool.stats().cached_blocks - found, score.tokens[0].logprob or 0.0

    first = [await cached(salt) for salt in ("", "a", "b", "")]
    assert first[:3] == [0, 0, 0]
    assert first[3] > 50
    assert [await cached(salt) for salt in ("a", "b")] == [first[3]] * 2
    (new, one), (fresh, other) = await scored("a"), await scored("c")
    assert new == 0 < fresh
    assert one == other


def test_more_tokens_than_the_pool_allows_are_refused(pool: LocalPool) -> None:
    checks = replace(pool.intake(), defaults=RequestDefaults(max_answer_tokens=5))
    call = GenerateCall("r", "pair", SamplingParams(min_tokens=6), prompt="x")
    with pytest.raises(TurnoutError, match="min_tokens: must be at most max_tokens, 5"):
        checks.prepare(call)
    assert checks.prepare(replace(call, sampling=SamplingParams(min_tokens=5))).max_tokens == 5
