"""RASD: retrieval, pruning, fusion, and the law of drafts that are partly drawn and partly retrieved."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.drafters._retrieval import Branch, fuse
from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.rasd import RasdDrafter, RasdParams
from decoding.fakes import TableModel
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout
from decoding.ngrams import RecentTexts
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.many_runs import many_runs
from tests.decoding.markov_rounds import DRAFT, POSITIONS, TARGET, Readings, now
from tests.engine.harness import twins
from training.random_models import llama_config
from turnout.types import SamplingParams, Token

A, B, C, D, E = range(5)
LENGTH = FixedLength()
PARAMS = {"drafter": "rasd"}
ROOM = DraftBudget(16, 60)


def test_fusion_keeps_one_copy_of_what_agrees():
    draft = DraftTree.chain([A, B, C], "small")
    fused = fuse(draft, Branch.of([[A, B, D], [E]]), {A: 0.5, E: 0.2}, 60)
    assert (fused.tokens, fused.parents) == ((A, B, C, D, E), (ROOT, 0, 1, 1, ROOT))


def test_retrieved_paths_go_in_by_probability_times_count():
    retrieved = Branch.of([[A, B], [A, B], [A, C], [D, E], [B, B], [B, B], [B, B]])
    assert (retrieved.count, retrieved.below[A].count, retrieved.below[A].below[B].count) == (7, 3, 2)
    plausible = {A: 0.2, D: 0.9}
    whole = fuse(DraftTree.empty("s"), retrieved, plausible, 60)
    assert whole.tokens == (D, E, A, B, C)  # 0.9, 0.9, 0.6, 0.4, 0.2; what begins with B is implausible
    assert whole.parents == (ROOT, 0, ROOT, 2, 2)
    for most in range(6):
        assert fuse(DraftTree.empty("s"), retrieved, plausible, most).tokens == whole.tokens[:most]


def test_what_was_drawn_stays_whole_and_first_among_siblings():
    q = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])
    draft = DraftTree((B, A, C), (ROOT, ROOT, 0), "s", (q, q, q))
    fused = fuse(draft, Branch.of([[D], [B, E], [B, C, A]]), {B: 0.2, D: 0.2}, 6)
    assert fused.tokens[:3] == draft.tokens
    assert [proposal is None for proposal in fused.proposals] == [False] * 3 + [True] * 3
    assert {(fused.tokens[node], fused.parents[node]) for node in (3, 4, 5)} == {(D, ROOT), (E, 0), (A, 2)}
    assert fuse(draft, Branch.of([[D]]), {D: 1.0}, 3) == draft


@pytest.mark.parametrize("candidates", [Candidates.FIXED, Candidates.DRAWN])
@pytest.mark.parametrize(("depth", "nodes"), [(16, 60), (3, 60), (16, 7), (1, 1), (2, 5)])
async def test_drafts_keep_to_their_room(make_model, candidates: Candidates, depth: int, nodes: int):
    model = make_model("small", 3)
    seq = Sequence([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2], SamplingParams(), 0)
    params = RasdParams(plausible=12)
    draft = await RasdDrafter(params, candidates).propose(model, seq, DraftBudget(depth, nodes), LENGTH)
    assert 0 < len(draft) <= nodes
    assert max(draft.depths()) < depth
    assert model.forwards <= min(depth, params.model_depth)
    assert model.forwards == min(depth, params.model_depth) or nodes < 24
    if nodes == 60:
        assert max(draft.depths()) + 1 == min(depth, 10)  # 3 4 5 1 2 3 6 7 1 2 was retrieved
    for parent in range(ROOT, len(draft)):
        siblings = [draft.tokens[child] for child in draft.children(parent)]
        assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
async def test_greedy_output_is_plain_greedy(run, make_model, verifier):
    small, large = make_model("small", 1), make_model("large", 2)
    for index in range(12):
        sampling = {"prompt": (index, 1), "temperature": 0, "max_tokens": 24}
        plain = await run("plain", small, large, **sampling)
        done = await run("speculative", small, large, {**PARAMS, "verifier": verifier}, **sampling)
        assert done.ids == plain.ids


async def test_match_equals_plain_decoding_with_the_same_seed(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    accepted = 0
    for seed in range(20):
        plain = await run("plain", small, large, seed=seed, top_p=0.9)
        done = await run("speculative", small, large, PARAMS, seed=seed, top_p=0.9)
        assert done.ids == plain.ids
        accepted += done.seq.meter.speculation.accepted_tokens
    assert accepted > 100


async def test_the_fused_tree_is_never_worse_than_either_part(make_model):
    small, large = make_model("small", 1), make_model("large", 2, scale=1.0)
    room, gained = DraftBudget(16, 10_000), 0

    async def accepted(seq: Sequence, draft: DraftTree) -> int:
        return (await large.verify(seq, draft, MatchVerifier())).num_accepted_tokens

    for start in range(12):
        seq = Sequence([start, 1], SamplingParams(temperature=0, max_tokens=60), 0)
        drafter, alone = RasdDrafter(RasdParams(plausible=12)), RasdDrafter()
        while not seq.finished:
            fused = await drafter.propose(small, seq, room, LENGTH)
            retrieved = drafter.retrieval.find(small, seq, room.depth)
            everything = fuse(DraftTree.empty("small"), retrieved, dict.fromkeys(range(12), 1.0), room.nodes)
            own = await alone.propose(replace_stores(small), Sequence(seq.tokens[-2:], seq.sampling, 0), room, LENGTH)
            parts = [await accepted(seq, own), await accepted(seq, everything)]
            verdict = await large.verify(seq, fused, MatchVerifier())
            assert verdict.num_accepted_tokens >= max(parts)
            gained += verdict.num_accepted_tokens > min(parts)
            seq.extend(verdict.tokens, {"small": 1, "large": 1})
    assert gained > 10


def replace_stores(model: TableModel) -> TableModel:
    """The same model, having stored nothing."""
    return TableModel(model.name, model.next_logits, model.vocab_size)


async def test_finished_answers_are_retrieved_by_the_same_tenant_only(run, make_model):
    small = make_model("small", 1, vocab=40)
    large = make_model("large", 2, vocab=40)
    rounds = []
    for _ in range(2):
        done = await run(
            "speculative",
            small,
            large,
            {"drafter": {"name": "rasd", "plausible": 40}, "length": "fixed"},
            temperature=0,
        )
        rounds.append(len(done.segments))
    assert rounds[1] < rounds[0]
    drafter = RasdDrafter()
    for tenant, size in (("default", 1), ("other", 0)):
        retrieved = drafter.retrieval.find(small, Sequence([1, 2], SamplingParams(), 0, tenant=tenant), 4)
        assert len(retrieved.below) == size


def test_unfinished_answers_are_not_kept():
    model = TableModel("small", lambda tokens: torch.zeros(12), 12)
    seq = Sequence([1, 2], SamplingParams(max_tokens=2), 0)
    drafter, verdict = RasdDrafter(), VerifyResult((), (Token(3, "m"),), [Readout()])
    for held in (0, 5):
        seq.extend(verdict.tokens, {"m": 1})
        drafter.observe(model, seq, DraftTree.empty("m"), verdict)
        assert len(model.stores.open("rasd", "default", RecentTexts)) == held


@pytest.mark.parametrize("drafter", ["rasd", "token_recycling", "aded", "copyspec"])
async def test_trees_leave_the_caches_of_engine_models_right(run, drafter: str):
    """Greedy, in float32: the same tokens as one model alone, which has verified no tree."""
    config = llama_config(30, hidden_size=32, num_key_value_heads=2, num_hidden_layers=2, pad_token_id=0)
    small, large, alone = (twins(config, seed, block_size=4)[0] for seed in (1, 2, 2))
    large.name = alone.name = "large"
    sampling = {"prompt": (2, 3, 4, 5, 2, 3, 4), "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    plain = await run("plain", small, alone, **sampling)
    for _ in range(2):
        done = await run("speculative", small, large, {"drafter": drafter, "length": "fixed"}, **sampling)
        assert done.ids == plain.ids
        assert done.seq.meter.speculation.accepted_tokens > 0


def as_it_is(draft: DraftTree) -> DraftTree:
    return draft


def claims_it_drew(draft: DraftTree) -> DraftTree:
    """Gives retrieved candidates a distribution they were not drawn from."""
    return replace(draft, proposals=tuple(DRAFT[0] if each is None else each for each in draft.proposals))


def drops_the_unlikely(draft: DraftTree) -> DraftTree:
    """Looks at drawn tokens and takes away those that are improbable."""
    bad = {n for n in range(len(draft)) if (q := draft.proposal(n)) is not None and float(q[draft.tokens[n]]) < 0.35}
    kept = [node for node in range(len(draft)) if not bad & set(draft.path(node))]
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    return DraftTree(
        tuple(draft.tokens[node] for node in kept),
        tuple(place[draft.parents[node]] for node in kept),
        "small",
        tuple(draft.proposals[node] for node in kept),
    )


@many_runs()
def outcomes(spoil, runs: int) -> np.ndarray:
    """Counts of the first three tokens after a prompt whose runs occur more than once."""
    verifier, model = RejectionVerifier(), Readings(DRAFT)
    rows = [Readout(probs=probs) for probs in TARGET]
    counts, params, fused = np.zeros(3**POSITIONS), RasdParams(model_depth=2, branch=1, plausible=3), 0
    for seed in range(runs):
        seq = Sequence([1, 2, 0, 1, 0, 0, 2, 0], SamplingParams(max_tokens=20), seed)
        drafter, start = RasdDrafter(params, Candidates.DRAWN), len(seq)
        while len(seq) < start + POSITIONS:
            draft = spoil(now(drafter.propose(model, seq, DraftBudget(3, 8), LENGTH)))
            fused += len({proposal is None for proposal in draft.proposals}) == 2
            read = [rows[seq.tokens[-1]], *(rows[token] for token in draft.tokens)]
            seq.extend(verifier.judge(seq, draft, read, "large").tokens, {"small": 0, "large": 0})
        counts[np.dot(seq.tokens[start : start + POSITIONS], [9, 3, 1])] += 1
    assert fused > runs / 2 or spoil is claims_it_drew
    return counts


def p_value(counts: np.ndarray) -> float:
    law = np.einsum("a,ab,bc->abc", *(TARGET[0].double().numpy(), TARGET.double().numpy(), TARGET.double().numpy()))
    return float(stats.chisquare(counts, law.ravel() / law.sum() * counts.sum()).pvalue)


def test_drawn_and_retrieved_candidates_together_keep_the_law():
    assert p_value(outcomes(as_it_is, 1_000)) > 1e-3


@pytest.mark.exactness
def test_drawn_and_retrieved_candidates_together_keep_the_law_over_many_runs():
    assert p_value(outcomes(as_it_is, 200_000)) > 1e-3


@pytest.mark.parametrize("spoil", [claims_it_drew, drops_the_unlikely])
def test_planted_faults_are_caught(spoil):
    assert p_value(outcomes(spoil, 1_000)) < 1e-6
