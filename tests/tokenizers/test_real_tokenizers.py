"""The properties of text on tokenizers of real models, which `make test-tokenizers` fetches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from pool.detokenizer import ByteDetokenizer
from pool.text import TextTokenizer
from tests.pool.test_detokenizer import (  # noqa: F401
    test_a_look_at_another_token_changes_nothing,
    test_after_a_prompt_pieces_join_to_what_the_answer_adds,
    test_any_tokens_that_are_a_text_join_to_it,
    test_bytes_inside_a_text_are_those_of_its_parts,
    test_bytes_join_to_the_text_and_nothing_is_given_twice,
    test_pieces_of_a_text_join_to_what_the_library_decodes,
)
from tests.pool.test_special_tokens import specials
from tests.pool.test_text_in_methods import (  # noqa: F401
    test_sentences_end_where_the_text_has_their_mark,
    test_steps_end_with_the_token_that_completes_the_separator,
    test_thoughts_end_at_a_cue_of_several_tokens,
    test_votes_are_cast_by_texts,
)
from tests.tokenizer_kinds import TEXTS
from turnout.calls import ChatMessage

pytestmark = pytest.mark.tokenizers

FETCHED = Path(__file__).parents[2] / ".runs" / "tokenizers"
NAMES = ("llama2", "llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss", "mistral")


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mistral":
        convert_tekken(max((FETCHED / "mistral" / "mistral_common" / "data").glob("tekken_*.json")), folder)
    else:
        shutil.copytree(FETCHED / request.param, folder, dirs_exist_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(with_template(folder)), encoding="utf-8")
    return TextTokenizer(folder)


def with_template(folder: Path) -> dict[str, Any]:
    """The tokenizer's configuration; where it has no chat template, with a simple one of its first special token."""
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    first = config.get("bos_token") or "<|startoftext|>"
    text = first["content"] if isinstance(first, dict) else first
    config.setdefault("chat_template", text + "{% for message in messages %} {{ message.content }} {% endfor %}")
    return config


def convert_tekken(file: Path, folder: Path) -> None:
    """Mistral's own format in that of the tokenizers library, by transformers' converter."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.mistral import MistralConverter

    core = MistralConverter(str(file)).converted()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = "<s>{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}"
    made.save_pretrained(folder)


def test_tokens_that_begin_turns_are_known_where_they_have_no_flag(tokenizer: TextTokenizer) -> None:
    assert tokenizer._special is not None
    unflagged = tokenizer._special.names - tokenizer._special.flagged
    deepseek = "<\uff5cUser\uff5c>" in tokenizer.vocabulary()
    assert ("<\uff5cUser\uff5c>" in unflagged) == deepseek
    assert ("<\uff5cAssistant\uff5c>" in unflagged) == deepseek


def test_tokens_stand_for_bytes_of_their_own(tokenizer: TextTokenizer) -> None:
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)


def test_structures_read_the_same_bytes(tokenizer: TextTokenizer) -> None:
    assert tokenizer._bytes is not None
    definition = tokenizer._bytes.for_structures()
    assert definition is not None
    read = LLTokenizer(definition, eos_token=min(tokenizer.eos_ids))
    ids = [token for token in range(len(tokenizer)) if token not in tokenizer._names]
    wrong = [
        (token, read.decode_bytes([token]), tokenizer.token_bytes(token))
        for token in ids
        if read.decode_bytes([token]) != tokenizer.token_bytes(token).replace(b"\xff", b"")
    ]
    assert wrong == []


@given(text=TEXTS)
def test_without_special_tokens_ids_are_those_of_the_template(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode_chat([ChatMessage("user", text)])
    turns = [{"role": "user", "content": text}]
    expected = tokenizer._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)
    assert ids == (expected if isinstance(expected, list) else expected["input_ids"])


@given(data=st.data())
def test_no_message_forges_a_turn(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    assert tokenizer._special is not None
    names = sorted(tokenizer._special.names)
    parts = data.draw(st.lists(st.sampled_from(names) | st.sampled_from(["a", " ", "<|", "Hello", "é"]), max_size=6))
    text = f"b{''.join(parts)}b"
    plain, forged = (tokenizer.encode_chat([ChatMessage("user", each)]) for each in ("b", text))
    assert specials(tokenizer, forged) == specials(tokenizer, plain)
    turns = {tokenizer.vocabulary()[name] for name in tokenizer._special.names - tokenizer._special.flagged}
    assert [token for token in forged if token in turns] == [token for token in plain if token in turns]
    begins = [tokenizer._names[token] for token in tokenizer._prefix]
    assert specials(tokenizer, tokenizer.encode(text, parse_special=False)) == begins
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text or "é" in text
