"""Rounds of speculation with drafters of every kind of ill will, and with one that knows the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decoding.decode_loop import stream
from decoding.drafters.base import DraftBudget, Drafter
from decoding.fakes import TableModel, pair
from decoding.lengths.base import LengthPolicy
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import Model, Request
from decoding.noise import Purpose, noise_key, uniform
from decoding.selectors.first import First
from decoding.sequence import Sequence
from decoding.speculation import Arm, Speculation
from decoding.tree import ROOT, DraftTree
from turnout.errors import Code, TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import FinishReason, SamplingParams

VOCAB = 12
Propose = Callable[[Sequence, DraftBudget], DraftTree]


class Scripted(Drafter):
    """Proposes whatever a function says."""

    def __init__(self, script: Propose) -> None:
        super().__init__()
        self.script = script
        self.observed: list[int] = []

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        return self.script(seq, room)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: Any) -> None:
        self.observed.append(len(verdict.rows))


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


@pytest.fixture
def models(make_model: Any) -> tuple[TableModel, TableModel]:
    return make_model("small", 1), make_model("large", 2, num_parameters=10)


def sequence(index: int, *, stop: tuple[int, ...] = (), eos: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return Sequence([index % VOCAB, index // VOCAB], params, index, eos, Stop(*stop) if stop else None)


async def plainly(large: TableModel, index: int, **options: Any) -> Sequence:
    seq = sequence(index, **options)
    async for _ in stream(large, seq):
        pass
    return seq


async def drafted(
    models: tuple[TableModel, TableModel],
    scripts: list[Propose],
    index: int,
    verifier: str = "match",
    most: int = 5,
    **options: Any,
) -> tuple[Sequence, list[Scripted]]:
    seq, drafters = sequence(index, **options), [Scripted(script) for script in scripts]
    arms = [Arm(drafter, FixedLength(FixedParams(most=most)), 9) for drafter in drafters]
    judge = PartChoice(name=verifier).make("decoding.verifiers", "verifier")
    async for _ in Speculation(Request("r", seq), pair(*models), arms, First(), judge).run():
        pass
    return seq, drafters


def any_tree(seq: Sequence, room: DraftBudget, vocab: int = VOCAB) -> DraftTree:
    """Random tokens below random parents, as many as there is room for."""

    def number(lane: int, below: int) -> int:
        return int(uniform(noise_key(seq.seed, len(seq), Purpose.DRAFT, lane)) * below)

    parents: list[int] = []
    depths: list[int] = []
    for node in range(room.nodes):
        parent = number(2 * node, node + 1) - 1
        depth = 1 if parent == ROOT else depths[parent] + 1
        parents.append(parent if depth <= room.depth else ROOT)
        depths.append(depth if depth <= room.depth else 1)
    tokens = tuple(number(2 * node + 1, vocab) for node in range(room.nodes))
    return DraftTree(tokens, tuple(parents), "small")


def wrong(truth: list[int]) -> Propose:
    """Never what the target says next."""

    def script(seq: Sequence, room: DraftBudget) -> DraftTree:
        right = truth[len(seq)] if len(seq) < len(truth) else 0
        return DraftTree.chain([(right + 1) % VOCAB] * room.depth, "small")

    return script


def knowing(truth: list[int]) -> Propose:
    """Always what the target says next, beside something else."""

    def script(seq: Sequence, room: DraftBudget) -> DraftTree:
        path = truth[len(seq) :][: room.depth]
        return DraftTree.merged([[path[0] + 1 if path else 0], path], room.nodes, "small")

    return script


ADVERSARIES: dict[str, Propose] = {
    "random": any_tree,
    "wrong vocabulary": lambda seq, room: any_tree(seq, room, 3 * VOCAB),
    "no token of the vocabulary": lambda seq, room: DraftTree.chain([VOCAB, -1][: room.depth], "small"),
    "empty": lambda seq, room: DraftTree.empty("small"),
}


@pytest.mark.parametrize("adversary", list(ADVERSARIES))
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 4, "frequency_penalty": 0.7}]
)
async def test_no_drafter_changes_the_text(models: Any, adversary: str, sampling: dict[str, Any]) -> None:
    accepted = 0
    for index in range(36):
        plain = await plainly(models[1], index, **sampling)
        seq, _ = await drafted(models, [ADVERSARIES[adversary]], index, **sampling)
        assert seq.tokens == plain.tokens
        accepted += seq.meter.speculation.accepted_tokens
    assert (accepted > 0) == (adversary in ("random", "wrong vocabulary"))


@pytest.mark.parametrize("verifier", ["match", "rejection"])
async def test_an_always_wrong_drafter_brings_one_token_a_round(models: Any, verifier: str) -> None:
    for index in range(20):
        plain = await plainly(models[1], index, temperature=0.0)
        seq, _ = await drafted(models, [wrong(plain.tokens)], index, verifier, temperature=0.0)
        assert seq.tokens == plain.tokens
        assert (seq.meter.speculation.rounds, seq.meter.speculation.accepted_tokens) == (12, 0)


@pytest.mark.parametrize("most", [1, 3, 5])
async def test_a_knowing_drafter_brings_its_depth_and_one(models: Any, most: int) -> None:
    plain = await plainly(models[1], 7, temperature=0.0)
    seq, [drafter] = await drafted(models, [knowing(plain.tokens)], 7, most=most, temperature=0.0)
    speculation = seq.meter.speculation
    assert seq.tokens == plain.tokens
    assert speculation.rounds == len(drafter.observed) == 12 // (most + 1)
    assert speculation.tokens_per_round == most + 1
    assert speculation.drafted_at == speculation.accepted_at == [speculation.rounds] * most
    assert speculation.acceptance == [1.0] * most
    assert 0.0 < speculation.draft_time_share < 1.0


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 1.0}]
)
async def test_ends_inside_an_accepted_path_are_those_of_plain_decoding(
    models: Any, verifier: str, sampling: dict[str, Any]
) -> None:
    reasons = set()
    for index in range(27):
        whole = await plainly(models[1], index, **sampling)
        for options in (
            {"eos": (whole.tokens[5],)},
            {"stop": (whole.tokens[6], whole.tokens[7])},
            {"stop_token_ids": (whole.tokens[9],)},
            {"max_tokens": 1 + index % 9},
        ):
            plain = await plainly(models[1], index, **sampling, **options)
            seq, _ = await drafted(models, [knowing(whole.tokens)], index, verifier, **sampling, **options)
            assert (seq.tokens, seq.finish_reason) == (plain.tokens, plain.finish_reason)
            assert seq.meter.speculation.emitted_tokens == len(seq.generated)
            reasons.add(seq.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


async def test_the_next_drafter_is_asked_where_one_has_nothing(models: Any) -> None:
    plain = await plainly(models[1], 3, temperature=0.0)
    empty: Propose = ADVERSARIES["empty"]

    def every_other(seq: Sequence, room: DraftBudget) -> DraftTree:
        return empty(seq, room) if len(seq.generated) % 2 else knowing(plain.tokens)(seq, DraftBudget(1, room.nodes))

    seq, drafters = await drafted(models, [every_other, empty, knowing(plain.tokens)], 3, temperature=0.0)
    assert seq.tokens == plain.tokens
    assert all(len(drafter.observed) == seq.meter.speculation.rounds for drafter in drafters), "all learn from all"


async def test_parts_that_do_not_fit_are_refused_or_left_out() -> None:
    info = get_method("speculative")
    for params, field, says in (
        ({"drafter": "model_chain", "verifier": "spectr"}, "method.params.verifier", "judges sequences drafts"),
        ({"drafter": "rsd_s", "verifier": "typical"}, "method.params.verifier", "'rsd_s' makes drawn"),
        ({"drafter": "copyspec", "length": "svip"}, "method.params.length", "'copyspec' drafts them at once"),
        ({"drafter": "swift"}, "method.params.drafter", "needs a model of 3 layers"),
        ({"drafter": ["copyspec", "swift"]}, "method.params.drafter.1", "needs a model of 3 layers"),
        ({"drafter": [{"drafter": "del"}]}, "method.params.drafter.0.drafter", "needs a model of 2 layers"),
    ):
        small, large = (TableModel(name, lambda tokens: plain_logits(tokens), VOCAB) for name in ("small", "large"))
        with pytest.raises(TurnoutError) as caught:
            async for _ in info.run(Request("r", sequence(1)), pair(small, large), info.parse(params)):
                pass
        assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)
        assert says in caught.value.message
        request = Request("r", sequence(1))
        async for _ in info.run(request, pair(small, large), info.parse({**params, "fallback": "plain"})):
            pass
        assert request.sequence.tokens == (await plainly(large, 1)).tokens
        assert len(request.notes) == 1
        assert says in request.notes[0]
        assert request.sequence.meter.speculation.rounds == 0


def plain_logits(tokens: list[int]) -> Any:
    import torch

    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(tokens[-1]))
