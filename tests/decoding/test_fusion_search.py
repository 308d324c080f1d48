"""Generative fusion decoding: byte-level probabilities by hand and by enumeration, and beams that two models score."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from decoding.byte_scores import ByteVocabulary, LongerText, TextScore, byte_vocabulary
from decoding.fakes import ListText, TableModel, pair
from decoding.model import Busy, ModelPool, Request
from decoding.search._second_models import ByteScores
from decoding.search._streams import held_by
from decoding.search.base import Hypothesis
from decoding.sequence import Sequence
from decoding.translation import Translation, Vocabularies
from decoding.vocabulary import Vocabulary
from tests.decoding.test_search import logprob
from turnout.errors import Code, TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams


class Bytes(Vocabulary):
    """A vocabulary given by the bytes of its tokens; its tokenizer takes the longest one each time."""

    def __init__(self, *tokens: str, end: int | None = None) -> None:
        self.tokens = [each.encode("latin-1") for each in tokens]
        self.begins: tuple[int, ...] = ()
        self.end = end
        self.ends = frozenset() if end is None else frozenset({end})
        self.special = dict.fromkeys(self.ends, "<end>")

    def __len__(self) -> int:
        return len(self.tokens)

    def bytes_of(self, token_id: int, first: bool = False) -> bytes:
        return b"" if token_id in self.special else self.tokens[token_id]

    def is_byte(self, token_id: int) -> bool:
        return False

    def encode(self, text: str, first: bool = False) -> list[int]:
        data, found = text.encode(), list[int]()
        texts = [token for token in range(len(self)) if self.bytes_of(token)]
        while data:
            found.append(max((t for t in texts if data.startswith(self.tokens[t])), key=lambda t: len(self.tokens[t])))
            data = data[len(self.tokens[found[-1]]) :]
        return found


def table(name: str, size: int, seed: int, sharp: float = 1.0) -> TableModel:
    """Probabilities depend on the last token and on the number of tokens."""
    rows = torch.randn((32, size, size), generator=torch.Generator().manual_seed(seed)) * sharp
    return TableModel(name, lambda tokens: rows[len(tokens) % 32, tokens[-1]], size)


def scored(made: TableModel, vocabulary: Vocabulary, *parts: bytes, prompt: int = 0) -> TextScore:
    """Score of a text that comes in parts, each read as a search does: only the rows that are asked for."""
    of_bytes, score = (
        byte_vocabulary(Translation.of(vocabulary, vocabulary, len(vocabulary), len(vocabulary))),
        TextScore(),
    )
    for part in (b"", *parts):
        longer = LongerText.of(score, part, of_bytes)
        places = range(longer.first, longer.last + 1) if longer.first >= 0 else ()
        score = longer.score([made.next_logits([prompt, *longer.tokens[:place]]).log_softmax(-1) for place in places])
    return score


def marginal(made: TableModel, vocabulary: Vocabulary, text: bytes, prompt: int = 0) -> float:
    """The probability that what a model writes begins with a text: over all of its tokenizations."""
    total, left = 0.0, [((prompt,), text, 1.0)]
    while left:
        tokens, rest, prob = left.pop()
        for token, chance in enumerate(made.next_logits(list(tokens)).softmax(-1).tolist()):
            data = vocabulary.bytes_of(token)
            if data.startswith(rest):
                total += prob * chance
            elif data and rest.startswith(data):
                left.append(((*tokens, token), rest[len(data) :], prob * chance))
    return math.log(total)


def test_the_probability_of_a_text_by_hand() -> None:
    """Tokens a, b, ab, abc, bc; the text ab is `ab`, or begins `abc`; after a, `b` or `bc` would be other paths."""
    vocabulary = Bytes("a", "b", "ab", "abc", "bc")
    probs = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    made = TableModel("small", lambda tokens: probs.log(), 5)
    assert math.exp(scored(made, vocabulary, b"ab").logprob) == pytest.approx(0.3 + 0.15)
    # The standard path ab, a; a token that begins with aba: none; one that begins with a, but a itself: ab, abc.
    assert math.exp(scored(made, vocabulary, b"aba").logprob) == pytest.approx(0.3 * (0.1 + 0.3 + 0.15))
    # The path b, a, whose a may become ab or abc: the path that contributes most has two tokens all the same.
    found = scored(made, vocabulary, b"b", b"a")
    assert (found.tokens, found.length) == ((1, 0), 2)
    assert math.exp(found.logprob) == pytest.approx(0.2 * (0.1 + 0.3 + 0.15))
    # Where one token for all of it is likelier than the standard path, the length is that token's.
    long = Bytes("a", "b", "abb")
    made = TableModel("small", lambda tokens: torch.tensor([0.1, 0.1, 0.8]).log(), 3)
    found = scored(made, long, b"ab")
    assert (found.tokens, found.length) == ((0, 1), 1)
    assert math.exp(found.logprob) == pytest.approx(0.1 * 0.1 + 0.8)


@pytest.mark.parametrize("seed", range(3))
def test_the_probability_lies_between_the_standard_path_and_all_paths(seed: int) -> None:
    """And is that of all paths where bytes have one path: single bytes, or a code without prefixes."""
    many, single = Bytes("a", "b", "ab", "ba", "aab", "bb"), Bytes("b", "a", "c")
    above = 0.0
    for text in map("".join, product("ab", repeat=4)):
        data = text.encode()
        made = table("small", 6, seed)
        found, exact = scored(made, many, data), marginal(made, many, data)
        assert found.sums[-1] - 1e-5 <= found.logprob <= exact + 1e-5
        above = max(above, found.logprob - found.sums[-1])
        made = table("small", 3, seed)
        assert scored(made, single, data).logprob == pytest.approx(marginal(made, single, data), abs=1e-4)
    assert above > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_comes_in_parts_has_the_score_of_the_whole(seed: int) -> None:
    """Also where its end is encoded anew, and where only few rows are kept."""
    vocabulary = Bytes("a", "b", "c", "ab", "abc", "bca", "cab", "aa", "\xc3", "\xc3\xa9", "\xa9")
    made, drawn = table("small", 11, seed), torch.Generator().manual_seed(seed)
    for _ in range(10):
        text = bytes(b"abc\xc3"[each] for each in torch.randint(3, (12,), generator=drawn))
        text += "é".encode() + b"ab"
        cuts = sorted(torch.randint(len(text), (6,), generator=drawn).tolist())
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        one, whole = scored(made, vocabulary, *parts), scored(made, vocabulary, text)
        assert (one.tokens, one.length) == (whole.tokens, whole.length)
        assert one.logprob == pytest.approx(whole.logprob, abs=1e-5)
        assert len(one.rows) <= 3


def test_an_unfinished_character_is_covered_by_tokens_that_begin_with_it() -> None:
    vocabulary = Bytes("a", "\xc3\xa9", "\xc3\xa8", "a\xc3\xa9")
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    made = TableModel("small", lambda tokens: probs.log(), 4)
    found = scored(made, vocabulary, b"a\xc3")
    assert found.tokens == (0,)
    assert math.exp(found.logprob) == pytest.approx(0.4 * (0.3 + 0.2) + 0.1)
    # Once it is whole, the standard path is one token; a and é, another path, is left out.
    assert math.exp(scored(made, vocabulary, b"a", b"\xc3", b"\xa9").logprob) == pytest.approx(0.1)
    # No token begins with this part of a character.
    assert scored(made, vocabulary, b"a", b"\xe2").logprob == -math.inf


def test_tokens_that_begin_with_some_bytes() -> None:
    tokens = ["a", "ab", "b", "abc", "", "ac", "abd", "a"]
    made = ByteVocabulary(Bytes(*tokens), 8, {})
    for data in ("a", "ab", "abc", "abcd", "b", "c", "ac"):
        found = [token for token, text in enumerate(tokens) if text.startswith(data)]
        assert sorted(made.beginning_with(data.encode()).tolist()) == found, data
    assert made.longest == 3


# Searches

END = 5
OTHER = Bytes("e", "dc", "d", "c", "b", "a", "", "ab", "bc", end=6)  # letters a to e, in another order
FIRST = Bytes("a", "b", "c", "d", "e", "", end=END)


async def fused(
    large: TableModel, small: TableModel, other: Vocabulary | None, n: int = 1, width: int = 3, **given: Any
) -> Any:
    """Answers of a request, its sequences and the request."""
    asked = SamplingParams.model_validate({"temperature": 0.0, "max_tokens": 5, **given.pop("sampling", {})})
    seqs = tuple(Sequence([1, 2], asked, seed, (END,)) for seed in range(n))
    pool = given.pop("pool", None) or pair(small, large, ListText([*"abcde_"]))
    if other is not None:
        pool.vocabularies = Vocabularies(FIRST, {"small": other})
    request, info = Request("r", seqs[0], answers=seqs), get_method("search")
    search = {"name": "fusion", **given}
    async for segment in info.run(request, pool, info.parse({"search": search, "width": width})):
        assert segment.tokens
    assert [seq for model in (large, small) for seq in model.cached if seq not in seqs] == []
    for seq in seqs:
        large.release(seq)
    return [seq.answer for seq in seqs], seqs, request


@pytest.mark.parametrize("other", [None, OTHER], ids=["one vocabulary", "two"])
async def test_weight_0_is_the_beam_and_the_second_model_is_not_asked(other: Vocabulary | None) -> None:
    for seed in range(4):
        large, small = table("large", 6, seed), table("small", 9 if other else 6, seed + 50)
        wanted, _, _ = await answers_of(large, n=3)
        found, _, _ = await fused(large, small, other, n=3, weight=0.0)
        assert found == wanted
        assert small.forwards == 0


async def answers_of(large: TableModel, n: int, width: int = 3, **sampling: Any) -> Any:
    """The beam of one model, under the same request."""
    asked = SamplingParams.model_validate({"temperature": 0.0, "max_tokens": 5, **sampling})
    seqs = tuple(Sequence([1, 2], asked, seed, (END,)) for seed in range(n))
    request, info = Request("r", seqs[0], answers=seqs), get_method("search")
    async for _ in info.run(request, pair(large, large, ListText([*"abcde_"])), info.parse({"width": width})):
        pass
    for seq in seqs:
        large.release(seq)
    return [seq.answer for seq in seqs], seqs, request


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 1.0])
async def test_a_second_model_that_is_the_first_changes_nothing(weight: float) -> None:
    """At any weight, length penalty and width, under penalties and bans too."""
    for seed in range(4):
        large, small = table("large", 6, seed), table("small", 6, seed)
        for sampling in ({}, {"logit_bias": {3: 1.0}, "frequency_penalty": 0.7, "min_tokens": 2, "temperature": 0.8}):
            wanted, _, _ = await answers_of(large, n=3, **sampling)
            found, _, _ = await fused(large, small, None, n=3, weight=weight, sampling=sampling)
            assert found == wanted
        assert (await fused(large, small, None, weight=weight, length_penalty=0.3))[0]


def by_definition(
    large: TableModel, small: TableModel, weight: float, width: int, ends: str, length: int, prompt: list[int]
) -> list[list[int]]:
    """Answers of a beam whose every score is worked out anew; its length penalty is 1, it ends as soon as it may."""

    def score(answer: list[int]) -> float:
        text = b"".join(map(FIRST.bytes_of, answer[:-1]))
        row = small.next_logits
        one = TableModel("small", lambda tokens: row([*prompt, *tokens[1:]]), small.vocab_size)
        found = scored(one, OTHER, text)
        own = logprob(large, answer) / len(answer)
        return (1 - weight) * own + weight * found.logprob / max(found.length, 1)

    open_, done = [list[int]()], list[list[int]]()
    for _ in range(length):
        longer = []
        for each in open_:
            best = int(large.next_logits([1, 2, *each]).argmax())
            allowed = [END] if best == END else range(END)
            longer += [[*each, token] for token in (allowed if ends == "best" else range(END + 1))]
        longer.sort(key=score, reverse=True)
        ended = [each for each in longer[:width] if each[-1] == END or len(each) == length]
        open_ = [each for each in longer if each[-1] != END and len(each) < length][:width]
        done = sorted([*done, *ended], key=score, reverse=True)[:width]
        if len(done) == width or not open_:
            return done
    return done


@pytest.mark.parametrize("ends", ["any", "best"])
@pytest.mark.parametrize("weight", [0.3, 0.9])
async def test_beams_of_two_vocabularies_follow_the_definition(weight: float, ends: str) -> None:
    """The second model scores each text before its newest token, the prompt in its own tokens."""
    differs = 0
    for seed in range(5):
        large, small = table("large", 6, seed), table("small", 9, seed + 9, sharp=2.0)
        prompt = OTHER.encode("bc")
        wanted = by_definition(large, small, weight, 3, ends, 5, prompt)
        found, _, _ = await fused(large, small, OTHER, len(wanted), weight=weight, ends=ends, early_stopping=True)
        assert found == wanted
        differs += found != (await answers_of(large, n=len(wanted)))[0]
    assert differs


async def test_a_prompt_of_its_own_is_what_the_second_model_reads() -> None:
    for seed in range(3):
        large, small = table("large", 6, seed), table("small", 9, seed + 9, sharp=2.0)
        wanted = by_definition(large, small, 0.7, 3, "any", 5, OTHER.encode("abcab"))
        found, _, _ = await fused(large, small, OTHER, len(wanted), weight=0.7, prompt="abcab", early_stopping=True)
        assert found == wanted


async def test_two_models_of_one_vocabulary_are_fused_token_by_token() -> None:
    """A beam that holds everything finds the best of all answers by the sum of both."""
    large, small = table("large", 6, 3), table("small", 6, 4)
    open_, every = [list[int]()], list[list[int]]()
    for length in (1, 2, 3):
        longer = [[*each, token] for each in open_ for token in range(6)]
        every += [each for each in longer if each[-1] == END or length == 3]
        open_ = [each for each in longer if each[-1] != END]
    every.sort(key=lambda each: -(0.4 * logprob(large, each) + 0.6 * logprob(small, each)) / len(each))
    given: dict[str, Any] = {"weight": 0.6, "early_stopping": "never", "sampling": {"max_tokens": 3}}
    assert (await fused(large, small, None, n=3, width=128, **given))[0] == every[:3]


@pytest.mark.parametrize("other", [None, OTHER], ids=["one vocabulary", "two"])
async def test_the_second_models_work_is_charged_and_shared(other: Vocabulary | None) -> None:
    """Its prompt is read once, and what hypotheses have in common is not read again."""
    large, small = table("large", 6, 5), table("small", 9 if other else 6, 6)
    sampling = {"max_tokens": 12, "ignore_eos": True}
    _, [seq], _ = await fused(large, small, other, width=4, weight=0.5, sampling=sampling)
    meter = seq.meter.models["small"]
    assert (meter.forwards, meter.generated_tokens, meter.discarded_tokens) == (small.forwards, 0, 0)
    fed = meter.prompt_tokens + meter.decode_tokens + meter.catchup_tokens + meter.draft_tokens
    assert fed == small.fed_tokens
    assert 4 <= small.fed_tokens <= 2 + 2 * 4 * 12
    assert (meter.prompt_tokens, seq.meter.models["large"].generated_tokens) == (1 if other else 2, 12)


async def test_scores_of_texts_are_kept_for_the_newest_hypotheses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold rows as wide as the vocabulary: those of an answer's earlier tokens would fill the memory."""
    rescore, lengths = ByteScores.rescore, list[int]()

    async def looked_at(self: ByteScores, read: list[Hypothesis], candidates: list[Hypothesis]) -> None:
        await rescore(self, read, candidates)
        lengths.append(read[0].length)
        for each in candidates:
            assert isinstance(each.state, TextScore)
            assert {node.state for node in (*each.path[:-1], *read)} == {None}

    monkeypatch.setattr(ByteScores, "rescore", looked_at)
    await fused(table("large", 6, 1), table("small", 9, 2), OTHER, sampling={"ignore_eos": True, "max_tokens": 6})
    assert lengths == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("at", [2, 7])
@pytest.mark.parametrize("other", [None, OTHER], ids=["one vocabulary", "two"])
async def test_a_fault_of_the_second_model_leaves_nothing(other: Vocabulary | None, at: int) -> None:
    large, small = table("large", 6, 7), table("small", 9 if other else 6, 8)
    read, calls = small.next_logits, list[int]()

    def fails(tokens: list[int]) -> torch.Tensor:
        calls.append(len(tokens))
        if len(calls) == at:
            raise ZeroDivisionError
        return read(tokens)

    small.next_logits = fails
    with pytest.raises(ZeroDivisionError):
        await fused(large, small, other, weight=0.5)
    assert not small.cached
    assert len(large.cached) <= 1


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"second": "judge"}, "search.second", "no model has the role 'judge'; the pool's roles: large, small"),
        ({"second": "large"}, "search.second", "is the model that answers"),
        ({"weight": 1.2}, "search.weight", "less than or equal to 1"),
        ({"weight": -0.1}, "search.weight", "greater than or equal to 0"),
        ({"temperature": 0.0}, "search.temperature", "greater than"),
        ({"temperature": 2.0}, "search.temperature", "must be 1"),
        ({"ends": "first"}, "search.ends", "any"),
        ({"prompt": ""}, "search.prompt", "at least 1"),
        ({"prompt": "abc"}, "search.prompt", "needs a tokenizer that turns text into tokens"),
        ({"best_of": 4}, "search.best_of", "unknown; allowed here"),
    ],
)
async def test_what_it_cannot_work_with_is_refused(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(TurnoutError, match=why) as caught:
        await fused(table("large", 6, 1), table("small", 6, 2), None, **given)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, f"method.params.{field}")


async def test_a_pool_of_one_model_is_refused() -> None:
    made = table("large", 6, 1)
    for roles, why in (
        ({"large": "large"}, "no model has the role 'small'"),
        ({"large": "large", "small": "large"}, "answers"),
    ):
        pool = ModelPool({"large": made}, roles, ListText([*"abcde_"]))
        with pytest.raises(TurnoutError, match=why) as caught:
            await fused(made, made, None, pool=pool)
        assert caught.value.field == "method.params.search.second"


async def test_context_and_memory_of_the_second_model_are_looked_at() -> None:
    large, small = table("large", 6, 1), table("small", 9, 2)
    small.max_length = 4
    with pytest.raises(TurnoutError, match="whose context holds 4") as caught:
        await fused(large, small, OTHER, weight=0.5, sampling={"ignore_eos": True, "max_tokens": 12})
    assert (caught.value.code, caught.value.field) == (Code.OUT_OF_RANGE, "method.params.search.second")
    with pytest.raises(TurnoutError, match="has 6 tokens for 'small'") as caught:
        await fused(large, small, OTHER, prompt="dddddd")
    assert caught.value.field == "method.params.search.prompt"
    small.max_length = 1000
    small.busy = lambda: Busy(0, 0, capacity=8, block_size=2)  # type: ignore[method-assign]
    with pytest.raises(TurnoutError, match=r"3 hypotheses .* do not fit the memory of small, 1 do; lower") as caught:
        await fused(large, small, OTHER, weight=0.5, sampling={"ignore_eos": True, "max_tokens": 12})
    assert caught.value.field == "method.params.width"
    assert not small.cached


def test_blocks_of_streams_are_shared_as_far_as_they_are_alike() -> None:
    """Blocks of 2, a prompt of 3 in 2 blocks; then one block that ends with 1, and that which each has begun."""
    assert held_by([(1, 2, 3), (1, 2, 4)], 3, 2) == 2 + 1 + 2
    assert held_by([(1, 2), (1, 5)], 3, 2) == 2 + 1 + 2
    assert held_by([(1,), (2,)], 3, 2) == 2 + 2
    assert held_by([()], 4, 2) == 2
