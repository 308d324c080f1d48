"""Drafters of ill will on a real cache: the text, its ends and the keys and values are those of plain decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from decoding.decode_loop import stream
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.fakes import ListText
from decoding.lengths.base import LengthParams, LengthPolicy, Round
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import ModelPool, ReadSpec, Request
from decoding.noise import Purpose, noise_key
from decoding.noise import uniform as random_number
from decoding.selectors.first import First
from decoding.sequence import Sequence
from decoding.speculation import Arm, Speculation
from decoding.tree import ROOT, DraftTree
from engine.model import EngineModel
from tests.decoding.adversaries import ADVERSARIES, Drawing, uniform
from tests.engine.harness import Reference, twins
from training.random_models import llama_config
from turnout.part_choice import PartChoice
from turnout.types import FinishReason, SamplingParams

VOCAB, MOST = 40, 24
Script = Callable[[Sequence, DraftBudget], DraftTree]


class Scripted(Drafter):
    """Proposes what a function says; says that it was chosen."""

    kinds = frozenset({Candidates.FIXED})

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script

    async def propose(self, model: Any, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        return self.script(seq, room)


class Stop:
    """Ends the answer when the last tokens are these."""

    watches = True

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.seen = tokens, ()

    def feed(self, token_id: int) -> bool:
        self.seen = (*self.seen, token_id)[-len(self.tokens) :]
        return self.seen == self.tokens

    def clone(self) -> Stop:
        return Stop(*self.tokens)


def loaded_twins() -> tuple[EngineModel, Reference]:
    config = llama_config(VOCAB, hidden_size=32, num_hidden_layers=2, pad_token_id=0, eos_token_id=1)
    return twins(config, seed=4, spread=0.3, block_size=4)


@pytest.fixture(scope="module")
def loaded() -> tuple[EngineModel, Reference]:
    return loaded_twins()


@pytest.fixture(scope="module")
def whole_answers() -> dict[float, list[int]]:
    """What plain decoding writes, by temperature, once it was asked."""
    return {}


def number(seq: Sequence, lane: int, below: int) -> int:
    return int(random_number(noise_key(seq.seed, len(seq), Purpose.DRAFT, lane)) * below)


def random_tree(seq: Sequence, room: DraftBudget, vocab: int = VOCAB) -> DraftTree:
    parents: list[int] = []
    depths: list[int] = []
    for node in range(room.nodes):
        parent = number(seq, 2 * node, node + 1) - 1
        depth = 1 if parent == ROOT else depths[parent] + 1
        parents.append(parent if depth <= room.depth else ROOT)
        depths.append(min(depth, room.depth) if depth <= room.depth else 1)
    return DraftTree(tuple(number(seq, 2 * n + 1, vocab) for n in range(room.nodes)), tuple(parents), "m")


def wrong(truth: list[int]) -> Script:
    def script(seq: Sequence, room: DraftBudget) -> DraftTree:
        right = truth[len(seq)] if len(seq) < len(truth) else 0
        return DraftTree.chain([(right + 1) % VOCAB] * room.depth, "m")

    return script


def knowing(truth: list[int]) -> Script:
    """What comes next, beside a branch that does not: the accepted path's slots are not the first ones."""

    def script(seq: Sequence, room: DraftBudget) -> DraftTree:
        path = truth[len(seq) :][: room.depth]
        return DraftTree.merged([[(path[0] + 1) % VOCAB if path else 0, 3], path], room.nodes, "m")

    return script


def half(truth: list[int]) -> Script:
    """Right for a while, then wrong: a rollback in every round."""

    def script(seq: Sequence, room: DraftBudget) -> DraftTree:
        path = truth[len(seq) :][: room.depth]
        keep = number(seq, 0, len(path) + 1)
        return DraftTree.chain([*path[:keep], *[(token + 1) % VOCAB for token in path[keep:]]], "m")

    return script


SCRIPTS: dict[str, Callable[[list[int]], Script]] = {
    "wrong": wrong,
    "random": lambda truth: random_tree,
    "another vocabulary": lambda truth: lambda seq, room: random_tree(seq, room, 3 * VOCAB),
    "no token at all": lambda truth: lambda seq, room: DraftTree.chain([VOCAB, -1, 2 * VOCAB][: room.depth], "m"),
    "empty": lambda truth: lambda seq, room: DraftTree.empty("m"),
    "knowing": knowing,
    "half": half,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {
        "temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4,
    },
}  # fmt: skip


def sequence(index: int, stop: tuple[int, ...] = (), eos: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": MOST, **sampling})
    return Sequence([2 + index, 5, 7 + index], params, index, eos, Stop(*stop) if stop else None)


async def plainly(model: EngineModel, index: int, **options: Any) -> Sequence:
    seq = sequence(index, **options)
    async for _ in stream(model, seq):
        pass
    model.release(seq)
    return seq


async def rounds(
    model: EngineModel, seq: Sequence, drafter: Drafter, length: LengthPolicy, verifier: str = "match"
) -> AsyncIterator[None]:
    """Every round of an answer; the cache is given back at its end."""
    models = ModelPool({"m": model}, {"small": "m", "large": "m"}, ListText([""] * VOCAB))
    judge = PartChoice(name=verifier).make("decoding.verifiers", "verifier")
    async for _ in Speculation(Request("r", seq), models, [Arm(drafter, length, 12)], First(), judge).run():
        yield
    model.release(seq)


async def assert_intact(model: EngineModel, plain: Reference, seq: Sequence) -> None:
    """What is read at the sequence's end, on the cache as it is, equals a fresh forward over all tokens."""
    twin = model.fork(seq)
    twin.finish_reason = None
    [row] = await model.extend(twin, want=ReadSpec(draw=None, logits=True))
    torch.testing.assert_close(row.logits, plain.logits(seq.tokens)[-1], atol=1e-4, rtol=0)
    model.release(twin)


@pytest.mark.parametrize("name", list(SCRIPTS))
@pytest.mark.parametrize(
    ("verifier", "law"),
    [*(("match", law) for law in SAMPLINGS), *(("rejection", law) for law in SAMPLINGS if law != "sampled")],
)
async def test_no_drafter_changes_the_text_or_the_cache(loaded: Any, name: str, verifier: str, law: str) -> None:
    model, plain = loaded
    accepted = 0
    for index in range(2):
        expected = await plainly(model, index, **SAMPLINGS[law])
        seq, drafter = sequence(index, **SAMPLINGS[law]), Scripted(SCRIPTS[name](expected.tokens))
        async for _ in rounds(model, seq, drafter, FixedLength(FixedParams(most=4)), verifier):
            if index == 0 or seq.finished:
                await assert_intact(model, plain, seq)
        assert (seq.tokens, seq.finish_reason) == (expected.tokens, expected.finish_reason)
        accepted += seq.meter.speculation.accepted_tokens
    if name in ("wrong", "empty", "no token at all"):
        assert accepted == 0
    if name in ("knowing", "half"):
        assert accepted > MOST // 2
    assert model.pool.num_held == 0
    model.pool.check_integrity()


# Sampled, they change the text and keep its law: tests/conformance/test_adversaries.py.
DRAWING = {"rejection": Candidates.DRAWN, "spectr": Candidates.SEQUENCES}


@pytest.mark.parametrize("name", list(ADVERSARIES))
@pytest.mark.parametrize("verifier", list(DRAWING))
@pytest.mark.parametrize("law", list(SAMPLINGS))
async def test_no_drawn_draft_changes_greedy_text_or_the_cache(loaded: Any, name: str, verifier: str, law: str) -> None:
    model, plain = loaded
    drafted = 0
    texts = []
    for looks in (True, False):  # at the cache after every round; what is read there must not change the text
        seq = sequence(0, **SAMPLINGS[law])
        drafter = Drawing(ADVERSARIES[name](VOCAB), DRAWING[verifier])
        async for _ in rounds(model, seq, drafter, FixedLength(FixedParams(most=4)), verifier):
            if looks:
                await assert_intact(model, plain, seq)
        texts.append(seq.tokens)
        drafted += seq.meter.speculation.draft_tokens
    if law != "sampled":
        texts.append((await plainly(model, 0, **SAMPLINGS[law])).tokens)
    assert all(text == texts[0] for text in texts)  # the same seed, the same text
    assert drafted > MOST
    assert model.pool.num_held == 0
    model.pool.check_integrity()


@pytest.mark.parametrize("verifier", ["match", *DRAWING])
async def test_a_drawn_token_of_another_vocabulary_ends_the_answer_before_the_target_reads_it(
    loaded: Any, verifier: str
) -> None:
    """Left out, it would change what its siblings' distributions mean; judged, it would have no probability."""
    model, plain = loaded

    def beyond(before: list[int]) -> torch.Tensor:
        q = torch.zeros(2 * VOCAB)
        q[before[-1] if len(before) < 12 else VOCAB + 3] = 1.0
        return q

    seq, emitted = sequence(1, **SAMPLINGS["sampled"]), 0
    drafter = Drawing(beyond, DRAWING.get(verifier, Candidates.DRAWN), tells=uniform(VOCAB))
    meter, forwards = seq.meter.of(model.name, model.num_parameters), 0

    async def answer() -> None:
        nonlocal emitted, forwards
        async for _ in rounds(model, seq, drafter, FixedLength(FixedParams(most=4)), verifier):
            emitted, forwards = len(seq.generated), meter.forwards

    with pytest.raises(ValueError, match="outside the target's vocabulary was drawn"):
        await answer()
    assert (meter.forwards, len(seq.generated)) == (forwards, emitted)
    assert emitted > 0
    await assert_intact(model, plain, seq)
    model.release(seq)
    assert model.pool.num_held == 0


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("law", ["greedy", "penalties"])
async def test_ends_inside_an_accepted_path_are_those_of_plain_decoding(loaded: Any, verifier: str, law: str) -> None:
    model, plain = loaded
    reasons, looks = set(), 0
    for index in range(2):
        whole = (await plainly(model, index, **SAMPLINGS[law])).tokens
        for options in (
            {"eos": (whole[3 + 6],)},
            {"stop": (whole[3 + 9], whole[3 + 10])},
            {"stop_token_ids": (whole[3 + 12],)},
            *({"max_tokens": most} for most in (1, 2, 6, 11)),
        ):
            expected = await plainly(model, index, **SAMPLINGS[law], **options)  # type: ignore[arg-type]
            seq = sequence(index, **SAMPLINGS[law], **options)  # type: ignore[arg-type]
            drafter = Scripted(knowing(whole))
            async for _ in rounds(model, seq, drafter, FixedLength(FixedParams(most=5)), verifier):
                if seq.finished:
                    await assert_intact(model, plain, seq)
                    looks += 1
            assert (seq.tokens, seq.finish_reason) == (expected.tokens, expected.finish_reason)
            assert seq.meter.speculation.emitted_tokens == len(seq.generated)
            reasons.add(seq.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert looks == 2 * 7


class Pause(LengthPolicy):
    """Drafts of four tokens, none between two lengths of the answer."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(LengthParams(most=4))
        self.span = range(start, end)
        self.tokens: dict[bool, list[int]] = {False: [], True: []}  # of drafted rounds, before and after
        self.after = False

    def before_round(self, round: Round) -> int:
        self.after = len(round.seq.generated) >= self.span.stop
        return 0 if len(round.seq.generated) in self.span else 4

    def observe(self, draft: DraftTree, verdict: Any, seconds: float) -> None:
        if len(draft):
            self.tokens[self.after].append(len(verdict.tokens))


@pytest.mark.parametrize("drafter", ["model_chain", "model_tree", "vocab_trim", "rsd_s", "dyspec", "sequoia", "staged"])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_a_draft_model_is_as_good_after_a_pause_as_before(
    loaded: Any, whole_answers: dict[float, list[int]], drafter: str, temperature: float
) -> None:
    """The target's own weights draft: what the draft cache lacks or has wrong would show as rejections."""
    large, plain = loaded
    small, _ = loaded_twins()  # nothing of another drafter's answer may be cached
    models = ModelPool({"s": small, "m": large}, {"small": "s", "large": "m"}, ListText([""] * VOCAB))
    judge = PartChoice(name="match").make("decoding.verifiers", "verifier")
    seq = sequence(1, max_tokens=180, ignore_eos=True, temperature=temperature)
    length = Pause(60, 120)
    part = PartChoice(name=drafter).make("decoding.drafters", "drafter")
    async for _ in Speculation(Request("r", seq), models, [Arm(part, length, 24)], First(), judge).run():
        pass
    if temperature not in whole_answers:
        expected = await plainly(large, 1, max_tokens=180, ignore_eos=True, temperature=temperature)
        whole_answers[temperature] = expected.tokens
    assert seq.tokens == whole_answers[temperature]
    before, after = (sum(each) / len(each) for each in (length.tokens[False], length.tokens[True][:-1]))
    assert before > 2.0
    assert after > 0.98 * before if temperature == 0.0 else after > 0.8 * before
    for model in (small, large):
        await assert_intact(model, plain, seq)
        model.release(seq)
    assert small.pool.num_held == large.pool.num_held == 0
