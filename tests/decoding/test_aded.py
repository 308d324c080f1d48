"""ADED: the tri-gram store, the search, and what they draft."""

import math

import pytest
import torch

from decoding.drafters.aded import AdedDrafter, AdedParams, State, TrigramCounts, TrigramStore, most_visited, search
from decoding.drafters.base import DraftBudget
from decoding.fakes import TableModel, pair
from decoding.lengths.fixed import FixedLength
from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from tests.engine.harness import twins
from training.random_models import llama_config
from turnout.types import SamplingParams, Token

A, B = 10, 11
PARAMS = {"drafter": "aded"}


def absorbing(context):
    """Token a with 0.9, b with 0.1; nothing is known after either."""
    return ((A, 0.9), (B, 0.1)) if context == (0, 1) else ()


def share_of_b(exploration: float) -> float:
    root = search(absorbing, (0, 1), 10, AdedParams(simulations=200, exploration=exploration))
    assert root.total == sum(root.visits) == 200
    return root.visits[1] / root.total


def test_exploration_spreads_the_visits():
    shares = [share_of_b(weight) for weight in (0.0, 1.25, 10.0, 100.0)]
    assert shares == sorted(set(shares))
    assert shares[0] == 0.0
    assert shares[-1] < 0.5


def test_puct_by_hand():
    state = State.of((0, 1), ((A, 0.6), (B, 0.4)))
    state.visits, state.values, state.total = [3, 1], [1.5, 0.4], 4
    for exploration in (0.5, 1.25, 4.0):
        weight = math.sqrt(4) * (exploration + math.log((4 + 100 + 1) / 100))
        scores = (1.5 / 3 + 0.6 * weight / 4, 0.4 + 0.4 * weight / 2)
        assert state.select(exploration, 100.0) == scores.index(max(scores))
    assert {state.select(0.0, 1e9), state.select(4.0, 1e9)} == {0, 1}


def test_a_token_is_worth_the_mean_of_the_paths_through_it():
    rows = {(0, 1): ((A, 0.5),), (1, A): ((B, 0.5),)}
    root = search(lambda context: rows.get(context, ()), (0, 1), 10, AdedParams(simulations=3))
    assert (root.visits, root.values) == ([3], [0.5 + 0.25 + 0.25])
    [below] = root.below
    assert below is not None
    assert (below.visits, below.values) == ([2], [0.5])


def test_the_search_keeps_to_its_depth():
    root = search(lambda context: ((A, 0.9),), (0, 1), 4, AdedParams(simulations=50))
    assert max(most_visited(root, 100, "m").depths()) == 3


def test_the_cut_keeps_the_most_visited_with_their_parents():
    def look_up(context):
        return tuple((token, (token + context[-1] % 3 + 1) / 20) for token in range(5, 0, -1))

    root = search(look_up, (0, 1), 6, AdedParams(simulations=300))
    whole = most_visited(root, 10_000, "m")
    counts = {}
    states = [(root, ())]
    for state, path in states:
        for index, token in enumerate(state.tokens):
            if state.visits[index]:
                counts[(*path, token)] = state.visits[index]
                if state.below[index] is not None:
                    states.append((state.below[index], (*path, token)))
    assert len(whole) == len(counts) > 64
    for most in (1, 7, 64):
        draft = most_visited(root, most, "m")
        paths = [tuple(draft.tokens[each] for each in draft.path(node)) for node in range(len(draft))]
        assert len(set(paths)) == len(paths) == most
        assert [counts[path] for path in paths] == sorted(counts.values(), reverse=True)[:most]


def teach(drafter: AdedDrafter, model: TableModel, seq: Sequence, *guesses: tuple[int, float]) -> None:
    verdict = VerifyResult((), (Token(guesses[0][0], "m"),), [Readout(top=tuple((t, math.log(p)) for t, p in guesses))])
    seq.extend(verdict.tokens, {"m": 1})
    drafter.observe(model, seq, DraftTree.empty("m"), verdict)


@pytest.fixture
def model() -> TableModel:
    return TableModel("large", lambda tokens: torch.zeros(12), 12)


def test_a_scored_context_ranks_the_targets_tokens(model: TableModel):
    drafter = AdedDrafter()
    teach(drafter, model, Sequence([5, 7], SamplingParams(), 0), (3, 0.6), (1, 0.3), (2, 0.1))
    store = model.stores.open("aded", "default", TrigramStore)
    for context in ((5, 7), (7,)):
        assert [token for token, _ in store.get(context)] == [3, 1, 2]
        assert [p for _, p in store.get(context)] == pytest.approx([0.6, 0.3, 0.1])
    teach(drafter, model, Sequence([5, 7], SamplingParams(), 0), (2, 0.7), (3, 0.2))
    assert [token for token, _ in store.get((5, 7))] == [2, 3]
    mixing = AdedDrafter(AdedParams(rate=0.25))
    teach(mixing, model, Sequence([5, 7], SamplingParams(), 0), (4, 1.0))
    assert [token for token, _ in store.get((5, 7))] == [2, 4, 3]
    assert [p for _, p in store.get((5, 7))] == pytest.approx([0.525, 0.25, 0.15])


def test_rejected_nodes_are_learnt_too(model: TableModel):
    seq = Sequence([5, 7], SamplingParams(), 0)
    draft = DraftTree((1, 2), (ROOT, 0), "m")
    rows = [Readout(top=((3, -0.1),)), Readout(top=((4, -0.2),)), Readout(top=((6, -0.3),))]
    verdict = VerifyResult((), (Token(3, "m"),), rows)
    seq.extend(verdict.tokens, {"m": 1})
    AdedDrafter().observe(model, seq, draft, verdict)
    store = model.stores.open("aded", "default", TrigramStore)
    assert [store.get(context)[0][0] for context in ((5, 7), (7, 1), (1, 2))] == [3, 4, 6]


def test_the_store_forgets_what_was_read_longest_ago():
    store = TrigramStore(most=4)
    for first in range(5):
        store.learn((first, first + 100), ((1, 1.0),), 1.0)
    assert len(store) == 4
    assert store.get((0, 100)) == ()
    assert store.get((4, 104)) == ((1, 1.0),)


async def test_the_prompt_is_counted_for_its_own_request_only(model: TableModel):
    assert TrigramCounts([1, 2, 3, 1, 2, 3, 1, 2, 4]).get((1, 2)) == ((3, 2 / 3), (4, 1 / 3))
    assert TrigramCounts([1, 2, 3, 3, 2, 4]).get((2,)) == ((3, 0.5), (4, 0.5))
    room = DraftBudget(3, 8)
    copied = await AdedDrafter().propose(model, Sequence([1, 2, 3, 4, 1, 2], SamplingParams(), 0), room, FixedLength())
    assert copied.tokens == (3, 4, 1)
    other = await AdedDrafter().propose(model, Sequence([1, 2], SamplingParams(), 0), room, FixedLength())
    assert len(other) == 0


async def test_the_prompts_places_are_read_too():
    """All two hundred, in more than one part, by one forward; where keys and values were cached, the others."""
    config = llama_config(30, hidden_size=32, num_key_value_heads=2, num_hidden_layers=2, pad_token_id=0)
    large, plain = twins(config, seed=2, spread=0.3, block_size=4)
    prompt = torch.randint(2, 30, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    probs, ids = plain.logits(prompt).softmax(-1).topk(8)
    last = {tuple(prompt[place - 1 : place + 1]): place for place in range(1, len(prompt))}
    nothing = DraftTree.empty("m")
    for cached in (False, True):
        seq, drafter = Sequence(prompt, SamplingParams(temperature=0.0), 0), AdedDrafter()
        drafter.check(pair(large, large))
        assert not drafter.want.before  # nothing is asked of the prompt for drafts that nobody wants
        await large.propose(seq, drafter, DraftBudget(4, 8), FixedLength())
        verdict = await large.verify(seq, nothing, MatchVerifier(), drafter.want)
        left = len(verdict.rows[0].before.get(2, ()))
        assert (left < 8) if cached else (left == 199)
        seq.extend(verdict.tokens, {"m": 1})
        large.observe(seq, drafter, nothing, verdict)
        assert not drafter.want.before  # there is one prompt
        await large.propose(seq, drafter, DraftBudget(4, 8), FixedLength())
        store = large.stores.open("aded", "default", TrigramStore)
        for context, place in last.items():
            learnt = store.get(context)
            assert [token for token, _ in learnt] == ids[place].tolist()
            assert [p for _, p in learnt] == pytest.approx(probs[place].tolist(), abs=1e-4)
        large.release(seq)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_output_is_plain_decoding(run, make_model, temperature):
    small, large = make_model("small", 1), make_model("large", 2)
    accepted = 0
    for seed in range(15):
        sampling = {"seed": seed, "temperature": temperature, "max_tokens": 24, "prompt": (seed % 12, 1)}
        plain = await run("plain", small, large, **sampling)
        done = await run("speculative", small, large, PARAMS, **sampling)
        assert done.ids == plain.ids
        accepted += done.seq.meter.speculation.accepted_tokens
    assert accepted > 100


async def test_a_store_that_learns_beats_one_that_does_not(run, make_model, monkeypatch):
    async def rounds(large: TableModel) -> list[int]:
        counted = []
        for prompt in [(1, 2), (3, 4), (1, 2)]:
            done = await run("speculative", large, large, PARAMS, temperature=0.7, prompt=prompt, max_tokens=40, seed=3)
            counted.append(len(done.segments))
        return counted

    learning = await rounds(make_model("large", 2))
    monkeypatch.setattr(TrigramStore, "learn", lambda *_: None)
    frozen = await rounds(make_model("large", 2))
    assert learning[2] < learning[0] < frozen[0]
    assert sum(learning) < 0.6 * sum(frozen)


async def test_tenants_do_not_see_each_others_tokens(model: TableModel):
    drafter = AdedDrafter()
    teach(drafter, model, Sequence([5, 7], SamplingParams(), 0, tenant="one"), (3, 0.6))
    for tenant, size in (("one", 1), ("two", 0)):
        seq = Sequence([5, 7], SamplingParams(), 0, tenant=tenant)
        assert len(await AdedDrafter().propose(model, seq, DraftBudget(4, 8), FixedLength())) == size
