"""Monitors: when they step in, what they put in, and that nothing waits for them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel
from decoding.model import Readout, ReadSpec, Request
from decoding.repetition import LoopFinder
from decoding.sequence import Sequence
from tests.decoding.step_models import ALPHABET, ID, VOCAB, Characters, answer, line, pool, scripted, text, thinking
from turnout.errors import Code, TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams, Segment, Token, TokenKind

TRIM: dict[str, Any] = {
    "name": "trim",
    "cues": ["\n"],
    "asks": "number",
    "send_every": 1,
    "conclude": "h",
    "force": "g",
    "give_up_share": 1.0,
    "loop_tokens": 200,
}


def trim(**changes: Any) -> dict[str, Any]:
    return {"monitor": {**TRIM, **changes}}


def thoughts(answers: str) -> TableModel:
    """Writes a line for each answer, then lines without one; after an h, a few of them and the end."""

    def script(written: str) -> str:
        after = written.partition("h")[2]
        if "h" in written:
            return "abcd$"[min(len(after), 4)]
        lines = written.count("\n")
        begun = written.rpartition("\n")[2].lstrip("? ")
        digit = answers[lines] if lines < len(answers) else "abcdef"[lines % 6]
        return ["a", "b", digit, "\n"][min(len(begun), 3)]

    return scripted("large", script)


# Trimming (seed 184)


@pytest.mark.parametrize(
    ("answers", "stops_after"), [("5777", 4), ("5757", None), ("577577", None), ("77777", 3), ("57x7", None)]
)
async def test_three_equal_answers_in_a_row_end_the_thinking(answers: str, stops_after: int | None) -> None:
    answers = answers.replace("x", "b")
    models = pool(scripted("small", line("a")), thoughts(answers))
    changes: dict[str, Any] = {"agree": 2}
    seq, segments, request = await answer(models, "monitored", trim(**changes), max_tokens=40)
    written = text(seq.tokens)
    if answers == "57b7":  # a thought without an answer is passed over, and 5 7 7 are two equal ones only
        assert "h" not in written
    elif stops_after is None:
        assert "h" not in written
        assert not request.notes
    else:
        # The verdict arrives while a few tokens more are written: decoding does not wait for it.
        before = written.partition("h")[0]
        assert before.count("\n") >= stops_after
        assert written.endswith("habcd$")
        assert [segment.stopped_by for segment in segments].count("converged") == 1
        assert "converged" in request.notes[0]


async def test_injected_tokens_are_nobodys_and_the_cache_goes_on() -> None:
    large = thoughts("7777")
    models = pool(scripted("small", line("a")), large)
    seq, _, _ = await answer(models, "monitored", trim(), max_tokens=40)
    [place] = [index for index, token in enumerate(seq.generated) if token.source == "injected"]
    assert ALPHABET[seq.generated[place].id] == "h"
    assert seq.meter.models["injected"].processed_tokens == 0
    # Each token was read once, but for the last: the injected one as any other.
    assert large.fed_tokens == len(seq) - 1


async def test_a_monitor_with_nothing_to_say_changes_nothing() -> None:
    fixed = {"drafter": "model_chain", "length": "fixed"}  # as unasked under a monitor
    for inner, params in (("plain", {}), ("entropy_adaptive", {}), ("speculative", fixed)):
        models = pool(scripted("small", line("a")), thoughts("57575757"))
        for temperature in (0.0, 1.0):
            common: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 5}
            alone, _, _ = await answer(models, inner, params, **common)
            watched, segments, _ = await answer(models, "monitored", {"inner": inner, **trim()}, **common)
            assert watched.generated == alone.generated
            assert all(token.top == () and token.logprob is None for s in segments for token in s.tokens)


async def test_thinking_that_gets_nowhere_is_given_up() -> None:
    models = pool(scripted("small", line("a")), thoughts(""))
    by_tokens, _, request = await answer(models, "monitored", trim(give_up_share=0.5), max_tokens=40)
    assert 20 <= text(by_tokens.tokens).index("g") <= 29
    assert "given_up" in request.notes[0]
    by_thoughts, _, _ = await answer(models, "monitored", trim(give_up_thoughts=3), max_tokens=40)
    assert 12 <= text(by_thoughts.tokens).index("g") <= 21


async def test_a_loop_is_cut() -> None:
    def script(written: str) -> str:
        return "f" if "g" in written else "abc"[len(written) % 3]

    models = pool(scripted("small", line("a")), scripted("large", script))
    seq, _, request = await answer(models, "monitored", trim(loop_tokens=12, thinking_start=""), max_tokens=40)
    assert 12 <= text(seq.tokens).index("g") <= 20
    assert set(text(seq.tokens).partition("g")[2]) == {"f"}
    assert "loop" in request.notes[0]


async def test_an_answer_without_thinking_is_left_as_it_is() -> None:
    """Neither its length nor a loop in it is a thought: what closes the thinking would only spoil it."""
    steps_in: dict[str, Any] = {"cues": ["?"], "give_up_share": 0.5, "loop_tokens": 12}
    large = scripted("large", lambda written: "abc"[len(written) % 3])
    models = pool(scripted("small", line("a")), large)
    for prompt in ("d", "egfd"):  # no thinking; one that has ended
        alone, _, _ = await answer(models, "plain", {}, prompt=prompt, max_tokens=40)
        params = trim(**steps_in, thinking_start="eg", thinking_end="f")
        watched, _, request = await answer(models, "monitored", params, prompt=prompt, max_tokens=40)
        assert [token.id for token in watched.generated] == [token.id for token in alone.generated]
        assert not request.notes


async def test_thinking_begins_in_the_prompt_or_in_the_answer() -> None:
    """Words of three letters each, of which the first may say that thinking begins."""
    for prompt, first in (("deg", "abc"), ("d", "eg"), ("d", "?b")):

        def script(written: str, prompt: str = prompt, first: str = first) -> str:
            after = written[len(prompt) :]
            return "h" if "g" in after[3:] else (first + "abcabcab")[len(after) % 8]

        models = pool(scripted("small", line("a")), scripted("large", script))
        params = trim(cues=["?"], give_up_share=0.5, loop_tokens=200, thinking_start="eg", force="gh")
        _, _, request = await answer(models, "monitored", params, prompt=prompt, max_tokens=40)
        assert "given_up" in "".join(request.notes), (prompt, first)


async def test_nothing_is_watched_after_the_thinking() -> None:
    models = pool(scripted("small", line("a")), thoughts("b7777777"))
    seq, _, _ = await answer(models, "monitored", trim(thinking_end="abb"), max_tokens=40)
    assert "h" not in text(seq.tokens)


async def test_the_thinking_that_the_pool_knows_is_watched_and_nothing_else() -> None:
    def script(written: str) -> str:
        return "h" if "g" in written else "?bcabcabcf"[len(written) % 10]

    models = pool(scripted("small", line("a")), scripted("large", script))
    params = trim(cues=["?"], give_up_share=0.5, loop_tokens=200, force="g")
    for known, given_up in (
        (thinking("e", "h", "inside"), True),
        (thinking("e", "f", "inside"), False),
        (thinking("e", "h", "closed"), False),
    ):
        _, _, request = await answer(models, "monitored", params, prompt="d", max_tokens=40, thinking=known)
        assert any("given_up" in note for note in request.notes) == given_up, known


async def test_with_an_end_alone_thinking_begins_at_a_cue() -> None:
    for written, given_up in (("abcd", False), ("?abcd", True), ("?afcd", False)):

        def script(said: str, written: str = written) -> str:
            return written[(len(said) - 1) % len(written)]

        models = pool(scripted("small", line("a")), scripted("large", script))
        params = trim(cues=["?"], thinking_end="f", give_up_share=0.5)
        _, _, request = await answer(models, "monitored", params, prompt="d", max_tokens=40)
        assert any("given_up" in note for note in request.notes) == given_up, written


@pytest.mark.parametrize("period", range(1, 33))
def test_a_planted_loop_is_found_when_it_is_complete(period: int) -> None:
    repeats, least = 3, 12
    random = torch.Generator().manual_seed(period)
    block = torch.randperm(1000, generator=random)[:period].tolist()
    before = torch.randint(1000, 2000, (50,), generator=random).tolist()
    needed = max(repeats, math.ceil(least / period)) * period
    finder = LoopFinder(32, repeats, least)
    stream = before + (block * 40)[:needed]
    assert [finder.feed(token) for token in stream] == [None] * (len(stream) - 1) + [period]


def test_text_without_a_loop_has_none() -> None:
    finder = LoopFinder(32, 3, 3)
    # Thue-Morse words over three letters are free of cubes, and of squares.
    word = [0]
    while len(word) < 600:
        word = [each for letter in word for each in ((0, 1, 2), (0, 2), (1,))[letter]]
    assert all(finder.feed(token) is None for token in word)


async def test_cues_may_begin_and_end_inside_tokens() -> None:
    texts = ["so it is 7.", "\n\nWai", "t, no: 8.\n", "\nBut 7 it is", ". \n\nWait, is it", " 7.\n\nBut"]

    class Words(Characters):
        def token_bytes(self, token_id: int) -> bytes:
            return texts[token_id].encode()

        def encode(self, text: str, parse_special: bool = True) -> list[int]:
            return [0] if text else []

    choice = PartChoice.of("trim", asks="number", agree=1, send_every=1)
    found = []
    for order in (range(6), (0, 1, 2, 3, 4), (0, 5, 5)):
        monitor = choice.make("decoding.monitors", "monitor")
        models = pool(scripted("small", line("a")), scripted("large", line("a")))
        models.tokenizer = Words()
        monitor.begin(Request("r", Sequence([0], SamplingParams(), 0)), models)
        for token in order:
            monitor.watch(Segment((Token(token, "large"),), ""))
            await asyncio.sleep(0)  # one turn for the task that looks: the rule answers at once
        injection = monitor.intervene()
        found.append(injection.reason if injection is not None else None)
        await monitor.close()
    assert found == ["converged", None, "converged"]


class Slow(TableModel):
    """Reads nothing until it is let."""

    def __init__(self, opinion: str) -> None:
        super().__init__("small", scripted("small", lambda written: opinion).next_logits, VOCAB)
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.lengths: set[int] = set()

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: ReadSpec = ReadSpec(), every: bool = False
    ) -> list[Readout]:
        self.asked.append(text(list(tokens)))
        self.lengths.add(seq.greatest_length)
        await self.gate.wait()
        return await super().extend(seq, tokens, want, every)


ASKED = {"asks": "small", "existence": "c{candidate}", "equivalence": "d{candidate}e{earlier}"}


class YesNo(Characters):
    """The words of an answer are single characters: f for yes, g for no."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        word = text.strip().lower()
        return [ID["f" if word == "yes" else "g"]] if word in ("yes", "no") else super().encode(text)


async def test_writing_never_waits_for_the_verifier() -> None:
    slow = Slow("f")
    models = pool(slow, thoughts("7777777777"))
    models.tokenizer = YesNo()
    alone, _, _ = await answer(models, "plain", {}, max_tokens=40)
    watched, _, _ = await answer(models, "monitored", trim(**ASKED, conclude="h"), max_tokens=40)
    assert watched.tokens == alone.tokens
    assert len(slow.asked) == 1  # asked once, never answered
    assert not slow.cached
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Failing(Slow):
    """Fails whenever it is to read."""

    def __init__(self, error: Exception) -> None:
        super().__init__("f")
        self.error = error

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: ReadSpec = ReadSpec(), every: bool = False
    ) -> list[Readout]:
        self.asked.append(text(list(tokens)))
        raise self.error


async def test_an_answer_goes_on_where_nobody_can_look_and_says_so() -> None:
    models = pool(Failing(TurnoutError(Code.RESOURCE_EXHAUSTED, "no room")), thoughts("7777777777"))
    models.tokenizer = YesNo()
    alone, _, _ = await answer(models, "plain", {}, max_tokens=40)
    watched, _, request = await answer(models, "monitored", trim(**ASKED), max_tokens=40)
    assert watched.tokens == alone.tokens
    assert request.notes == ["not all of the thinking could be looked at: no room"]


@pytest.mark.parametrize("tokens", [8, 40])
@pytest.mark.parametrize("fault", [ZeroDivisionError(), TurnoutError(Code.INTERNAL, "a bug")])
async def test_a_fault_of_ours_is_no_look_that_failed(tokens: int, fault: Exception) -> None:
    """Neither while the answer is written, nor where it ends before the next look."""
    models = pool(Failing(fault), thoughts("7777777777"))
    models.tokenizer = YesNo()
    with pytest.raises(type(fault)):
        await answer(models, "monitored", trim(**ASKED), max_tokens=tokens)


async def test_the_small_model_is_asked_two_questions_in_one_prefill_each() -> None:
    slow = Slow("f")
    slow.gate.set()
    models = pool(slow, thoughts("7777777777"))
    models.tokenizer = YesNo()
    seq, _, _ = await answer(models, "monitored", trim(**ASKED, conclude="h", sentences=1), prompt="???", max_tokens=40)
    assert slow.asked[:5] == ["cab7", "cab7", "dab7eab7", "cab7", "dab7eab7"]
    assert text(seq.tokens).endswith("habcd$")
    asked = [seq.meter.models["small"].forwards, seq.meter.models["small"].prompt_tokens]
    assert asked == [len(slow.asked), len("???")]  # the prompt is read once for all of them
    assert slow.lengths == {seq.greatest_length}  # so that the answer's cache of it is of use to them
    assert not slow.cached


async def test_a_verifier_that_says_no_never_stops_anything() -> None:
    slow = Slow("g")
    slow.gate.set()
    models = pool(slow, thoughts("7777777777"))
    models.tokenizer = YesNo()
    seq, _, _ = await answer(models, "monitored", trim(**ASKED), max_tokens=40)
    assert "h" not in text(seq.tokens)
    assert all(question.startswith("c") for question in slow.asked)


async def test_an_answer_made_again_has_its_words_where_it_had_them() -> None:
    """Whether the verifier is slower or quicker than it was when the answer was written first."""

    async def written(quick: bool, delivered: list[int]) -> list[int]:
        verifier = Slow("f")
        if quick:
            verifier.gate.set()
        models = pool(verifier, thoughts("7777777777"))
        models.tokenizer = YesNo()
        params = trim(**ASKED, conclude="h", sentences=1)
        seq, _, _ = await answer(models, "monitored", params, prompt="???", max_tokens=40, delivered=delivered)
        return [token.id for token in seq.generated]

    concluded, never = await written(True, []), await written(False, [])
    place = concluded.index(ID["h"])
    assert ID["h"] not in never
    for count in (place + 1, place + 2, len(concluded)):
        assert await written(False, concluded[:count]) == concluded
    for count in (place + 2, 30):
        late = await written(True, never[:count])
        assert late[:count] == never[:count]
        assert ID["h"] in late[count:]


# Whom they watch


@pytest.mark.parametrize(
    "wrong", [{"inner": "nothing"}, {"inner": {"name": "plain", "model": 3}}, {"monitor": "nobody"}]
)
def test_what_does_not_exist_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(TurnoutError, match=r"method\.params\.(inner|monitor)"):
        get_method("monitored").parse(wrong)


async def test_steps_are_watched_too() -> None:
    """The monitors see any method: here step speculation, whose steps come in one piece each."""
    models = pool(_renamed(thoughts("7777"), "small"), _renamed(thoughts("7777"), "large"))
    inner = {"name": "step_speculation", "scorer": {"name": "self_grade", "threshold": 0, "question": "?"}}
    seq, segments, _ = await answer(models, "monitored", {"inner": inner, **trim()}, prompt=" ", max_tokens=40)
    assert [s.stopped_by for s in segments].count("converged") == 1
    assert {token.kind for token in seq.generated} == {TokenKind.DECODED}
    assert text(seq.tokens).endswith("habcd$")


def _renamed(model: TableModel, name: str) -> TableModel:
    model.name = name
    return model
