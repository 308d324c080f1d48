"""Text at the edge: tokens to characters, stop strings, prompts to ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from pool.stop_strings import StopStrings
from pool.text import TextTokenizer
from pool.token_bytes import TokenBytes
from training.random_models import byte_tokenizer
from turnout.calls import ChatMessage
from turnout.chat_template import TemplateOptions
from turnout.config import ModelConfig, model_path
from turnout.errors import Code, TurnoutError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return TextTokenizer(folder)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text("aé€😀\ufffd", max_size=12)


def is_clean(chunk: str, full: str, before: str) -> bool:
    """Whether a chunk continues the full text: half a character would show as U+FFFD where the text has none."""
    return full.startswith(before + chunk)


@given(TEXTS, TEXTS)
@example("", "\ufffd\ufffd😀")
@example("é", "\ufffd" * 40 + "😀é")
def test_every_emission_continues_the_full_text(tokenizer: TextTokenizer, prompt: str, text: str) -> None:
    detokenizer = tokenizer.detokenizer(tokenizer.encode(prompt))
    shown = ""
    for token in tokenizer.encode(text):
        chunk = detokenizer.feed(token)
        assert is_clean(chunk, text, shown), (chunk, shown)
        shown += chunk
    assert len(text) - len(shown) < 8
    shown += detokenizer.flush()
    assert shown == text
    assert detokenizer.flush() == ""


@given(
    st.lists(
        st.sampled_from([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xED, 0xBF]), max_size=150
    )
)
def test_broken_bytes_come_out_as_the_whole_would(tokenizer: TextTokenizer, data: list[int]) -> None:
    alphabet = [tokenizer.encode(chr(code))[0] for code in range(128)]
    by_byte = {0x61: alphabet[0x61]}
    for char in "é€😀":
        by_byte.update(zip(char.encode(), tokenizer.encode(char), strict=True))
    others = sorted(set(range(256)) - set(by_byte.values()) - set(alphabet))
    by_byte.update({0xFF: others[-1], 0xED: others[0], 0xBF: others[1]})
    ids = [by_byte[byte] for byte in data]
    detokenizer, shown, full = tokenizer.detokenizer(), "", tokenizer.decode(ids)
    for token in ids:
        shown += detokenizer.feed(token)
        assert full.startswith(shown)
    assert shown + detokenizer.flush() == full


def test_endless_broken_bytes_stay_cheap_and_come_out(tokenizer: TextTokenizer) -> None:
    broken = tokenizer.encode("é")[0]
    detokenizer = tokenizer.detokenizer()
    shown = "".join(detokenizer.feed(broken) for _ in range(1000))
    assert 990 <= len(shown) < 1000
    assert shown + detokenizer.flush() == "\ufffd" * 1000


@given(TEXTS)
def test_what_fits_is_never_refused_unread(tokenizer: TextTokenizer, text: str) -> None:
    tokenizer.check_length("prompt", text, len(tokenizer.encode(text)))


@pytest.mark.parametrize("model", ["demo:small", "demo:large"])
def test_long_texts_of_long_tokens_are_not_refused_unread(model: str) -> None:
    tokenizer = TextTokenizer(model_path(ModelConfig(path=model)))
    longest = max(tokenizer.vocabulary(), key=len)
    text = tokenizer.decode(tokenizer.encode(tokenizer.decode([tokenizer.vocabulary()[longest]]) * 50))
    tokenizer.check_length("prompt", text, len(tokenizer.encode(text)))
    with pytest.raises(TurnoutError, match=r"^prompt: at least \d+ tokens; at most 100 fit$") as refused:
        tokenizer.check_length("prompt", "a" * (101 * len(longest.encode())), 100)
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "prompt")


@pytest.mark.parametrize(
    "change",
    [
        lambda core: setattr(core, "normalizer", normalizers.Strip()),
        lambda core: setattr(core, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda core: setattr(core, "pre_tokenizer", removing_spaces()),
        lambda core: core.add_tokens([AddedToken("<x>", lstrip=True)]),
    ],
)
def test_of_a_tokenizer_that_drops_text_nobody_knows_what_fits(tmp_path: Path, change: Any) -> None:
    made = byte_tokenizer()
    change(made.backend_tokenizer)
    made.save_pretrained(tmp_path)
    TextTokenizer(tmp_path).check_length("prompt", " " * 100_000, 1)


def removing_spaces() -> pre_tokenizers.Sequence:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), byte_level])


def test_composed_characters_have_fewer_tokens_than_bytes(tmp_path: Path) -> None:
    made = byte_tokenizer()
    made.backend_tokenizer.normalizer = normalizers.NFC()
    made.save_pretrained(tmp_path)
    tokenizer, text = TextTokenizer(tmp_path), "\u1112\u1161\u11ab\u03b9\u0308\u0301" * 1000
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2
    tokenizer.check_length("prompt", text, len(tokenizer.encode(text)))
    with pytest.raises(TurnoutError):
        tokenizer.check_length("prompt", text, 10)


def pieces(tokenizer: TextTokenizer, text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """Chunks as they would be sent, one per token, and whether a stop string was found."""
    watcher = StopStrings(tokenizer.detokenizer(), stop)
    chunks = []
    for token in tokenizer.encode(text):
        stopped = watcher.feed(token)
        chunks.append(watcher.take(final=stopped))
        if stopped:
            return chunks, True
    return [*chunks, watcher.take(final=True)], False


def test_a_stop_string_across_tokens_is_cut_off_and_never_shown(tokenizer: TextTokenizer) -> None:
    chunks, stopped = pieces(tokenizer, "one END two", ("END",))
    assert (chunks, stopped) == (["o", "n", "e", " ", "", "", ""], True)


def test_the_stop_string_that_begins_first_ended_the_text(tokenizer: TextTokenizer) -> None:
    watcher = StopStrings(tokenizer.detokenizer(), ("zz", "d", "bcd"))
    assert [watcher.feed(token) for token in tokenizer.encode("abcd")] == [False, False, False, True]
    assert (watcher.found, watcher.clone().found) == ("bcd", "bcd")


def test_text_held_back_for_a_stop_string_is_given_when_it_turns_out_not_to_be_one(tokenizer: TextTokenizer) -> None:
    assert pieces(tokenizer, "aENb", ("END",)) == (["a", "", "", "ENb", ""], False)
    assert pieces(tokenizer, "aEN", ("END",)) == (["a", "", "", "EN"], False)


def test_overlapping_starts_hold_back_enough(tokenizer: TextTokenizer) -> None:
    assert pieces(tokenizer, "aaab", ("aab",)) == (["", "", "a", ""], True)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("abcd", ("bc", "abcd"), "a"),
        ("abcd", ("d", "b"), "a"),
        ("a€b", ("€",), "a"),
        ("x\n\ny", ("\n\n",), "x"),
        ("stop", ("stop",), ""),
        ("nothing", ("zzz",), "nothing"),
    ],
)
def test_the_first_match_wins(tokenizer: TextTokenizer, text: str, stop: tuple[str, ...], shown: str) -> None:
    chunks, stopped = pieces(tokenizer, text, stop)
    assert "".join(chunks) == shown
    assert stopped == any(s in text for s in stop)


@given(st.text("ab€", max_size=14), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_agree_with_a_search_over_all_prefixes(
    tokenizer: TextTokenizer, text: str, stop: list[str]
) -> None:
    ends = [end for end in range(len(text) + 1) if any(s in text[:end] for s in stop)]
    expected = text
    if ends:
        expected = text[: min(text[: ends[0]].find(s) for s in stop if s in text[: ends[0]])]
    chunks, stopped = pieces(tokenizer, text, tuple(stop))
    assert stopped == bool(ends)
    assert "".join(chunks) == expected


def test_a_clone_goes_its_own_way(tokenizer: TextTokenizer) -> None:
    watcher = StopStrings(tokenizer.detokenizer(), ("END",))
    for token in tokenizer.encode("a\u20acEN")[:-1]:
        watcher.feed(token)
    twin = watcher.clone()
    assert not twin.feed(tokenizer.encode("x")[0])
    assert not watcher.feed(tokenizer.encode("N")[0])
    assert watcher.feed(tokenizer.encode("D")[0])
    assert (watcher.take(final=True), twin.take(final=True)) == ("a€", "a€Ex")


def test_begin_of_text_is_put_first_where_the_tokenizer_does(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    plain.bos_token = "<|system|>"
    bos = plain.convert_tokens_to_ids("<|system|>")
    plain.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", bos)]
    )
    plain.save_pretrained(tmp_path)
    ids = TextTokenizer(tmp_path).encode("ab")
    assert ids[0] == bos
    assert len(ids) == 3


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(TurnoutError, match="messages: this model has no chat template") as caught:
        TextTokenizer(tmp_path).encode_chat([ChatMessage("user", "hi")])
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "messages")


def test_a_conversation_the_template_refuses_is_refused_with_its_reason(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    plain.chat_template = "{{ raise_exception('system comes first') }}"
    plain.save_pretrained(tmp_path)
    with pytest.raises(TurnoutError, match="system comes first") as caught:
        TextTokenizer(tmp_path).encode_chat([ChatMessage("user", "hi")])
    assert caught.value.field == "messages"


def test_a_conversation_ends_where_the_assistant_begins(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode_chat([ChatMessage("user", "hi"), ChatMessage("assistant", "yo"), ChatMessage("user", "é")])
    assert [tokenizer.name_of(ids[0]), tokenizer.name_of(ids[-1])] == ["<|user|>", "<|assistant|>"]
    assert tokenizer.decode(ids) == "hiyoé"


def test_a_template_that_knows_only_parts_of_a_content_gets_them(tmp_path: Path) -> None:
    """LLaVA's renders a string as nothing."""
    plain = byte_tokenizer()
    plain.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    plain.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    turns = [ChatMessage("user", "hi <|user|>"), ChatMessage("assistant", "yo"), ChatMessage("user", "é")]
    ids = tokenizer.encode_chat(turns)
    assert [tokenizer.name_of(ids[0]), tokenizer.name_of(ids[-1])] == ["<|user|>", "<|assistant|>"]
    assert tokenizer.decode(ids) == "hi <|user|>yoé"
    begun = tokenizer.encode_chat(turns[:2], template=TemplateOptions(continue_final_message=True))
    assert tokenizer.decode(begun) == "hi <|user|>yo"


def test_ids_without_a_token_add_nothing_and_are_not_kept() -> None:
    known = TokenBytes(byte_tokenizer().backend_tokenizer)
    letter = known._core.token_to_id("a")
    for token in [-1, -(2**40), 2**32 - 1, 2**32, 2**70, *range(10_000, 10_100)]:
        assert not known.counts(token)
        assert known.first(token) == known.after(token) == b""
    assert known.first(letter) == known.after(letter) == b"a"
    assert set(known._first) == set(known._after) == {letter}
