"""Tokens become text: as they come, one by one, with every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from pool.detokenizer import ByteDetokenizer, WindowDetokenizer
from pool.stop_strings import StopStrings
from pool.text import TextTokenizer
from tests.tokenizer_kinds import KINDS, TEXTS, save_kind
from turnout.utf8 import name_of_part, split_complete

REPLACED = "\ufffd"


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(save_kind(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(save_kind("byte_fallback_strip", tmp_path_factory.mktemp("fallback")))


def library_text(tokenizer: TextTokenizer, ids: list[int]) -> str:
    text: str = tokenizer._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    return text


def streamed(tokenizer: TextTokenizer, ids: list[int], before: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(before)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


def test_only_a_tokenizer_whose_tokens_depend_on_each_other_is_decoded_again(tmp_path: Path) -> None:
    kinds = {kind: type(TextTokenizer(save_kind(kind, tmp_path / kind)).detokenizer()) for kind in KINDS}
    assert kinds == {kind: WindowDetokenizer if kind == "suffixed" else ByteDetokenizer for kind in KINDS}


@given(text=TEXTS)
@example("😀😀😀")
@example("é日本 Hello")
@example("👩\u200d🚀👍🏽🇩🇪𠀋")
def test_pieces_of_a_text_join_to_what_the_library_decodes(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    whole = library_text(tokenizer, ids)
    assert "".join(streamed(tokenizer, ids, [])) == tokenizer.decode(ids) == whole


@given(text=TEXTS, prompt=TEXTS)
@example("😀b", "a 😀")
@example("Hello", "")
def test_after_a_prompt_pieces_join_to_what_the_answer_adds(tokenizer: TextTokenizer, text: str, prompt: str) -> None:
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    head, whole = library_text(tokenizer, before), library_text(tokenizer, before + ids)
    assert head + "".join(streamed(tokenizer, ids, before)) == whole


@given(st.data())
def test_any_tokens_that_are_a_text_join_to_it(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    whole = library_text(tokenizer, ids)
    got = "".join(streamed(tokenizer, ids, []))
    spans = tokenizer.spans(ids)
    assert "".join(span.text for span in spans) == got
    if REPLACED not in whole:
        assert got == whole
        assert b"".join(span.data for span in spans).decode() == whole


@given(text=TEXTS)
def test_bytes_join_to_the_text_and_nothing_is_given_twice(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    spans = tokenizer.spans(ids)
    whole = tokenizer.decode(ids)
    assert b"".join(span.data for span in spans) == whole.encode()
    shown = ""
    for piece in streamed(tokenizer, ids, []):
        assert whole.startswith(shown + piece)
        shown += piece


@given(text=TEXTS, other=st.integers(0, 300))
def test_a_look_at_another_token_changes_nothing(tokenizer: TextTokenizer, text: str, other: int) -> None:
    ids = tokenizer.encode(text)
    looked = tokenizer.detokenizer()
    pieces = []
    for token in ids:
        expected = looked.peek(token)
        looked.peek(other % len(tokenizer))
        span = looked.span(token)
        if token not in tokenizer._names:
            assert span == expected
        pieces.append(span.text)
    assert "".join([*pieces, looked.flush()]) == tokenizer.decode(ids)


@given(st.data())
def test_tokens_that_are_taken_together_complete_the_same_text(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    before = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=3))
    cut = data.draw(st.integers(0, len(ids)))
    shown = data.draw(st.sampled_from([(), tuple(tokenizer._names)]))
    one, together = tokenizer.detokenizer(before, shown=shown), tokenizer.detokenizer(before, shown=shown)
    for part in (ids[:cut], ids[cut:]):
        assert together.feed_all(part) == "".join(map(one.feed, part))
    assert together.flush() == one.flush()


@given(st.data())
def test_text_that_is_read_late_is_that_of_text_read_at_once(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    """A stop string that never comes makes a text be read token by token; copies are made and texts taken anywhere."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    included = data.draw(st.booleans())
    least = data.draw(st.integers(0, 3))
    late, at_once = (StopStrings(tokenizer.detokenizer(), stop, included, least) for stop in ((), ("\U0010fffd",)))
    for token in ids:
        step = data.draw(st.sampled_from(["feed", "take", "copy"]))
        if step == "take":
            assert late.take() == at_once.take()
        if step == "copy":
            left, late, at_once = late, late.clone(), at_once.clone()
            left.feed(token)  # what is fed to the one is not the other's
        assert late.feed(token) is at_once.feed(token) is False
    if ids and data.draw(st.booleans()):
        late.end(ids[-1])
        at_once.end(ids[-1])
    assert late.take(final=True) == at_once.take(final=True)


@given(st.data())
def test_a_token_seen_before_has_the_part_that_it_would_have_at_first(
    tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    assert tokenizer._bytes is not None
    seen = tokenizer.spans([*ids, *ids])
    tokenizer._bytes.spans.clear()
    assert tokenizer.spans([*ids, *ids]) == seen


@given(st.binary(max_size=24))
@example("é".encode() + b"\xc3")
@example(b"\xf0\x9f" + "日本".encode())
def test_in_broken_bytes_complete_characters_are_kept(fallback: TextTokenizer, data: bytes) -> None:
    byte_ids = fallback.vocabulary()
    ids = [byte_ids[f"<0x{byte:02X}>"] for byte in data]
    before = fallback.encode("a")
    shown, pieces = "", streamed(fallback, ids, before)
    for place, piece in enumerate(pieces[:-1], start=1):
        shown += piece
        complete, waiting = split_complete(data[:place])
        assert shown == complete
        assert len(waiting) < 4
    assert shown + pieces[-1] == data.decode(errors="replace")


def test_a_character_is_the_last_of_its_tokens(fallback: TextTokenizer) -> None:
    spans = fallback.spans(fallback.encode("é😀"))
    assert [span.text for span in spans] == ["", "é", "", "", "", "😀"]
    assert b"".join(span.data for span in spans[2:]) == "😀".encode()
    assert [name_of_part(span.text, span.data) for span in spans[4:]] == [r"bytes:\x98", "😀"]
    assert [name_of_part("\ufffd", None), name_of_part("\ufffd", b"\xff")] == ["\ufffd", r"bytes:\xff"]


def test_special_tokens_have_no_part_in_a_text_but_a_name(tokenizer: TextTokenizer) -> None:
    (end,) = tokenizer.eos_ids
    detokenizer = tokenizer.detokenizer()
    assert (detokenizer.peek(end).text, tokenizer.name_of(end)) == ("<|end|>", "<|end|>")
    span = detokenizer.span(end)
    assert (span.text, span.data) == ("", b"")
    assert tokenizer.decode([end]) == ""
    assert tokenizer.decode([end], special=True) == "<|end|>"


def test_structures_read_the_same_bytes(tokenizer: TextTokenizer) -> None:
    assert tokenizer._bytes is not None
    definition = tokenizer._bytes.for_structures()
    if definition is None:
        assert tokenizer._tokenizer.backend_tokenizer.decoder.__class__.__name__ in ("WordPiece", "BPEDecoder")
        return
    read = LLTokenizer(definition, eos_token=min(tokenizer.eos_ids))
    ids = [token for token in range(len(tokenizer)) if token not in tokenizer._names]
    # The byte 255 stands in no text, and marks special tokens there.
    assert all(read.decode_bytes([token]) == tokenizer.token_bytes(token).replace(b"\xff", b"") for token in ids)


@given(text=TEXTS)
def test_bytes_inside_a_text_are_those_of_its_parts(tokenizer: TextTokenizer, text: str) -> None:
    before = tokenizer.encode("a")
    ids = [token for token in tokenizer.encode(text) if token not in tokenizer._names]
    if isinstance(tokenizer.detokenizer(), WindowDetokenizer):
        return  # there the bytes of a token depend on the next
    expected = [span.data for span in tokenizer.spans(ids, before)]
    assert [tokenizer.token_bytes(token) for token in ids] == expected


def test_a_copy_goes_its_own_way(tokenizer: TextTokenizer) -> None:
    first = tokenizer.detokenizer()
    ids, others = tokenizer.encode("a é the cat"), tokenizer.encode("b 2")
    head = "".join(map(first.feed, ids))
    second = first.clone()
    one = head + "".join(map(first.feed, others)) + first.flush()
    assert head + "".join(map(second.feed, others)) + second.flush() == one == tokenizer.decode(ids + others)
