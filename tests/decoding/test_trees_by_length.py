"""Length policies inside draft trees: where branches end, that nothing drawn is lost, and that the law stays."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.model_tree import ModelTreeDrafter
from decoding.fakes import TableModel
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.lengths.base import LengthPolicy, Round, Step
from decoding.lengths.confidence import ConfidenceLength, ConfidenceParams
from decoding.lengths.disco import DiscoLength
from decoding.lengths.specdecpp import SpecDecPlusPlusLength, SpecDecPlusPlusParams
from decoding.lengths.svip import SvipLength, SvipParams
from decoding.lengths.thompson import ThompsonLength, ThompsonParams
from decoding.model import Model, Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.rejection import RejectionVerifier
from tests.conformance.parts import ALL_DRAFTERS
from tests.decoding.markov_rounds import DRAFT, FAR, Readings, now, p_value
from turnout.registry import load, names
from turnout.types import SamplingParams

# Trees of the small model that are grown level by level.
CHOSEN = ["model_tree", "rasd", "staged"]
DRAWN = ["dyspec", "rasd", "rsd_c", "rsd_s", "sequoia", "staged"]
EVERY = [*((name, Candidates.FIXED) for name in CHOSEN), *((name, Candidates.DRAWN) for name in DRAWN)]
# Of DRAFT's rows, the middle one's entropy is above this bound, and the others' below it.
BETWEEN = 1.06
ROOM = DraftBudget(3, 14)  # three levels of two children each


def drafter_of(name: str, kind: Candidates) -> Drafter:
    made: Drafter = ALL_DRAFTERS[name](candidates=kind)
    return made


def svip(nats: float) -> SvipLength:
    """Stops below tokens whose distribution has a larger entropy."""
    return SvipLength(SvipParams(scale=1.0, threshold=math.sqrt(nats)))


def begun(length: LengthPolicy, model: Any, seq: Sequence) -> LengthPolicy:
    """The policy, asked for the round as `Speculation` asks it."""
    length.before_round(Round(seq, model, model, False, "tree"))
    return length


def with_entropy(nats: float, size: int = 6) -> torch.Tensor:
    """Logits of a distribution with this entropy: one token has what the others share alike."""
    low, high = 1.0 / size, 1.0
    for _ in range(60):
        best = (low + high) / 2
        rest = (1.0 - best) / (size - 1)
        entropy = -best * math.log(best) - (size - 1) * rest * math.log(rest)
        low, high = (best, high) if entropy > nats else (low, best)
    return torch.tensor([low, *[(1.0 - low) / (size - 1)] * (size - 1)]).log()


def by_depth(*entropies: float) -> TableModel:
    """A model whose distribution is as unsure as said after one token, two tokens, and so on."""
    rows = [with_entropy(each) for each in entropies]
    return TableModel("small", lambda tokens: rows[min(len(tokens), len(rows)) - 1], 6)


@pytest.mark.parametrize(("name", "kind"), EVERY, ids=str)
async def test_entropies_of_0_2_0_5_0_7_end_the_tree_at_depth_three(name: str, kind: Candidates) -> None:
    for length, deepest in ((SvipLength(), 3), (SvipLength(SvipParams(threshold=1000.0)), 4)):
        model, seq = by_depth(0.2, 0.5, 0.7, 0.1, 0.1), Sequence([0], SamplingParams(), 3)
        tree = await drafter_of(name, kind).propose(model, seq, DraftBudget(4, 40), begun(length, model, seq))
        assert max(tree.depths()) + 1 == deepest
        assert model.forwards <= deepest, "what nobody drafts below is not read"


@pytest.mark.parametrize(("name", "kind"), EVERY, ids=str)
async def test_every_branch_ends_below_its_own_first_unsure_token(make_model: Any, name: str, kind: Candidates) -> None:
    """No node has children that the policy refuses, and every node's distribution above it was sure."""
    ended = 0
    for seed in range(12):
        model, seq = make_model("small", seed), Sequence([seed, 1], SamplingParams(), seed)
        length = svip(1.9)
        tree = await drafter_of(name, kind).propose(model, seq, DraftBudget(4, 24), begun(length, model, seq))
        for node in range(len(tree)):
            drafted = [tree.tokens[each] for each in tree.path(node)]
            entropies = [
                float(torch.special.entr(model.next_logits([*seq.tokens, *drafted[:place]]).softmax(-1)).sum())
                for place in range(len(drafted))
            ]
            assert all(entropy <= 1.9 for entropy in entropies[:-1])
            ended += entropies[-1] > 1.9 and not tree.children(node)
    assert ended > 0


async def test_a_branch_that_ends_leaves_its_room_to_others(make_model: Any) -> None:
    """Of `model_tree`: the nodes of a best-first search that never looks below an unsure token."""

    def best_first(model: TableModel, context: list[int], most: int, depth: int) -> set[tuple[int, ...]]:
        open_paths, found = [(0.0, ())], []
        while open_paths and len(found) <= most:
            cost, path = min(open_paths)
            open_paths.remove((cost, path))
            found.append(path)
            above = model.next_logits([*context, *path[:-1]]).softmax(-1)
            unsure = bool(path) and float(torch.special.entr(above).sum()) > 1.9
            if len(path) < depth and not unsure:
                logprobs = model.next_logits([*context, *path]).log_softmax(-1).tolist()
                open_paths += [(cost - value, (*path, token)) for token, value in enumerate(logprobs)]
        return set(found) - {()}

    stopped = 0
    for seed in range(8):
        model, seq = make_model("small", seed), Sequence([1, 2], SamplingParams(), 0)
        room = DraftBudget(4, 12)
        drafter = ModelTreeDrafter(ModelTreeDrafter.Params(branch=12))
        tree = await drafter.propose(model, seq, room, begun(svip(1.9), model, seq))
        paths = {tuple(tree.tokens[each] for each in tree.path(node)) for node in range(len(tree))}
        assert paths == best_first(model, list(seq.tokens), room.nodes, room.depth)
        free = await drafter.propose(model, seq, room, begun(svip(100.0), model, seq))
        stopped += free.tokens != tree.tokens
    assert stopped > 0


async def test_the_policy_sees_each_token_with_the_row_it_was_chosen_from(make_model: Any) -> None:
    model, seq = make_model("small", 4), Sequence([3, 1], SamplingParams(), 5)
    seen: list[list[Step]] = []

    class Watching(SvipLength):
        want = ReadSpec(draw=None, entropy=True, top=1)

        def continues(self, path: Any) -> bool:
            seen.append(list(path))
            return True

    await ModelTreeDrafter().propose(model, seq, DraftBudget(3, 10), begun(Watching(), model, seq))
    assert {len(path) for path in seen} == {1, 2}
    for path in seen:
        context = list(seq.tokens)
        for step in path:
            assert step.row.top[0][0] == int(model.next_logits(context).argmax())
            context.append(step.token)


class ByToken(LengthPolicy):
    """Ends a branch below one token: no policy can look closer."""

    stepwise = True

    def continues(self, path: Any) -> bool:
        return bool(path[-1].token != 1)

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Nothing to learn."""


class Head:
    """Stands for a trained one: takes a token for as good as the third one's probability where it was drawn."""

    top = 3

    def probability(self, read: Any, place: int = 0) -> float:
        probs = read.probs if isinstance(read, Readout) else read
        return float(probs[2])


def disco() -> DiscoLength:
    """Goes on where the third token had more than 0.3: below one of the three rows of DRAFT."""
    length: Any = DiscoLength()
    length._head, length._threshold, length._most = Head(), 0.4, 20
    return length  # type: ignore[no-any-return]


def specdecpp() -> SpecDecPlusPlusLength:
    length: Any = SpecDecPlusPlusLength(SpecDecPlusPlusParams(threshold=0.6, least=1))
    length._head = Head()
    return length  # type: ignore[no-any-return]


LAWFUL: dict[str, Callable[[], LengthPolicy]] = {
    "svip": lambda: svip(BETWEEN),
    "thompson": lambda: ThompsonLength(ThompsonParams(abstains=False)),
    "confidence": lambda: ConfidenceLength(ConfidenceParams(threshold=0.45)),
    "disco": disco,
    "specdecpp": specdecpp,
    "by_token": ByToken,
}


@pytest.mark.parametrize("length", list(LAWFUL))
def test_these_policies_end_some_branches_and_not_others(length: str) -> None:
    model = Readings(DRAFT)
    depths = set()
    for seed in range(60):
        seq = Sequence([seed % 3], SamplingParams(), seed)
        policy = begun(LAWFUL[length](), model, seq)
        tree = now(drafter_of("rsd_c", Candidates.DRAWN).propose(model, seq, ROOM, policy))  # type: ignore[arg-type]
        ends = {node: tree.depth(node) for node in range(len(tree)) if not tree.children(node)}
        depths |= set(ends.values())
    assert len(depths) > 1


# A policy meets every tree in the same few lines: two policies with all of them, the others with two.
MANY = [
    *((name, length) for name in DRAWN for length in ("svip", "thompson")),
    *((name, length) for name in ("rsd_s", "dyspec") for length in LAWFUL if length not in ("svip", "thompson")),
]


def test_every_policy_that_looks_at_tokens_is_among_them() -> None:
    looking = {name for name in names(LENGTHS) if load(LENGTHS, name, "part").PART.stepwise}
    assert looking <= set(LAWFUL)


def test_the_bound_of_these_laws_stops_at_some_tokens_and_not_at_others() -> None:
    entropies = torch.special.entr(DRAFT).sum(-1)
    assert sorted((entropies <= BETWEEN).tolist()) == [False, True, True]


@pytest.mark.parametrize(("name", "length"), MANY, ids=str)
def test_the_law_stays_the_targets(name: str, length: str) -> None:
    torch.set_num_threads(1)
    drafter = drafter_of(name, Candidates.DRAWN)
    assert p_value(drafter, RejectionVerifier(), 700, ROOM, DRAFT, LAWFUL[length]) > 1e-4


@pytest.mark.exactness
@pytest.mark.parametrize(("name", "length"), MANY, ids=str)
def test_the_law_stays_the_targets_over_many_runs(name: str, length: str) -> None:
    drafter = drafter_of(name, Candidates.DRAWN)
    assert p_value(drafter, RejectionVerifier(), 200_000, ROOM, DRAFT, LAWFUL[length]) > 1e-4


class Dropping(Drafter):
    """Takes the tokens a policy stops at back out of the tree: the fault that rule P is about."""

    kinds = frozenset({Candidates.DRAWN})

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        tree = await drafter_of("rsd_c", Candidates.DRAWN).propose(model, seq, DraftBudget(1, room.nodes), length)
        kept = [node for node in tree.children(ROOT) if float(FAR[seq.tokens[-1]][tree.tokens[node]]) > 0.3]
        proposals = tuple(tree.proposal(node) for node in kept)
        return DraftTree(tuple(tree.tokens[node] for node in kept), (ROOT,) * len(kept), tree.source, proposals)


def test_taking_back_a_drawn_token_is_caught() -> None:
    torch.set_num_threads(1)
    assert p_value(Dropping(), RejectionVerifier(), 1_000, DraftBudget(2, 6), FAR, LAWFUL["svip"]) < 1e-6
