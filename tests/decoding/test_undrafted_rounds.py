"""Rounds without drafts: plain decoding while they last, drafters that stay warm, and who decides on them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

import pytest
import torch

from decoding.drafters.base import DraftBudget, Drafter
from decoding.fakes import TableModel, markov, pair
from decoding.lengths.base import LengthParams, LengthPolicy, Round
from decoding.lengths.smartspec import SmartSpecLength, SmartSpecParams
from decoding.lengths.thompson import ThompsonLength, ThompsonParams
from decoding.model import Request
from decoding.selectors.first import First
from decoding.sequence import Sequence
from decoding.speculation import STRETCH, WARM_AFTER, Arm, Choice, Speculation
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams, Token, TokenKind

ALWAYS, NEVER = (0, 10_000), (0, 0)
POLICIES = (ThompsonLength, SmartSpecLength)


class Span(LengthPolicy):
    """Drafts of four tokens, none between two lengths of the answer."""

    def __init__(self, pause: tuple[int, int] = NEVER) -> None:
        super().__init__(LengthParams(most=4))
        self.pause = pause
        self.seen: list[tuple[int, int]] = []  # drafted and emitted tokens of each round it was asked for
        self.asked_at: list[int] = []

    def before_round(self, round: Round) -> int:
        self.asked_at.append(len(round.seq.generated))
        return 0 if self.pause[0] <= len(round.seq.generated) < self.pause[1] else 4

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        self.seen.append((len(draft), len(verdict.tokens)))


class Timed(TableModel):
    """A model whose forwards take a known time."""

    step_s = 1.0

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        return self.step_s


def speculation(
    models: Any, seq: Sequence, *arms: tuple[Drafter, LengthPolicy], repeated: Iterable[Choice] = ()
) -> Speculation:
    made = [Arm(drafter, length) for drafter, length in arms]
    return Speculation(Request("r", seq), pair(*models), made, First(), MatchVerifier(), repeated)


def drafter_of(name: str, **params: Any) -> Drafter:
    made: Drafter = PartChoice.of(name, **params).make("decoding.drafters", "drafter")
    return made


def sequence(seed: int = 0, max_tokens: int = 60, **sampling: Any) -> Sequence:
    return Sequence([1, 2], SamplingParams(max_tokens=max_tokens, **sampling), seed)


async def test_no_draft_wanted_is_plain_decoding_several_tokens_at_once(run: Any, make_model: Any) -> None:
    models = make_model("small", 1), make_model("large", 2)
    plain = await run("plain", *models, max_tokens=60)
    before = models[1].forwards
    seq = sequence()
    segments = [len(s.tokens) async for s in speculation(models, seq, (drafter_of("model_chain"), Span(ALWAYS))).run()]
    assert [token.id for token in seq.generated] == plain.ids
    assert models[1].forwards - before == 60
    assert segments == [len(segment.tokens) for segment in plain.segments]
    meter = seq.meter.speculation
    assert (meter.rounds, meter.emitted_tokens, meter.draft_tokens) == (60, 60, 0)
    assert {token.kind for token in seq.generated} == {TokenKind.DECODED}


async def test_a_drafter_that_learns_from_what_is_read_reads_every_token(run: Any, make_model: Any) -> None:
    models = make_model("small", 1), make_model("large", 2)
    plain = await run("plain", *models, max_tokens=60)
    seq = sequence()
    segments = [s async for s in speculation(models, seq, (drafter_of("token_recycling"), Span(ALWAYS))).run()]
    assert [len(segment.tokens) for segment in segments] == [len(segment.tokens) for segment in plain.segments]
    assert [token.id for token in seq.generated] == plain.ids
    assert {len(token.top) for token in seq.generated} == {0}  # what is read for the drafter is nobody's answer
    kind = f"token_recycling/{models[1].vocab_size}"
    matrix = models[1].stores.open(kind, "default", lambda: pytest.fail("nothing was learnt"))
    for token in set(seq.tokens[1:-1]):
        assert (matrix[token] >= 0).all()


async def test_the_draft_model_reads_along_in_few_forwards(make_model: Any) -> None:
    small, large = make_model("small", 1), make_model("large", 2)
    seq = sequence(max_tokens=200)
    rounds = speculation((small, large), seq, (drafter_of("model_chain"), Span((8, 160)))).run()
    behind = [len(seq) - len(small.cached.get(seq, ())) async for _ in rounds if 8 < len(seq.generated) < 160]
    assert max(behind) < WARM_AFTER + 2 * 8 + 2
    assert seq.meter.models["small"].draft_tokens > 0
    # One that never drafted has nothing to keep warm.
    idle = speculation((small, large), sequence(max_tokens=100), (drafter_of("model_chain"), Span(ALWAYS)))
    before = small.forwards
    async for _ in idle.run():
        pass
    assert small.forwards == before


@pytest.mark.parametrize("drafter", ["model_chain", "vocab_trim", "token_recycling", "copyspec"])
async def test_acceptance_after_a_pause_is_what_it_was(make_model: Any, drafter: str) -> None:
    """Answers drafted throughout, and with a pause in the middle: acceptance behind it is within two points."""
    rates = []
    for pause in (NEVER, (100, 150)):
        small, large = make_model("small", 5, scale=4.0), make_model("large", 5, scale=4.0)
        twist = make_model("twist", 6)
        small.next_logits = lambda t, a=large.next_logits, b=twist.next_logits: a(t) + 0.5 * b(t)
        drafted = accepted = 0
        for seed in range(2):
            seq, length = sequence(seed, max_tokens=400), Span(pause)
            async for _ in speculation((small, large), seq, (drafter_of(drafter), length)).run():
                pass
            for start, (tokens, emitted) in zip(length.asked_at, length.seen, strict=True):
                if start >= 150 and tokens:
                    drafted += 4
                    accepted += emitted - 1
        rates.append(accepted / drafted)
    assert rates[0] > 0.02
    assert abs(rates[1] - rates[0]) < 0.02


@pytest.mark.parametrize(("nodes", "shallow", "deep"), [(None, 8, 32), (9, 3, 9), (1, 1, 1)])
async def test_a_shallow_draft_has_as_many_nodes_for_a_level_as_a_deep_one(
    make_model: Any, nodes: int | None, shallow: int, deep: int
) -> None:
    """A policy that weighs what a level costs would else believe that shallow trees are wide, and deep ones narrow."""
    drafter, rooms = drafter_of("model_tree"), []
    original = drafter.propose

    async def propose(model: Any, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        rooms.append(room)
        return await original(model, seq, room, length)

    drafter.propose = propose  # type: ignore[method-assign]
    policy = Span()
    policy.params = LengthParams(most=8)
    for wanted in (2, 8):
        policy.before_round = lambda round, wanted=wanted: wanted  # type: ignore[method-assign]
        seq, models = sequence(max_tokens=40), (make_model("small", 1), make_model("large", 2))
        made = [Arm(drafter, policy, nodes)]
        async for _ in Speculation(Request("r", seq), pair(*models), made, First(), MatchVerifier()).run():
            pass
        assert {room.nodes for room in rooms} == {shallow if wanted == 2 else deep}  # at the answer's end as well
        assert {room.depth for room in rooms} >= {1, wanted}
        rooms.clear()


@pytest.mark.parametrize(("nodes", "most"), [(7, 25), (14, 51), (512, 64), (1, 64)])
def test_a_draft_never_has_more_nodes_than_it_was_given(nodes: int, most: int) -> None:
    arm = Arm(drafter_of("model_tree"), SmartSpecLength(SmartSpecParams(most=most)), nodes)
    assert [arm.nodes_of(most), max(map(arm.nodes_of, range(1, most + 1)))] == [nodes, nodes]


async def test_every_policy_that_was_asked_hears_of_the_round(make_model: Any) -> None:
    models = make_model("small", 1), make_model("large", 2)
    first, second = Span(ALWAYS), Span((10, 30))
    arms = ((drafter_of("model_chain"), first), (drafter_of("model_chain"), second))
    async for _ in speculation(models, sequence(), *arms).run():
        pass
    assert len(first.seen) == len(second.seen) == len(first.asked_at)
    assert {drafted for drafted, _ in first.seen} == {0}
    # The second hears of its own drafts, and of stretches without any.
    assert {0, 4} <= {drafted for drafted, _ in second.seen}
    assert [emitted for _, emitted in first.seen] == [emitted for _, emitted in second.seen]


def test_undrafted_tokens_bring_the_next_probe_nearer() -> None:
    model, policy = Timed("m", lambda _: torch.zeros(4), 4), SmartSpecLength(SmartSpecParams(probe=20, acceptance=0.01))
    model.step_s = 1.0
    seq = sequence()
    assert policy.before_round(Round(seq, model, model, False, "x")) == 0
    for _ in range(3):
        policy.observe(DraftTree.empty("m"), VerifyResult((), (Token(0, "m"),) * 8), 0.1)
    assert policy.before_round(Round(seq, model, model, False, "x")) == 1


def test_what_a_level_costs_is_the_drafters_share_of_a_forward() -> None:
    model = Timed("m", lambda _: torch.zeros(4), 4)
    assert Round(sequence(), model, model, False, "x").draft_s() == 1.0
    assert Round(sequence(), model, model, False, "x", 0.25).draft_s() == 0.25
    assert Round(sequence(), model, model, True, "x").draft_s() == 0.0
    assert drafter_of("copyspec").share == drafter_of("medusa").share == drafter_of("redrafter").share == 0.0
    assert drafter_of("model_chain").share == 1.0
    assert drafter_of("clasp", skipped=0.25).share == drafter_of("swift", skipped=0.25).share == 0.75


def rounds(policy: LengthPolicy, model: Timed, accepted: int) -> list[int]:
    """Depths of a hundred rounds of an answer, in which so many drafted tokens are accepted."""
    seq, depths = sequence(max_tokens=10_000), []
    for _ in range(100):
        depth = policy.before_round(Round(seq, model, model, False, "x", 0.2))
        kept = min(depth, accepted)
        kind = TokenKind.RECOVERED if kept < depth else TokenKind.BONUS
        tokens = (*(Token(0, "large"),) * kept, Token(0, "large", kind))
        policy.observe(
            DraftTree.chain([0] * depth, "small"), VerifyResult(tuple(range(kept)), tokens), 1.0 + 0.2 * depth
        )
        seq.extend(tokens, {"large": 1})
        depths.append(depth)
    return depths


@pytest.mark.parametrize("accepted", [0, 1, 16])
def test_thompson_drafts_where_goodput_does_and_no_deeper(accepted: int) -> None:
    thompson, smartspec = (rounds(make(), Timed("m", lambda _: torch.zeros(4), 4), accepted) for make in POLICIES)
    assert thompson == smartspec
    assert (sum(depth > 0 for depth in thompson) > 50) == (accepted > 0)
    always = ThompsonLength(ThompsonParams(abstains=False))
    assert set(rounds(always, Timed("m", lambda _: torch.zeros(4), 4), accepted)) == {16}


def test_thompson_learns_nothing_where_nothing_was_drafted() -> None:
    policy = ThompsonLength(ThompsonParams(abstains=False))
    policy.observe(DraftTree.empty("large"), VerifyResult((), (Token(0, "large", TokenKind.RECOVERED),)), 0.1)
    assert policy.mean == 0.5


@pytest.mark.parametrize("make", POLICIES)
def test_a_draft_that_nobody_has_was_not_wanted(make: Any) -> None:
    """Else goodput would believe that this drafter mostly finds nothing, and that looking for it takes time."""
    model = Timed("m", lambda _: torch.zeros(4), 4)
    policy, seq = make(), sequence(max_tokens=10_000)
    for each in range(300):
        wanted = policy.before_round(Round(seq, model, model, True, "x")) > 0
        assert wanted == (each > 0)  # the first of all rounds is not known to be alone
        if wanted:
            policy.defer()
        tokens = (Token(0, "large"),) * 8
        policy.observe(DraftTree.empty("m"), VerifyResult((), tokens), 8.0)
        seq.extend(tokens, {"large": 1})
    known = model.stores.open("smartspec/x//m/0.7", seq.learner, lambda: pytest.fail("nothing kept"))
    assert (known.found, known.sought, known.changes, known.drafting.count) == (1.0, 0, 0, 0)
    assert known.plain.seconds == pytest.approx(0.0, abs=1e-6)


def test_a_probe_that_finds_nothing_to_copy_is_made_later() -> None:
    model, policy = Timed("m", lambda _: torch.zeros(4), 4), SmartSpecLength(SmartSpecParams(probe=20, acceptance=0.01))
    seq, nothing = sequence(max_tokens=10_000), DraftTree.empty("m")
    for _ in range(3):
        assert policy.before_round(Round(seq, model, model, False, "x")) == 0
        policy.observe(nothing, VerifyResult((), (Token(0, "m"),) * 8), 8.0)
    for _ in range(3):
        assert policy.before_round(Round(seq, model, model, False, "x")) == 1
        policy.defer()
        policy.observe(nothing, VerifyResult((), (Token(0, "m"),)), 1.0)
    assert policy.before_round(Round(seq, model, model, False, "x")) == 1
    policy.observe(DraftTree.chain([0], "m"), VerifyResult((), (Token(0, "m"),)), 1.0)
    assert policy.before_round(Round(seq, model, model, False, "x")) == 0


class Putting(Span):
    """Counts how often it was put off."""

    put_off_times = 0

    def defer(self) -> None:
        self.put_off_times += 1


class Elsewhere:
    """A model in another process: what it is given is a copy there."""

    def __init__(self, model: TableModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name == "runs_here":
            raise AttributeError(name)
        return getattr(self._model, name)


async def test_where_the_target_is_elsewhere_nobody_can_watch_it(make_model: Any) -> None:
    """A policy hears of every time a draft was looked for there: that is not free."""
    for elsewhere, single in ((False, False), (True, True)):
        small, large = make_model("small", 1), make_model("large", 2)
        models = (small, Elsewhere(large) if elsewhere else large)
        seq = sequence()
        length = Putting()
        segments = [s async for s in speculation(models, seq, (drafter_of("copyspec", gamma=16), length)).run()]
        assert (max(len(segment.tokens) for segment in segments) == 1) == single
        assert length.put_off_times == (0 if elsewhere else len(segments))
        assert len(seq.generated) == 60


async def test_a_stretch_that_is_verified_instead_is_recorded_as_that(make_model: Any) -> None:
    """A target elsewhere cannot show drafters what it decodes."""
    models, seq = (make_model("small", 1), Elsewhere(make_model("large", 2))), sequence()
    repeating = speculation(models, seq, (drafter_of("token_recycling"), Span()), repeated=[(STRETCH, 8)])
    async with aclosing(repeating.run()) as rounds:
        await anext(rounds)
    assert repeating.choices == [(0, 0)]


@pytest.mark.parametrize("select", ["ucb", "exp3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_none_is_an_arm_like_others(run: Any, make_model: Any, select: str, temperature: float) -> None:
    models = make_model("small", 1), make_model("large", 2)
    params = {"drafter": ["none", "model_chain", {"drafter": "none"}], "select": select}
    for seed in range(10):
        plain = await run("plain", *models, seed=seed, temperature=temperature)
        drafted = await run("speculative", *models, params, seed=seed, temperature=temperature)
        assert drafted.ids == plain.ids
    assert drafted.seq.meter.speculation.rounds <= 24


async def test_a_bandit_falls_back_on_none_where_drafts_fail(run: Any) -> None:
    right, wrong = torch.zeros(4, 4), torch.zeros(4, 4)
    right[:, 1] = wrong[:, 2] = 1.0
    large = TableModel("large", markov(right), 4)
    drafted = []
    for small in (TableModel("small", markov(wrong), 4), TableModel("small", markov(right), 4)):
        params = {"drafter": ["none", "model_chain"], "select": {"name": "ucb", "reward": "tokens"}}
        done = await run("speculative", small, large, params, prompt=(0,), max_tokens=300, seed=1)
        drafted.append(done.seq.meter.speculation.draft_tokens)
        large.stores.forget("default")
    # Where nothing is accepted both arms gain nothing, so they take turns; where all is, drafts win nearly every turn.
    assert drafted[0] < 4 * 300 / 2
    assert drafted[1] > 0.75 * 300


async def test_alternatives_are_reported_as_far_as_they_were_asked_for(run: Any, make_model: Any) -> None:
    models = make_model("small", 1), make_model("large", 2)
    for drafter in ("token_recycling", "aded", "lookahead"):
        for logprobs in (None, 0, 2):
            done = await run("speculative", *models, {"drafter": drafter}, logprobs=logprobs)
            assert {len(token.top) for token in done.seq.generated} == {logprobs or 0}


async def test_a_lossy_verifier_keeps_its_law_where_nothing_is_drafted(make_model: Any) -> None:
    """The typical verifier ends a round with the arg-max, also a round without a draft."""
    small, large = make_model("small", 1), make_model("large", 2)
    seq = sequence(temperature=1.0)
    judge = PartChoice(name="typical").make("decoding.verifiers", "verifier")
    arm = Arm(drafter_of("copyspec"), Span(ALWAYS))
    async for _ in Speculation(Request("r", seq), pair(small, large), [arm], First(), judge).run():
        pass
    context = [1, 2]
    for token in seq.generated:
        assert token.id == int(large.next_logits(context).argmax())
        context.append(token.id)


async def test_the_draft_model_is_left_alone_once_the_answer_is_there(make_model: Any) -> None:
    models = make_model("small", 1), make_model("large", 2)
    running = speculation(models, sequence(), (drafter_of("model_chain"), Span(ALWAYS)))
    async for _ in running.run():
        pass
    assert running._reader._task is None
