"""The shipped tokenizer: any text survives, digits stay apart, chats look as documented."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE

DEMO = Path("turnout/demo")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(DEMO / "large")
    return loaded


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Compute 37+48*3-12.",
        "  two  spaces\tand tabs\r\n\n",
        "naïve façade, Straße, ﬁ ligature",
        "日本語 と 한국어 и русский",
        "👩‍👩‍👧‍👦 🏴‍☠️ e\u0301",
        "१२३ Ⅷ ½ ²",
        "\x00\x01\x7f\u200b\ufeff\u2028",
        "def f(x):\n    return x ** 2  # don't, I'll\n",
        "".join(chr(code) for code in range(0x20, 0x3000, 7)),
        "\U0010ffff\ue000",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_its_own_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [piece for piece in tokenizer.tokenize("1024+99") if piece.isdigit()] == list("102499")
    longer = [piece for piece in tokenizer.get_vocab() if len(piece) > 1 and any("0" <= c <= "9" for c in piece)]
    assert longer == []


def test_size_and_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == VOCABULARY_SIZE == 1024
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token == "<|pad|>"


def test_nothing_is_added_unasked(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("1+2") == tokenizer.encode("1+2", add_special_tokens=False)


def test_chat_template_text(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "system", "content": "Answer step by step."},
        {"role": "user", "content": "What is 1+2?"},
        {"role": "assistant", "content": "1+2=3\nAnswer: 3"},
        {"role": "user", "content": "What is 3+4?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Answer step by step.<|user|>What is 1+2?<|assistant|>1+2=3\nAnswer: 3<|end|>"
        "<|user|>What is 3+4?<|assistant|>"
    )
    assert tokenizer.apply_chat_template(chat[1:2], tokenize=False) == "<|user|>What is 1+2?"


def test_chat_template_refuses_unknown_roles(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="role must be system, user or assistant, got robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "1"}], tokenize=False)
