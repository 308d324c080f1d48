"""`speculative` without parameters: it loses next to nothing on any text, and gains where something can be gained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.automatic import LONGEST_REST, Rest, Rests, Roster, offered
from decoding.calibration import RAN
from decoding.fakes import ListText, pair
from decoding.lengths.base import Round
from decoding.methods.speculative import SpeculativeParams, make_parts
from decoding.model import Request
from decoding.sequence import Sequence
from tests.conformance.parts import make_artifacts
from tests.decoding.batched_time import COSTS, BatchedModel, Cost, forget, timed
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

VOCAB = 16
Script = Callable[[list[int]], int]  # the next token, by all before


def misleading(tokens: list[int]) -> int:
    """Never what followed the last four tokens when they stood there before: every copy is wrong from the start."""
    for start in range(len(tokens) - 5, -1, -1):
        if tokens[start : start + 4] == tokens[-4:]:
            return 1 - tokens[start + 4]
    return len(tokens) % 2


def repeating(tokens: list[int]) -> int:
    """The first twelve tokens again and again."""
    return tokens[len(tokens) % 12]


def fresh(tokens: list[int]) -> int:
    """Hardly ever four tokens that stood there before."""
    return (7 * len(tokens) + len(tokens) ** 2 // 5 + sum(tokens[-3:])) % VOCAB


def switching(tokens: list[int]) -> int:
    """Misleading, then repeating."""
    return misleading(tokens) if len(tokens) < 140 else tokens[len(tokens) - 12]


def prompts_of(count: int) -> list[list[int]]:
    return [[(3 * place + index) % 2 if place < 6 else (place + index) % VOCAB for place in range(12)][::-1]
            for index in range(count)]  # fmt: skip


def model(name: str, script: Script, cost: Cost, num_parameters: int = 1) -> BatchedModel:
    rows = torch.eye(VOCAB) * 50.0
    return BatchedModel(name, lambda tokens: rows[script(tokens)], VOCAB, cost, num_parameters)


def models(script: Script, cost: Cost, drafts: Script | None = None) -> tuple[BatchedModel, BatchedModel]:
    """A small model, which is the large one unless it drafts, and takes a tenth of its time; and a large one."""
    large = model("large", script, cost, 10)
    if drafts is None:
        return large, large
    return model("small", drafts, lambda rows: 0.1 * cost(rows)), large


def factor(script: Script, cost: Cost, count: int, params: dict[str, Any] | None = None, **kinds: Any) -> float:
    """How many times as fast as plain decoding the first answers of a tenant are."""
    small, large = models(script, cost, kinds.pop("drafts", None))
    large.factor = kinds.pop("factor", large.factor)
    expected, plain_s = timed("plain", {"model": "large"}, small, large, prompts_of(count), **kinds)
    forget(small, large)
    found, seconds = timed("speculative", params or {}, small, large, prompts_of(count), **kinds)
    assert [each.sequence.tokens for each in found] == [each.sequence.tokens for each in expected]
    return plain_s / seconds


def wrong(tokens: list[int]) -> int:
    """No script's token."""
    return VOCAB - 1


@pytest.mark.parametrize("drafts", [None, wrong], ids=["alone", "with a small model"])
@pytest.mark.parametrize(("machine", "count"), [*((name, 1) for name in COSTS), ("avx512", 8), ("avx2", 8)])
def test_drafts_that_are_never_accepted_lose_little(machine: str, count: int, drafts: Script | None) -> None:
    assert factor(misleading, COSTS[machine], count, drafts=drafts) >= 0.97


@pytest.mark.parametrize("count", [1, 8])
def test_forwards_that_take_otherwise_than_predicted_change_that_little(count: int) -> None:
    assert factor(misleading, COSTS["avx2"], count, factor=(0.8, 1.6), drafts=wrong) >= 0.95


@pytest.mark.parametrize(("machine", "count"), [("flat", 8), ("avx512", 1), ("avx2", 1)])
def test_copies_come_near_the_best_fixed_length(machine: str, count: int) -> None:
    fixed = {"drafter": {"name": "copyspec"}, "length": {"name": "fixed", "most": 32}}
    best = factor(repeating, COSTS[machine], count, fixed)
    assert best > 2.0
    assert factor(repeating, COSTS[machine], count) > 0.8 * best


def test_where_rows_cost_what_tokens_do_nothing_is_drafted_for_long() -> None:
    """Eight times 32 rows of a copy take as long as 250 tokens alone."""
    assert factor(repeating, COSTS["avx2"], 8) >= 0.97


def test_a_text_that_becomes_a_copy_is_found_out_without_a_probe() -> None:
    late = factor(switching, COSTS["avx512"], 1, max_tokens=256)
    assert late > 1.1
    assert late > 1.05 * factor(
        switching, COSTS["avx512"], 1, {"length": "fixed", "drafter": "copyspec"}, max_tokens=256
    )


def test_a_small_model_that_is_right_is_used_from_the_second_answers_on() -> None:
    small, large = models(fresh, COSTS["avx512"], fresh)
    _, plain_s = timed("plain", {"model": "large"}, small, large, prompts_of(8))
    forget(small, large)
    found = [timed("speculative", {}, small, large, prompts_of(8)) for _ in range(3)]
    factors = [plain_s / seconds for _, seconds in found]
    assert factors[0] >= 0.97
    assert factors[-1] > 1.3
    ran = found[-1][0][0].extra[RAN]
    assert [each["drafter"] for each in ran["drafter"]] == ["copyspec", "model_chain"]
    assert (ran["length"], ran["select"]) == ("smartspec", "goodput")


def near(seed: int) -> tuple[BatchedModel, BatchedModel]:
    """Two models that often agree, of forwards whose times are drawn anew."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn((VOCAB, VOCAB), generator=generator) * 3.0
    other = table + torch.randn((VOCAB, VOCAB), generator=generator)
    made = []
    for name, rows, size in (("small", other, 1), ("large", table, 10)):
        slow = (lambda fed: 0.02 + 0.002 * fed) if size == 1 else COSTS["avx512"]
        each = BatchedModel(name, lambda tokens, rows=rows: rows[tokens[-1]], VOCAB, slow, size, seed)
        each.factor = (0.3, 3.0)
        made.append(each)
    return made[0], made[1]


def drawn(seed: int, params: dict[str, Any] | None) -> tuple[list[list[int]], list[Request]]:
    """Two rounds of answers, whose times are drawn with the seed; the tokens of the second, and their requests."""
    small, large = near(seed)
    options = {"temperature": 1.0, "max_tokens": 32}
    if params is None:
        found, _ = timed("plain", {"model": "large"}, small, large, prompts_of(3), **options)
    for _ in range(2 if params is not None else 0):
        found, _ = timed("speculative", params or {}, small, large, prompts_of(3), **options)
    return [each.sequence.tokens for each in found], found


def test_times_never_change_a_seeded_answer() -> None:
    plain, _ = drawn(0, None)
    runs = [drawn(seed, {}) for seed in (1, 2)]
    assert [tokens for tokens, _ in runs] == [plain, plain]
    drafted = [[each.sequence.meter.speculation.draft_tokens for each in found] for _, found in runs]
    assert drafted[0] != drafted[1]
    assert "rounds" not in runs[0][1][0].extra[RAN]


def test_unasked_no_time_changes_an_answer_under_another_verifier_either() -> None:
    runs = [drawn(seed, {"verifier": "rejection"}) for seed in (1, 2)]
    assert runs[0][0] == runs[1][0]
    ran = runs[0][1][0].extra[RAN]
    assert (ran["drafter"], ran["length"]) == ("model_chain", "fixed")
    assert "rounds" not in ran


@pytest.mark.parametrize("drafter", ["model_chain", ["none", "copyspec", {"drafter": "model_chain"}]], ids=str)
def test_choices_by_time_that_could_change_an_answer_are_recorded_and_repeat_it(drafter: Any) -> None:
    asked = {"drafter": drafter, "length": "smartspec", "verifier": "rejection", "select": "ucb"}
    (first, found), (other, _) = drawn(1, asked), drawn(2, asked)
    assert first != other
    rounds = {seed: rows for each in found for seed, rows in each.extra[RAN]["rounds"].items()}
    assert set(rounds) == {"0", "1", "2"}
    assert any(arm >= 0 and depth > 0 for rows in rounds.values() for arm, depth in rows)
    again, repeated = drawn(3, {**asked, "rounds": rounds})
    assert again == first
    assert {seed: rows for each in repeated for seed, rows in each.extra[RAN]["rounds"].items()} == rounds


class Numbers(ListText):
    """One token a digit."""

    def __init__(self) -> None:
        super().__init__([str(token) for token in range(VOCAB)])

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [int(char) for char in text]


def test_times_do_not_move_what_a_monitor_puts_into_an_answer() -> None:
    monitor = {"name": "trim", "asks": "number", "thinking_start": "", "give_up_share": 0.3}
    asked = {"inner": "speculative", "monitor": {**monitor, "conclude": "5", "force": "7"}}
    found = []
    for seed in (1, 2):
        small, large = near(seed)
        for _ in range(3):  # later answers go by what the first have measured
            requests, _ = timed(
                "monitored", asked, small, large, prompts_of(3), Numbers(), temperature=1.0, max_tokens=64
            )
            written = [each.sequence.generated for each in requests]
            found.append([[(token.id, token.source == "injected") for token in tokens] for tokens in written])
    assert all(sum(injected for _, injected in tokens) == 1 for tokens in found[0])
    assert all(answers == found[0] for answers in found)


def test_times_do_not_decide_how_far_a_step_passes_its_limit() -> None:
    asked = {"scorer": {"name": "self_grade", "question": "7"}, "first_steps": 4, "max_steps": 4, "max_step_tokens": 5}
    found = []
    for seed in (1, 2):
        small, large = near(seed)
        for _ in range(3):
            params = {**asked, "rest": "nobody", "speculate": {}}
            requests, _ = timed("step_speculation", params, small, large, prompts_of(3), Numbers(), temperature=1.0)
            found.append([each.sequence.tokens for each in requests])
    assert all(answers == found[0] for answers in found)


@pytest.mark.parametrize("impossible", [[1, 2], [-1, 0], [-2, 1], [0, -1], [0, 17]])
def test_rounds_that_cannot_have_been_are_refused(impossible: list[int]) -> None:
    small, large = near(0)
    with pytest.raises(TurnoutError) as refused:
        timed("speculative", {"drafter": "model_chain", "rounds": {"0": [[0, 3], impossible]}}, small, large, [[1, 2]])
    assert refused.value.message.startswith("method.params.rounds.0.1")


def test_rounds_of_drafters_that_were_not_named_count_those_at_rest() -> None:
    small, large = near(0)
    large.stores.open("automatic", Sequence([1], SamplingParams(), 0).learner, Rests).by_arm.update(
        {arm.name: Rest(left=9) for arm in make_parts(SpeculativeParams(), pair(small, large))[0]}
    )
    plain, _ = timed("plain", {"model": "large"}, small, large, [[1, 2]])
    [found], _ = timed("speculative", {"rounds": {"0": [[1, 3]] * 4}}, small, large, [[1, 2]])
    assert found.sequence.tokens == plain[0].sequence.tokens
    assert found.sequence.meter.speculation.draft_tokens


def names_of(params: dict[str, Any], greedy: bool = False, **pool: Any) -> list[str]:
    """The drafters that a request gets on a pool of a small and a large model."""
    small, large = near(0)
    models = replace(pair(small, large), **pool)
    arms, *_ = make_parts(SpeculativeParams.model_validate(params), models, greedy)
    return [arm.drafter.name for arm in arms]


def test_drafters_are_chosen_only_where_nothing_is_said_of_drafts(tmp_path: Path) -> None:
    assert names_of({}) == ["copyspec", "model_chain"]
    assert names_of({"verifier": "rejection"}) == ["model_chain"]
    assert names_of({"verifier": "rejection"}, greedy=True) == ["copyspec", "model_chain"]
    assert names_of({"length": "svip"}) == names_of({"draft_length": 3}) == names_of({"nodes": 4}) == ["model_chain"]
    assert names_of({"drafter": "aded"}) == ["aded"]
    assert names_of({}, roles={"small": "large", "large": "large"}) == ["copyspec"]
    assert names_of({}, roles={"small": "large", "large": "small"}) == ["copyspec"]  # as large as its target or larger


def test_trained_heads_are_used_where_they_fit(tmp_path: Path) -> None:
    small, large = near(0)
    make_artifacts(tmp_path, {"small": small.digest, "large": large.digest})
    assert names_of({}, artifacts=Artifacts(tmp_path)) == ["copyspec", "model_chain", "medusa"]
    file = tmp_path / "medusa.safetensors"
    replace(Artifact.load(file), tensors={}).save(file)
    assert names_of({}, artifacts=Artifacts(tmp_path))[2:] == ["redrafter"]
    file.unlink()
    assert names_of({}, artifacts=Artifacts(tmp_path))[2:] == ["redrafter"]
    make_artifacts(tmp_path, {"small": "another", "large": "another"})
    assert [each.name for each in offered(replace(pair(small, large), artifacts=Artifacts(tmp_path)))] == [
        "copyspec",
        "model_chain",
    ]


def test_who_is_not_wanted_sits_out_longer_each_time() -> None:
    pool = pair(*near(0))
    took_part = []
    for number in range(80):
        seq = Sequence([1], SamplingParams(max_tokens=64), 0, tenant="t")
        arms, *_ = make_parts(SpeculativeParams(), pool)
        roster = Roster(arms, seq, pool)
        took_part.append(len(roster.arms) - 1)
        assert roster.arms[0].drafter.name == "copyspec"
        for arm in roster.arms[1:]:
            arm.length.wanted_rounds = number in (0, 75)
        roster.close(tokens=64)
    assert [place for place, here in enumerate(took_part) if here] == [0, 1, 3, 7, 15, 31, 63]
    assert LONGEST_REST == 31


def test_each_of_many_tenants_keeps_what_was_learned() -> None:
    pool = pair(*near(0))
    arms, *_ = make_parts(SpeculativeParams(), pool)
    small, large = pool.small, pool.large
    for number in range(200):
        seq = Sequence([1], SamplingParams(), 0, tenant=f"tenant {number}")
        Roster(arms, seq, pool)
        for arm in arms:
            arm.length.before_round(Round(seq, small, large, arm.drafter.share == 0.0, arm.drafts))
    assert large.stores.open("automatic", "tenant 0", Rests).by_arm
