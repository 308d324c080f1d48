"""The kernel of searches and beam search, over models made of a function: definitions, sharing, metering."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decoding.fakes import ListText, TableModel, markov, pair
from decoding.model import Busy, Request
from decoding.search.base import Hypothesis
from decoding.search_kernel import held_blocks
from decoding.sequence import Sequence
from turnout.errors import Code, TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import FinishReason, SamplingParams

VOCAB, END = 6, 0


def model(seed: int, sharp: float = 1.5) -> TableModel:
    """Probabilities depend on the two tokens before."""
    table = torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)) * sharp
    return TableModel("large", lambda tokens: table[tokens[-2], tokens[-1]], VOCAB)


def logprob(made: TableModel, answer: list[int], prompt: tuple[int, ...] = (1, 2)) -> float:
    """Of a whole answer."""
    rows = (made.next_logits([*prompt, *answer[:place]]).log_softmax(-1) for place in range(len(answer)))
    return sum(float(row[token]) for row, token in zip(rows, answer, strict=True))


async def answers(made: TableModel, search: Any = "beam", n: int = 1, width: int | None = None, **sampling: Any) -> Any:
    """Answers of a request, its sequences and the request."""
    asked = SamplingParams.model_validate({"temperature": 0.0, "max_tokens": 5, **sampling})
    seqs = tuple(Sequence([1, 2], asked, seed, (END,)) for seed in range(n))
    request, info = Request("r", seqs[0], answers=seqs), get_method("search")
    params = info.parse({"search": search, **({"width": width} if width else {})})
    async for segment in info.run(request, pair(made, made, ListText([*"abcdef"])), params):
        assert segment.tokens
    assert [seq for seq in made.cached if seq not in seqs] == []  # nothing of the forks is left
    for seq in seqs:
        made.release(seq)
    return [seq.answer for seq in seqs], seqs, request


def every_answer(length: int) -> list[list[int]]:
    """All answers: they end with `END`, or are as long as they may be."""
    open_, found = [list[int]()], list[list[int]]()
    for _ in range(length):
        longer = [[*each, token] for each in open_ for token in range(VOCAB)]
        found += [each for each in longer if each[-1] == END or len(each) == length]
        open_ = [each for each in longer if each[-1] != END]
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
async def test_a_beam_that_holds_everything_finds_the_best_of_all_answers(seed: int, penalty: float) -> None:
    made = model(seed)
    beam = {"name": "beam", "length_penalty": penalty, "early_stopping": "never"}
    found, _, _ = await answers(made, beam, n=3, width=128, max_tokens=3)
    best = sorted(every_answer(3), key=lambda each: -logprob(made, each) / len(each) ** penalty)
    assert found == best[:3]


async def test_width_1_is_greedy_decoding() -> None:
    made = model(4)
    found, [seq], _ = await answers(made, width=1, max_tokens=8, ignore_eos=True)
    plain = Sequence([1, 2], seq.sampling, 0, (END,))
    await made.decode(plain)
    assert found == [plain.answer]
    assert seq.finish_reason is FinishReason.LENGTH


async def test_scores_are_those_of_the_processed_distribution() -> None:
    """With a bias that the model's own law outweighs, another answer is the likeliest."""
    made = TableModel("large", markov(torch.tensor([[0.5, 0.3, 0.2]] * 3)), 3)
    seqs = {}
    for bias in ({}, {2: 1.0}):
        asked = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logit_bias=bias)
        seqs[len(bias)] = seq = Sequence([1], asked, 0)
        info = get_method("search")
        async for _ in info.run(Request("r", seq), pair(made, made), info.parse({"width": 3})):
            pass
    assert (seqs[0].answer, seqs[1].answer) == ([0, 0], [2, 2])


async def test_hypotheses_share_what_they_have_in_common_and_are_metered() -> None:
    """Each is fed one token a step, the prompt once; what is in no answer is counted as discarded."""
    made = model(5)
    _, seqs, _ = await answers(made, n=2, width=3, max_tokens=6, ignore_eos=True)
    meter = seqs[0].meter.models["large"]
    assert made.fed_tokens == 2 + 5 * 3
    assert (meter.prompt_tokens, meter.decode_tokens) == (2, 5 * 3)
    shown = {tuple(seq.answer[: place + 1]) for seq in seqs for place in range(5)}
    assert meter.discarded_tokens == 15 - len(shown)
    assert sum(seq.meter.models["large"].generated_tokens for seq in seqs) == 12


async def test_a_stop_string_ends_a_hypothesis() -> None:
    class Stop:
        watches = True

        def __init__(self, text: str = "") -> None:
            self.text = text

        def feed(self, token: int) -> bool:
            self.text += "abcdef"[token]
            return "cd" in self.text

        def clone(self) -> Stop:
            return Stop(self.text)

    made = model(6)
    asked = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={2: 2.0, 3: 2.0})
    seqs = [Sequence([1, 2], asked, 0, (), Stop()) for _ in range(4)]
    info = get_method("search")
    request = Request("r", seqs[0], answers=tuple(seqs))
    async for _ in info.run(request, pair(made, made, ListText([*"abcdef"])), info.parse({"width": 12})):
        pass
    texts = ["".join("abcdef"[token] for token in seq.answer) for seq in seqs]
    assert all("cd" not in text[:-1] for text in texts)
    assert any(
        text.endswith("cd") and seq.finish_reason is FinishReason.STOP for text, seq in zip(texts, seqs, strict=True)
    )


async def test_tokens_are_reported_as_the_model_finds_them() -> None:
    made = model(7)
    found, [seq], _ = await answers(made, width=2, max_tokens=4, logprobs=2, logit_bias={3: 1.0})
    for place, token in enumerate(seq.generated):
        row = made.next_logits([1, 2, *found[0][:place]]).log_softmax(-1)
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-5)
        assert [other for other, _ in token.top] == row.topk(2).indices.tolist()


async def test_processors_that_follow_surprises_see_those_of_each_hypothesis() -> None:
    """By hand: mirostat's bound is 3.2 bits, then 3.2 + 1.6 - 0.807, then 4.79: three tokens, three, then five."""
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625, 1e-9])
    mirostat = PartChoice.of("mirostat", tau=1.6, eta=1.0)
    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "processors": (mirostat,)}
    _, [seq], _ = await answers(TableModel("large", lambda tokens: probs.log(), VOCAB), width=1, **asked)
    expected = [math.log2(0.875 / 0.5), math.log2(0.875 / 0.5), 1.0]
    assert [token.surprise_bits for token in seq.generated] == pytest.approx(expected, abs=1e-4)


async def test_fewer_answers_than_asked_for_repeat_and_say_so() -> None:
    sure = TableModel("large", lambda tokens: torch.tensor([0.0, *[-math.inf] * 5]), VOCAB)
    found, _, request = await answers(sure, n=3)
    assert found == [[END]] * 3
    assert request.notes == ["search: only 1 different answers; they repeat"]


async def test_a_width_below_n_is_refused() -> None:
    with pytest.raises(TurnoutError, match="at least n are needed") as caught:
        await answers(model(8), n=3, width=2)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "method.params.width")


def test_blocks_of_hypotheses_are_shared_as_far_as_they_are_alike() -> None:
    """Blocks of 2 tokens, a prompt of 3: 2 blocks of it, one that ends with a, and that of each end."""
    start = Hypothesis(None)
    a = start.child(1, -1.0)
    b = a.child(2, -1.0)
    c, d = b.child(3, -1.0), b.child(4, -1.0)
    assert held_blocks([c, d], 3, 2) == 2 + 1 + 2
    assert held_blocks([b], 3, 2) == held_blocks([a.child(5, -1.0)], 3, 2) == 2 + 1 + 1
    assert held_blocks([start.child(1, -1.0), start.child(2, -1.0)], 3, 2) == 2 + 2
    assert held_blocks([b, c], 3, 2) == 2 + 1 + 2


async def test_memory_is_looked_at_as_the_hypotheses_grow() -> None:
    """A request that names no length is answered where its answers end in time."""
    ends = TableModel("large", lambda tokens: torch.tensor([9.0 * (len(tokens) > 5), 0, 0.5, 0.2, 0, 0]), VOCAB)
    ends.busy = lambda: Busy(0, 0, capacity=40, block_size=4)  # type: ignore[method-assign]
    found, _, _ = await answers(ends, width=4, max_tokens=10_000)
    assert found[0][-1] == END
    made = model(8)
    made.busy = ends.busy  # type: ignore[method-assign]
    with pytest.raises(TurnoutError, match=r"4 hypotheses of \d+ tokens .* memory of large, 3 do; lower") as caught:
        await answers(made, width=4, max_tokens=10_000, ignore_eos=True)
    assert (caught.value.code, caught.value.field) == (Code.OUT_OF_RANGE, "method.params.width")
    assert len(made.cached) <= 1


async def test_caches_of_hypotheses_that_only_wait_hold_half_of_the_memory_at_most() -> None:
    made = model(9, sharp=0.5)
    made.busy = lambda: Busy(0, 0, capacity=24, block_size=2)  # type: ignore[method-assign]
    most, read = 0, made.next_logits

    def watched(tokens: list[int]) -> torch.Tensor:
        nonlocal most
        most = max(most, len(made.cached))
        return read(tokens)

    made.next_logits = watched
    found, _, _ = await answers(made, "best_first", width=16, max_tokens=12, ignore_eos=True)
    bounded, most = most, 0
    del made.busy
    assert (await answers(made, "best_first", width=16, max_tokens=12, ignore_eos=True))[0] == found
    assert bounded <= 8 < most  # of 12 blocks


async def test_too_many_hypotheses_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.search_kernel.MOST_OPEN", 20)
    with pytest.raises(TurnoutError, match="more than 20 hypotheses wait") as caught:
        await answers(model(9, sharp=0.5), "best_first", width=16, max_tokens=12, ignore_eos=True)
    assert (caught.value.code, caught.value.field) == (Code.OUT_OF_RANGE, "method.params.width")


async def test_a_fault_releases_all_hypotheses() -> None:
    made, calls = model(9), []

    def fails(tokens: list[int]) -> torch.Tensor:
        calls.append(tokens)
        if len(calls) > 6:
            raise ZeroDivisionError
        return logits(tokens)

    logits, made.next_logits = made.next_logits, fails
    with pytest.raises(ZeroDivisionError):
        await answers(made, width=3, ignore_eos=True)
    assert len(made.cached) <= 1  # the request's own, which the pool releases
