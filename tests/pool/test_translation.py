"""Text between tokenizers of every kind: a draft by text is a continuation or dropped, and never another text."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from decoding.fakes import TableModel, pair
from decoding.model import Request
from decoding.sequence import Sequence
from decoding.translated_sequence import MOST_TAIL, TranslatedSequence
from decoding.translation import Translation, Vocabularies
from pool.text import TextTokenizer
from pool.vocabulary import TextVocabulary
from tests.properties import cases
from tests.tokenizer_kinds import KINDS, TEXTS, save_kind
from turnout.registry import get_method
from turnout.types import SamplingParams
from turnout.utf8 import split_complete

PAIRS = list(product(KINDS, KINDS))
# Those that neither change a text nor lack tokens for any of it.
WHOLE = ("byte_level", "byte_fallback", "unigram")
SCRIPTS = {
    "latin": "Hello World, the cat a b 1 2 3. ",
    "cyrillic": "Привет, мир! Как дела? ",
    "han": "日本の首都は東京です。本日",
    "devanagari": "नमस्ते दुनिया, कैसे हो",
    "arabic": "مرحبا بالعالم، كيف الحال",
    "emoji": "👩\u200d🚀 é e\u0301 🇩🇪 👍🏽",
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: TextTokenizer(save_kind(kind, folder / kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def vocabularies(tokenizers: dict[str, TextTokenizer]) -> dict[str, TextVocabulary]:
    return {kind: made for kind, each in tokenizers.items() if (made := each.drafting_vocabulary) is not None}


def translation(vocabularies: dict[str, TextVocabulary], draft: str, target: str) -> Translation:
    own, other = vocabularies[draft], vocabularies[target]
    return Translation.of(own, other, len(own), len(other))


def bytes_of(vocabulary: TextVocabulary, tokens: list[int]) -> bytes:
    return b"".join(map(vocabulary.bytes_of, tokens))


def begun(tokens: list[int], made: Translation) -> TranslatedSequence:
    return TranslatedSequence(Sequence(tokens, SamplingParams(), 0), "small", made)


@given(st.sampled_from(PAIRS), TEXTS | st.sampled_from(list(SCRIPTS.values())), TEXTS, st.data())
@cases(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_draft_by_text_continues_the_answer_or_is_dropped(
    tokenizers: dict[str, TextTokenizer],
    vocabularies: dict[str, TextVocabulary],
    kinds: tuple[str, str],
    text: str,
    more: str,
    data: st.DataObject,
) -> None:
    """Whatever the tokenizers do to texts; and nothing is dropped but an unfinished character where they do nothing."""
    draft, target = kinds
    made = translation(vocabularies, draft, target)
    answered = tokenizers[target].encode(text) or [0]
    answered = answered[: data.draw(st.integers(1, len(answered)), "tokens of the answer")]
    written = begun(answered, made)
    drafted = bytes_of(vocabularies[draft], vocabularies[draft].encode(more))
    drafted = drafted[: data.draw(st.integers(0, len(drafted)), "bytes drafted")]
    tokens = written.continuation(drafted)
    added = bytes_of(vocabularies[target], tokens)
    assert drafted.startswith(added)
    assert made.target.special.keys().isdisjoint(tokens)
    begins = bytes_of(vocabularies[target], answered)
    if target in WHOLE and not split_complete(begins)[1]:
        assert (
            added == drafted[: len(drafted) - len(split_complete(drafted)[1])] or "\ufffd" in split_complete(drafted)[0]
        )


@given(st.sampled_from(PAIRS), st.lists(TEXTS | st.sampled_from(list(SCRIPTS.values())), max_size=6).map("".join))
@cases(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_small_model_reads_the_text_that_was_written(
    tokenizers: dict[str, TextTokenizer], vocabularies: dict[str, TextVocabulary], kinds: tuple[str, str], text: str
) -> None:
    """Token by token; what is settled only grows, and what is not stays short."""
    draft, target = kinds
    made = translation(vocabularies, draft, target)
    tokens = tokenizers[target].encode(text) or [0]
    seq = Sequence(tokens[:1], SamplingParams(max_tokens=len(tokens)), 0)
    written = TranslatedSequence.following(seq, "small", made)
    before: list[int] = []
    for token in tokens[1:]:
        seq.tokens.append(token)
        assert TranslatedSequence.following(seq, "small", made) is written
        read = written.follow(seq)
        assert written.tokens[: len(before)] == before
        before = list(written.tokens)
        assert read is None or len(bytes_of(vocabularies[draft], list(read))) <= 3 * MOST_TAIL
    if draft in WHOLE and target in WHOLE:
        said = bytes_of(vocabularies[target], seq.tokens)
        read = written.follow(seq)
        assert read is not None
        heard = bytes_of(vocabularies[draft], [*written.tokens, *read])
        assert heard.removeprefix(b" ") == said.removeprefix(b" ")


def hashed(vocab_size: int, salt: str) -> Callable[[list[int]], torch.Tensor]:
    """Logits that depend on the last two tokens, peaked, and on nothing a reader could guess."""

    def logits(tokens: list[int]) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(f"{salt} {tokens[-2:]}".encode()).digest()[:6])
        return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3.0

    return logits


def reciting(vocabulary: TextVocabulary, text: str) -> Callable[[list[int]], torch.Tensor]:
    """Logits of a model that recites a text in its tokenizer's tokens, then ends; it ends where it reads another text.

    Between two of these tokens it takes the longest token that fits.
    """
    whole, place, usual = text.encode(), 0, dict[int, int]()
    for token in vocabulary.encode(text, first=True):
        usual[place] = token
        place += len(vocabulary.bytes_of(token, first=not place))

    def logits(tokens: list[int]) -> torch.Tensor:
        said = b"".join(vocabulary.bytes_of(token, first=not place) for place, token in enumerate(tokens))
        follows = vocabulary.end or 0
        if whole.startswith(said) and said != whole:
            rest = whole[len(said) :]
            fits = [token for token in range(len(vocabulary)) if rest.startswith(vocabulary.bytes_of(token) or b"?")]
            follows = usual.get(len(said), max(fits, key=lambda token: len(vocabulary.bytes_of(token))))
        row = torch.zeros(len(vocabulary))
        row[follows] = 20.0
        return row

    return logits


async def speculate(small: TableModel, large: TableModel, made: Vocabularies, drafter: object, seq: Sequence) -> None:
    info, pool = get_method("speculative"), pair(small, large)
    pool.vocabularies = made
    params = info.parse({"drafter": drafter, "length": "fixed", "draft_length": 4})
    async for _ in info.run(Request("r", seq), pool, params):
        pass
    for model in (small, large):
        model.release(seq)
        assert not model.cached


@pytest.mark.parametrize(
    "pairs", [PAIRS[::5], pytest.param(PAIRS * 4, marks=pytest.mark.exactness)], ids=["few", "all"]
)
async def test_any_pair_writes_what_the_target_writes(
    tokenizers: dict[str, TextTokenizer], vocabularies: dict[str, TextVocabulary], pairs: list[tuple[str, str]]
) -> None:
    """Models that write anything: broken characters, special tokens, ends."""
    for number, (draft, target) in enumerate(pairs):
        own, other = vocabularies[draft], vocabularies[target]
        turn = number + number // len(PAIRS)
        drafter, temperature = ("text_chain", "shared_vocabulary")[turn % 2], (0.0, 0.9)[turn // 2 % 2]
        sampling = SamplingParams(max_tokens=10, temperature=temperature, repetition_penalty=1.2)
        small = TableModel("small", hashed(len(own), "small"), len(own), max_length=200)
        large = TableModel("large", hashed(len(other), "large"), len(other))
        prompt = tokenizers[target].encode(list(SCRIPTS.values())[number % len(SCRIPTS)]) or [0]
        made, expected = (Sequence(prompt, sampling, number, other.ends) for _ in range(2))
        await large.decode(expected)
        large.release(expected)
        await speculate(small, large, Vocabularies(other, {"small": own}), drafter, made)
        assert made.tokens == expected.tokens, (draft, target)


@pytest.mark.parametrize("script", list(SCRIPTS))
async def test_models_that_mean_the_same_text_accept_each_others(
    vocabularies: dict[str, TextVocabulary], script: str
) -> None:
    """Each recites the text in its own tokens: nearly all that is drafted by text stays, in every script."""
    text = "a" + SCRIPTS[script]
    for draft, target in list(product(WHOLE, WHOLE))[::2]:
        own, other = vocabularies[draft], vocabularies[target]
        small = TableModel("small", reciting(own, text), len(own))
        large = TableModel("large", reciting(other, text), len(other))
        seq = Sequence(
            other.encode("a", first=True)[:1], SamplingParams(max_tokens=200, temperature=0.0), 0, other.ends
        )
        drafter = {"name": "text_chain", "per_token": 8}
        await speculate(small, large, Vocabularies(other, {"small": own}), drafter, seq)
        assert bytes_of(other, seq.tokens).decode().strip() == text.strip(), (draft, target)
        rounds, emitted = seq.meter.speculation.rounds, seq.meter.speculation.emitted_tokens
        assert rounds < 0.6 * emitted, (draft, target, rounds, emitted)
        assert small.fed_tokens < 6 * len(text.encode())  # its cache is kept from round to round


def test_a_vocabulary_travels(vocabularies: dict[str, TextVocabulary]) -> None:
    made = translation(vocabularies, "byte_level", "unigram")
    again = pickle.loads(pickle.dumps(made))
    assert again.draft_ids.tolist() == made.draft_ids.tolist()
    assert again.draft.encode("日本 Hello") == made.draft.encode("日本 Hello")
    assert (again.target.ends, again.special) == (made.target.ends, made.special)


def test_special_tokens_that_a_text_spells_out_are_text(vocabularies: dict[str, TextVocabulary]) -> None:
    for kind, vocabulary in vocabularies.items():
        assert vocabulary.special.keys().isdisjoint(vocabulary.encode("a <|end|> <|user|>b")), kind


def test_common_tokens_mean_the_same(vocabularies: dict[str, TextVocabulary]) -> None:
    for draft, target in PAIRS:
        made = translation(vocabularies, draft, target)
        pairs = list(zip(made.draft_ids.tolist(), made.target_ids.tolist(), strict=True))
        assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs) > 10, (draft, target)
        for one, other in pairs:
            assert made.draft.bytes_of(one) == made.target.bytes_of(other), (draft, target, one, other)
            assert made.draft.special.get(one) == made.target.special.get(other), (draft, target, one, other)
