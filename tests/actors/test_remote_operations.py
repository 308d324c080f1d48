"""Operations over the wire that nothing on the way knows, and the state of what they carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from actors.protocol import PendingCall
from decoding.drafters.base import DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.fixed_forward import FixedForward
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout, ReadSpec, StopCondition
from decoding.operations import Decode, Operation, Propose, Verify
from decoding.sequence import Sequence
from decoding.soft_likelihood import SoftLikelihood
from decoding.state import twin
from decoding.switching.mean_entropy import MeanEntropySwitch
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool, poll
from tests.actors.test_remote_protocol import posted
from tests.engine.harness import answer, call_of
from turnout.types import SamplingParams

# One loop for all: the models' locks belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def sequence(sampling: SamplingParams = LONG) -> Sequence:
    return Sequence([7 * i % 250 for i in range(1, 21)], sampling, seed=3)


async def test_choices_from_given_logits_are_the_same(remote: RemotePool, local: LocalPool) -> None:
    """An operation that no file of this package names; the actor knows the sequence's penalties and noise."""
    sampling = SamplingParams(temperature=0.9, top_k=20, frequency_penalty=0.7, max_tokens=200, ignore_eos=True)
    want, paths = ReadSpec(logprob=True, entropy=True, top=2, margin=True, probs=True), [(), (65,), (65, 66)]
    read = []
    for model in (local.engines["large"], remote.members["large"]):
        seq = sequence(sampling=sampling)
        await model.decode(seq, StopCondition(max_tokens=5))
        rows = await model.extend(seq, (65, 66), ReadSpec(logits=True) | want, every=True)
        got = await model.choose(seq, torch.stack([row.logits for row in rows if row.logits is not None]), paths, want)
        for row, own in zip(got, rows, strict=True):
            assert (row.token, row.margin, row.top) == (own.token, own.margin, own.top)
            assert row.logits is None
        read.append([(row.token, row.logprob, row.entropy_bits, row.top, row.margin, row.probs) for row in got])
        model.release(seq)
    for mine, theirs in zip(*read, strict=True):
        assert mine[:-1] == theirs[:-1]
        assert torch.equal(mine[-1], theirs[-1])


async def test_forwards_of_a_fixed_shape_are_equal_there_to_the_bit(remote: RemotePool, local: LocalPool) -> None:
    """So that what was compressed here is decompressed there; their cache goes with the sequence."""
    read = []
    for model in (local.engines["large"], remote.members["large"]):
        seq = sequence()
        rows = [await model.do(seq, FixedForward((7, 8 + place), place, 6)) for place in range(6)]
        rows += [await model.do(seq, FixedForward((9, 9), 0, 6))]
        model.release(seq)
        read.append(rows)
    for mine, theirs in zip(*read, strict=True):
        assert torch.equal(mine.logits, theirs.logits)
        assert mine.numerics == theirs.numerics


async def test_soft_tokens_have_the_same_gradient_there(remote: RemotePool, local: LocalPool) -> None:
    logits = torch.randn((2, 3, 261), generator=torch.Generator().manual_seed(1))
    read = []
    for model in (local.engines["large"], remote.members["large"]):
        seq = sequence()
        scores = await model.do(seq, SoftLikelihood(logits, (65, 66)))
        assert seq.meter.models["large"].draft_tokens == 2 * (20 + 3 + 2)
        model.release(seq)
        read.append(scores)
    for name in ("fluency", "prediction", "gradient"):
        assert torch.allclose(*(getattr(each, name) for each in read), atol=1e-5), name
    assert read[0].gradient.abs().max() > 1e-3


async def test_the_mean_of_hidden_states_is_the_same_there(remote: RemotePool, local: LocalPool) -> None:
    read = []
    for model in (local.engines["large"], remote.members["large"]):
        seq = sequence()
        [row] = await model.extend(seq, (65, 66), ReadSpec(draw=None, mean=True, hidden=frozenset({-1})))
        read.append((row.mean, row.hidden[-1]))
        model.release(seq)
    for mine, theirs in zip(*read, strict=True):
        assert mine is not None
        assert mine.abs().max() > 0
        assert torch.equal(mine, theirs)


@dataclass(frozen=True, slots=True)
class Nearest(Operation[tuple[float, torch.Tensor]]):
    """An operation of this file: carried out beside the model, with a tensor and a draft in it, and a tensor back."""

    name: ClassVar[str] = "nearest"
    states: torch.Tensor
    tree: DraftTree

    async def run(self, model: Any, seq: Sequence) -> tuple[float, torch.Tensor]:
        [row] = await model.extend(seq, self.tree.tokens, ReadSpec(hidden=frozenset({-1})))
        distances = (self.states - row.hidden[-1]).norm(dim=-1)
        return float(distances.min()), distances


async def test_an_operation_needs_nothing_but_its_dataclass(remote: RemotePool, local: LocalPool) -> None:
    read = []
    for model in (local.engines["large"], remote.members["large"]):
        seq = sequence()
        [row] = await model.extend(seq, (66,), ReadSpec(hidden=frozenset({-1})))
        states = torch.stack([row.hidden[-1], row.hidden[-1] + 1])
        read.append(await model.do(seq, Nearest(states, DraftTree.chain([66], "m"))))
        model.release(seq)
    (least, distances), (expected, others) = read
    assert least == expected < 1e-4
    assert torch.equal(distances, others)
    assert distances.shape == (2,)


async def test_a_rule_that_goes_there_stays_as_it_is_and_its_new_state_comes_back(
    remote: RemotePool, local: LocalPool
) -> None:
    def rule() -> MeanEntropySwitch:
        return MeanEntropySwitch(window=5, min_stay=2, threshold=100.0)

    model, sent, fresh = remote.members["large"], rule(), vars(rule())
    beside, continues = rule(), Decode(StopCondition((sent,), max_tokens=4))
    here, there = sequence(), sequence()
    for stretch in range(3):
        segment = await local.engines["large"].decode(here, StopCondition((beside,), max_tokens=4))
        before = vars(twin(sent))
        decoded = await model.do(there, continues)
        assert vars(sent) == before
        assert decoded.segment == segment
        assert vars(decoded.rules[0]) == vars(beside) != before
        continues.settle(decoded)
        assert vars(sent) == vars(beside), f"stretch {stretch}"
    assert vars(sent) != fresh
    for owner, seq in ((local.engines["large"], here), (model, there)):
        owner.release(seq)


class Counted(MatchVerifier):
    """Counts rounds."""

    changing = ("rounds",)
    rounds = 0

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        self.rounds += 1
        return super().judge(seq, draft, rows, target)


class Listing(ModelChainDrafter):
    """Proposes what it has listed, and lists what it saw; a memory that does not travel counts too."""

    changing = ("listed",)

    def __init__(self) -> None:
        super().__init__()
        self.listed: tuple[int, ...] = ()
        self.memory = [0] * 1000

    async def propose(self, model: Any, seq: Sequence, room: DraftBudget, length: Any) -> DraftTree:
        self.memory.append(len(seq))
        self.listed = (*self.listed, len(self.memory) - 1000)
        return DraftTree.chain(list(self.listed), model.name)


async def test_what_speculation_carries_stays_and_its_new_state_is_in_the_results(
    remote: RemotePool, local: LocalPool
) -> None:
    results = []
    for model in (local.engines["large"], remote.members["large"]):
        seq, verifier, drafter = sequence(), Counted(), Listing()
        for times in range(3):
            propose = Propose(drafter, DraftBudget(4, 4), FixedLength())
            proposed = await model.do(seq, propose)
            propose.settle(proposed)
            assert proposed.drafter == (drafter.listed,)
            verify = Verify(proposed.draft, verifier)
            verdict = await model.do(seq, verify)
            assert verifier.rounds == times, "it is the caller who applies the new state"
            assert verdict.state == (times + 1,)
            verify.settle(verdict)
            assert verifier.rounds == times + 1
            seq.extend(verdict.tokens, {"large": 1})
        results.append((seq.tokens, drafter.listed))
        model.release(seq)
    assert results[0] == results[1]
    assert len(drafter.memory) == 1000, "what the drafter keeps next to its model does not come back"


class WrittenDrafter(ModelChainDrafter):
    """Proposes what its caller has written, and counts deep drafts there."""

    changing = ("after",)

    async def propose(self, model: Any, seq: Sequence, room: DraftBudget, length: Any) -> DraftTree:
        if room.depth > 1:
            self.after = (*self.after, 7)
        return DraftTree.chain(list(self.after), model.name)


async def test_the_reply_of_a_cancelled_call_says_nothing_of_the_copy_sent_after_it(remote: RemotePool) -> None:
    model, seq, drafter, length = remote.members["large"], sequence(), WrittenDrafter(), FixedLength()
    connection = remote.supervisors["large"].connection
    assert connection is not None
    cancelled, next_one = (PendingCall(Propose(drafter, DraftBudget(n, n), length), seq) for n in (2, 1))
    connection.send(cancelled)
    connection.cancel(cancelled)
    connection.send(next_one)
    assert not (await next_one.future).draft.tokens
    drafter.after = (7,)
    assert (await model.propose(seq, drafter, DraftBudget(1, 1), length)).tokens == (7,)
    model.release(seq)


async def test_twins_of_many_share_a_post(remote: RemotePool) -> None:
    model, line, seq = remote.members["large"], remote.lines["large"], sequence()
    await model.decode(seq, StopCondition(max_tokens=2))
    before = len(line.posts)
    twins = model.fork_many([seq, seq])
    await posted(line)
    await model.decode(twins[1], StopCondition(max_tokens=3))
    assert len(line.posts) == before + 2
    await model.decode(twins[0], StopCondition(max_tokens=3))
    await model.decode(seq, StopCondition(max_tokens=3))
    assert twins[0].tokens == twins[1].tokens == seq.tokens
    for each in (seq, *twins):
        model.release(each)


async def test_a_search_finds_there_what_it_finds_here(remote: RemotePool, local: LocalPool) -> None:
    """Hypotheses fork, are read and are released there; log-probabilities of the processed law travel."""
    phrases = {"search": {"name": "constrained", "phrases": [[66, 67]]}}
    for params in ({"width": 3}, phrases):
        call = call_of([7 * i % 250 for i in range(1, 21)], "search", params, n=2, max_tokens=6, logit_bias={65: 2.0})
        assert (await answer(remote, call)).texts == (await answer(local, call)).texts
    await poll(lambda: remote.stats().sequences == 0, "the hypotheses are released there")
