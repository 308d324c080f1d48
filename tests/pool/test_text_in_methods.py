"""What methods find in answers is found in their text, whatever the tokenizer cuts it into."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decoding.aggregators.base import Candidate
from decoding.aggregators.majority import most_voted
from decoding.model import Request
from decoding.monitors.trim import TrimMonitor, TrimParams
from decoding.sequence import Sequence
from decoding.steps import StepEnd, step_marks
from decoding.switching.sentence import WORD, SentenceTracker, sentence_marks
from decoding.text import continuation_ids, digit_values, text_within
from pool.text import TextTokenizer
from tests.tokenizer_kinds import save_kind
from turnout.types import SamplingParams, Segment, Token

KINDS = ["byte_level", "byte_fallback", "byte_fallback_strip", "unigram"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(save_kind(request.param, tmp_path_factory.mktemp(request.param)))


def written(tokenizer: TextTokenizer, text: str) -> tuple[int, ...]:
    """Tokens of a text that stands inside an answer."""
    return continuation_ids(tokenizer, text)


@pytest.mark.parametrize(
    ("text", "separator", "count"),
    [
        ("a b. the cat. 1 2", ". ", 2),
        ("日本。東京。a", "。", 2),
        ("a 日本\u3000東京\u3000", "\u3000", 2),
        ("\u3000\u3000 the cat the b", "the", 2),
    ],
)
def test_steps_end_with_the_token_that_completes_the_separator(
    tokenizer: TextTokenizer, text: str, separator: str, count: int
) -> None:
    finder = StepEnd(step_marks(tokenizer, len(tokenizer), (separator,)), (separator,))
    ids = written(tokenizer, text)
    ends = [place for place, token in enumerate(ids, start=1) if finder.feed(token)]
    found = [text_within(tokenizer, ids[:place]).count(separator) for place in range(len(ids) + 1)]
    assert ends == [place for place in range(1, len(ids) + 1) if found[place] > found[place - 1]]
    assert found[-1] == count


@pytest.mark.parametrize("newlines", ["\n\n", "\u3000\n\n"])
def test_blanks_before_a_step_end_nothing(tmp_path: Path, newlines: str) -> None:
    tokenizer = TextTokenizer(save_kind("byte_level", tmp_path))
    finder = StepEnd(step_marks(tokenizer, len(tokenizer), ("\n\n",)), ("\n\n",))
    ids = written(tokenizer, f"{newlines}a\n\nb")
    assert [finder.feed(token) for token in ids] == [False] * (len(ids) - 2) + [True, False]


@pytest.mark.parametrize(("text", "count"), [("日本。東京。", 2), ("the cat. a b! Hello", 2), ("1. the cat 3.1 a.", 1)])
def test_sentences_end_where_the_text_has_their_mark(tokenizer: TextTokenizer, text: str, count: int) -> None:
    marks, tracker = sentence_marks(tokenizer, len(tokenizer)), SentenceTracker()
    assert sum(tracker.feed(marks.get(token, WORD)) for token in written(tokenizer, text)) == count


def drafts(tokenizer: TextTokenizer, *texts: str) -> list[Sequence]:
    made = []
    for text in texts:
        seq = Sequence(tokenizer.encode("a"), SamplingParams(max_tokens=99), 0, tokenizer.eos_ids)
        for token in (*written(tokenizer, text), *tokenizer.eos_ids):
            seq.append(Token(token, "m"))
        made.append(seq)
    return made


@pytest.mark.parametrize(
    ("texts", "mark", "best"),
    [
        (("大阪", "東京", "東京"), "", 1),
        (("1 2", "12", "12"), "", 1),
        (("a cat: 1", "b Hello a cat: 2", "the a cat: 2 "), "a cat:", 1),
        (("<|end|>", "a", "a"), "", 1),
    ],
)
def test_votes_are_cast_by_texts(tokenizer: TextTokenizer, texts: tuple[str, ...], mark: str, best: int) -> None:
    models: Any = SimpleNamespace(tokenizer=tokenizer)
    finals = [Candidate.of(draft, 0, models, mark).final for draft in drafts(tokenizer, *texts)]
    assert most_voted([3.0, 1.0, 1.0], finals) == best


@pytest.mark.parametrize("cue", ["the cat", "東京", "<think>"])
def test_thoughts_end_at_a_cue_of_several_tokens(tokenizer: TextTokenizer, cue: str) -> None:
    monitor = TrimMonitor(TrimParams(asks="number", cues=(cue,), thinking_start="", thinking_end=""))
    seq = Sequence(tokenizer.encode("a"), SamplingParams(max_tokens=99), 0)
    models: Any = SimpleNamespace(tokenizer=tokenizer)
    monitor.begin(Request("r", seq, "t"), models)
    for token in written(tokenizer, f"a 1.{cue} b 2.{cue} 3 😀"):
        monitor.watch(Segment((Token(token, "m"),), ""))
    assert monitor._thoughts == 2
    assert [" ".join(thought.split()) for thought in monitor._waiting] == ["a 1.", f"{cue} b 2."]


@pytest.mark.parametrize("kind", KINDS)
def test_every_digit_has_its_value(tmp_path: Path, kind: str) -> None:
    tokenizer = TextTokenizer(save_kind(kind, tmp_path))
    values = digit_values(tokenizer, len(tokenizer))
    assert {1, 2, 3} <= set(values.values())
    assert values[written(tokenizer, "a2")[-1]] == 2
