"""Step speculation: who writes which step, what is read for it, and the law of what comes out."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, markov
from decoding.model import Readout, ReadSpec, Request
from decoding.sequence import Sequence
from decoding.step_heads import step_features
from decoding.steps import StepEnd, step_marks
from tests.decoding.step_models import (
    END,
    ID,
    VOCAB,
    Characters,
    LastTokenModel,
    answer,
    ids,
    line,
    owners,
    pool,
    scripted,
    text,
    thinking,
    with_head,
)
from tests.engine.harness import engine_model
from training.random_models import llama_config, random_model
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import FinishReason, SamplingParams, Sharing, TokenKind

QUESTION = "?"


def grader(grades: str, own: str = "b", **options: Any) -> TableModel:
    """Writes lines of its own, and after a question the grade of the line before it, by that line's place."""

    def script(written: str) -> str:
        if len(written) > 1 and written.endswith(QUESTION):
            return grades[written.count("\n") - 1]
        return line(own)(written)

    return scripted("large", script, **options)


def self_grade(**params: Any) -> dict[str, Any]:
    return {"scorer": {"name": "self_grade", "question": QUESTION, **params}}


# Where a step ends


@pytest.mark.parametrize(
    ("stream", "separators", "steps"),
    [
        ("ab\ncd\n", ("\n",), ["ab\n", "cd\n"]),
        ("ab\n\ncd\n", ("\n",), ["ab\n", "\ncd\n"]),  # the second newline begins a step instead of being one
        ("ab\ncd\n\ne\n\n", ("\n\n",), ["ab\ncd\n\n", "e\n\n"]),
        ("\n\n \nab\n\n", ("\n\n",), ["\n\n \nab\n\n"]),
        ("aab a?b", ("b ", "?"), ["aab ", "a?"]),
    ],
)
def test_steps_end_with_the_token_that_completes_a_separator(
    stream: str, separators: tuple[str, ...], steps: list[str]
) -> None:
    end = StepEnd(step_marks(Characters(), VOCAB, separators), separators)
    found, current = [], ""
    for char in stream:
        current += char
        if end.feed(ID[char]):
            found.append(current)
            current = ""
    assert found == steps


# Self-grading (seed 221)


async def test_threshold_0_is_the_small_model_and_10_the_large_one() -> None:
    for threshold, role in ((0, "small"), (10, "large")):
        models = pool(scripted("small", line("a")), grader("9" * 9))
        seq, _, _ = await answer(models, "step_speculation", self_grade(threshold=threshold))
        plain, _, _ = await answer(models, "plain", {"model": role})
        assert seq.tokens == plain.tokens
        assert {token.source for token in seq.generated} == {role}


async def test_scripted_grades_decide_who_writes_and_what_counts() -> None:
    models = pool(scripted("small", line("a")), grader("938"))
    seq, _, _ = await answer(models, "step_speculation", self_grade(), max_tokens=12)
    assert text(seq.tokens) == "?a0a\nb1b\na2a\n"
    assert owners(seq) == "sls"
    small, large = seq.meter.models["small"], seq.meter.models["large"]
    assert (small.generated_tokens, large.generated_tokens, small.discarded_tokens) == (8, 4, 4)
    assert seq.meter.switches == 2


async def test_the_first_steps_are_the_large_models() -> None:
    models = pool(scripted("small", line("a")), grader("999999"))
    seq, _, _ = await answer(models, "step_speculation", {**self_grade(), "first_steps": 2}, max_tokens=16)
    assert owners(seq) == "llss"


async def test_an_accepted_step_costs_the_large_model_the_question_and_no_second_read() -> None:
    question = "?" * 5
    large = grader("9" * 9)
    models = pool(scripted("small", line("a")), large)
    params = self_grade(question=question)
    seq, _, _ = await answer(models, "step_speculation", params, max_tokens=20)
    assert owners(seq) == "sssss"
    assert large.forwards == 5  # one prefill a step, nothing generated
    assert large.fed_tokens == len(seq) + 5 * len(question)
    assert models.small.fed_tokens == len(seq) - 1


async def test_a_rejected_step_leaves_the_prefix_and_nothing_else() -> None:
    large = grader("0" * 9)
    models = pool(scripted("small", line("a")), large)
    seq, _, _ = await answer(models, "step_speculation", self_grade(), max_tokens=8)
    assert owners(seq) == "ll"
    assert large.cached[seq] == seq.tokens[:-1]
    # The prompt; draft and question of each step; its own, but for the last of all, and the one before it once more.
    assert large.fed_tokens == 1 + 2 * (4 + 1) + (4 + 3) + 2
    assert models.small.fed_tokens == 1 + 3 + 4 + 3


async def test_the_expected_grade_is_a_mean_over_digits() -> None:
    def logits(tokens: list[int]) -> torch.Tensor:
        row = torch.zeros(VOCAB)
        row[ID["4"]], row[ID["9"]], row[ID["h"]] = 20.0, 20.0, 40.0
        return row

    for reading, score in (("expected", 6.5), ("greedy", 0.0)):
        scorer_params = self_grade(reading=reading)["scorer"]
        scorer = PartChoice.model_validate(scorer_params).make("decoding.scorers", "scorer")
        models = pool(scripted("small", line("a")), TableModel("large", logits, VOCAB))
        scorer.check(models)
        seq = Sequence(ids("?"), SamplingParams(temperature=0.0), 0)
        assert await scorer.score(models, seq, tuple(ids("aa\n"))) == pytest.approx(score, abs=1e-3)
        assert (scorer.chance(7.0), scorer.chance(6.9)) == (1.0, 0.0)


async def test_a_step_without_room_for_the_question_is_graded_0() -> None:
    large = grader("9" * 9)
    large.max_length = 1 + 8 + 2
    models = pool(scripted("small", line("a")), large)
    seq, _, _ = await answer(models, "step_speculation", self_grade(question="???"), max_tokens=8)
    assert owners(seq) == "sl"


async def test_a_repeated_step_hands_over_to_who_writes_the_rest() -> None:
    for rest, expected in (("small", "sss"), ("large", "ssl"), ("nobody", "ss")):
        models = pool(scripted("small", line("a", same=True)), grader("9" * 9))
        seq, _, _ = await answer(models, "step_speculation", {**self_grade(), "rest": rest}, max_tokens=12)
        assert owners(seq) == expected
        assert seq.finished == (rest != "nobody")


async def test_an_end_mark_and_the_last_step_hand_over_too() -> None:
    models = pool(scripted("small", line("a")), grader("9" * 9, own="h"))
    told: Any = {"max_tokens": 16, "thinking": thinking("e", "a1", "inside")}
    for params, expected in (({"end_marks": ["a1"]}, "ssll"), ({"max_steps": 1}, "slll"), ({"end_marks": []}, "ssss")):
        seq, _, _ = await answer(models, "step_speculation", {**self_grade(), **params}, " ", **told)
        assert owners(seq) == expected
    for known, expected in ((thinking("e", "a1", "inside"), "ssll"), (thinking("e", "a1", "closed"), "ssss")):
        told["thinking"] = known
        assert owners((await answer(models, "step_speculation", self_grade(), " ", **told))[0]) == expected


async def test_an_answer_may_end_inside_a_drafted_step() -> None:
    models = pool(scripted("small", lambda written: "a" if len(written) < 6 else "$"), grader("9" * 9))
    seq, _, _ = await answer(models, "step_speculation", self_grade(), prompt=" ", max_tokens=16)
    assert text(seq.tokens) == " aaaaa$"
    assert seq.finish_reason is FinishReason.STOP


async def test_a_step_is_no_longer_than_allowed() -> None:
    models = pool(scripted("small", line("a", 9)), grader("9099", own="b"))
    _, segments, _ = await answer(
        models, "step_speculation", {**self_grade(threshold=0), "max_step_tokens": 4}, prompt=" ", max_tokens=10
    )
    assert [len(segment.tokens) for segment in segments][:1] == [4]
    large, _, _ = await answer(
        models, "step_speculation", {**self_grade(threshold=10), "max_step_tokens": 4}, prompt=" ", max_tokens=10
    )
    assert large.meter.models["small"].discarded_tokens == 4 + 4 + 2


# The large model's own steps, speculated on


async def test_speculation_inside_a_step_changes_no_token(tmp_path: Path) -> None:
    """Every other step is kept, so that a token of a round beyond its step would take a drafted step's place."""
    vocab, speculated, kept = VOCAB, 0, 0
    one, two = (torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2 for seed in (1, 2))
    tables = {"small": 0.8 * two + 0.4 * one, "large": two}
    for table in tables.values():
        table[:, ID["\n"]] += 2.0
    small, large = (LastTokenModel(name, markov(table.softmax(-1)), vocab) for name, table in tables.items())
    models = rewarded(small, large, tmp_path)
    params = {"scorer": {"name": "reward_model", "weight": "constant", "share": 0.5}}
    for index in range(40):
        common: dict[str, Any] = {"prompt": [index % vocab], "seed": index, "temperature": 1.0, "max_tokens": 30}
        alone, _, _ = await answer(models, "step_speculation", params, **common)
        drafted, _, _ = await answer(models, "step_speculation", {**params, "speculate": {}}, **common)
        assert drafted.tokens == alone.tokens
        emitted = [token for token in drafted.generated if token.kind is not TokenKind.DECODED]
        assert drafted.meter.speculation.emitted_tokens == len(emitted)
        speculated += len(emitted)
        kept += sum(token.source == "small" for token in alone.generated)
    assert speculated > 100
    assert kept > 100


def test_only_lossless_verifiers_may_speculate_inside_a_step() -> None:
    with pytest.raises(TurnoutError, match="lossless"):
        get_method("step_speculation").parse({"speculate": {"drafter": "medusa", "verifier": "typical"}})


# The reward model (seed 39)


def rewarded(small: Any, large: Any, folder: Path, **chances: float) -> Any:
    values = [chances.get(char, 0.5) for char in ["_"] * VOCAB]
    for char, chance in chances.items():
        values[ID[char]] = chance
    return with_head(pool(small, large), "reward_model", "small", folder, values, unread=3)


async def test_deltas_beyond_the_rewards_are_the_models_alone(tmp_path: Path) -> None:
    for delta, role in ((-1, "small"), (2, "large")):
        models = rewarded(
            LastTokenModel("small", scripted("small", line("a")).next_logits, VOCAB),
            LastTokenModel("large", scripted("large", line("b")).next_logits, VOCAB),
            tmp_path,
        )
        seq, _, _ = await answer(models, "step_speculation", {"scorer": {"name": "reward_model", "delta": delta}})
        plain, _, _ = await answer(models, "plain", {"model": role})
        assert seq.tokens == plain.tokens


async def test_the_large_models_step_is_not_scored(tmp_path: Path) -> None:
    small = LastTokenModel("small", scripted("small", line("a")).next_logits, VOCAB)
    models = rewarded(small, LastTokenModel("large", scripted("large", line("b")).next_logits, VOCAB), tmp_path)
    await answer(models, "step_speculation", {"scorer": {"name": "reward_model", "delta": 2}}, prompt=" ", max_tokens=8)
    # Each step: its catch-up with the first drafted token, then one forward a token, and one for the score.
    assert small.forwards == 2 * (4 + 1)


STEP_TOKENS = [ID["a"], ID["b"], ID["c"]]


def two_step_model(name: str, seed: int) -> LastTokenModel:
    """Steps of one letter of three, each with a newline; the letter depends on the one before."""
    probs = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)) + 0.1
    probs /= probs.sum(-1, keepdim=True)
    table = torch.zeros(VOCAB, VOCAB)
    for row, token in enumerate(STEP_TOKENS):
        table[token, STEP_TOKENS] = probs[row]

    def logits(tokens: list[int]) -> torch.Tensor:
        return table[tokens[-1]].log()

    return LastTokenModel(name, logits, VOCAB)


WEIGHTS = {
    "step": lambda r: float(r >= 0.5),
    "constant": lambda r: 0.3,
    "clipped": lambda r: r,
    "sigmoid": lambda r: 1.0 / (1.0 + torch.exp(torch.tensor(-4.0 * (r - 0.5)))).item(),
}


@pytest.mark.parametrize(
    ("weight", "token_level"),
    [
        *((weight, None) for weight in WEIGHTS),
        ("clipped", {"verifier": "rejection"}),
        ("step", {"drafter": "rsd_s", "verifier": "rejection"}),
    ],
)
@pytest.mark.parametrize("runs", [300, pytest.param(4_000, marks=pytest.mark.exactness)])
async def test_the_law_is_the_mixture(tmp_path: Path, weight: str, token_level: Any, runs: int) -> None:
    """Two steps of one token each: all nine outcomes against w P_small + (1 - E w) P_large, by chi-square."""
    rewards = {"a": 0.9, "b": 0.2, "c": 0.6}
    small, large = two_step_model("small", 3), two_step_model("large", 4)
    models = rewarded(small, large, tmp_path, **rewards)
    params: dict[str, Any] = {
        "scorer": {"name": "reward_model", "weight": weight, "delta": 0.5, "share": 0.3, "sharpness": 4.0},
        "separators": ["a", "b", "c"],
        "speculate": token_level,
    }
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        seq, _, _ = await answer(
            models, "step_speculation", params, prompt=[STEP_TOKENS[0]], seed=seed, temperature=1.0, max_tokens=2
        )
        counts[tuple(seq.tokens[1:])] += 1
    w = torch.tensor([WEIGHTS[weight](rewards[char]) for char in "abc"])
    assert deviation(counts, w, small, large) < 26.12  # 8 degrees of freedom, p = 0.001
    # So many runs tell it from the laws of the two models alone.
    assert deviation(counts, torch.ones(3), small, large) > 40.0
    assert deviation(counts, torch.zeros(3), small, large) > 40.0


def deviation(counts: Counter[tuple[int, ...]], w: torch.Tensor, small: LastTokenModel, large: LastTokenModel) -> float:
    """Chi-square of pairs of steps against the law of steps that are kept so often."""

    def law(after: int) -> torch.Tensor:
        p_small, p_large = (model.next_logits([after]).exp()[STEP_TOKENS] for model in (small, large))
        kept = w * p_small
        return kept + (1.0 - kept.sum()) * p_large

    statistic = 0.0
    for first, one in zip(STEP_TOKENS, law(STEP_TOKENS[0]), strict=True):
        for second, two in zip(STEP_TOKENS, law(first), strict=True):
            expected = counts.total() * float(one * two)
            statistic += (counts[first, second] - expected) ** 2 / expected
    return statistic


async def test_the_large_models_share_falls_with_no_lower_delta(tmp_path: Path) -> None:
    small, large = two_step_model("small", 3), two_step_model("large", 4)
    models = rewarded(small, large, tmp_path, a=0.9, b=0.2, c=0.6)
    shares = []
    for delta in (-1.0, 0.3, 0.7, 1.0):
        written = 0
        for seed in range(60):
            seq, _, _ = await answer(
                models,
                "step_speculation",
                {"scorer": {"name": "reward_model", "delta": delta}, "separators": ["a", "b", "c"], "rest": "nobody"},
                prompt=[STEP_TOKENS[0]],
                seed=seed,
                temperature=1.0,
                max_tokens=1,
            )
            written += seq.generated[0].source == "large"
        shares.append(written)
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[0] < shares[1] < shares[2] < shares[3] == 60


async def test_an_artifact_of_other_models_is_refused(tmp_path: Path) -> None:
    models = rewarded(two_step_model("small", 3), two_step_model("large", 4), tmp_path)
    models.small.digest = "another"
    with pytest.raises(TurnoutError, match="small model"):
        await answer(models, "step_speculation", {"scorer": "reward_model"})


# On a real cache


async def test_after_keeping_and_rejecting_the_cache_is_that_of_a_fresh_forward() -> None:
    """K: the next logits of both models, read from what is cached, equal those of a fresh sequence's forward."""
    config = llama_config(VOCAB, hidden_size=32, intermediate_size=48, pad_token_id=None, eos_token_id=None)
    small, large = (engine_model(random_model(deepcopy(config), seed, 0.25), block_size=4) for seed in (1, 2))
    small.name, large.name = "small", "large"
    models = pool(small, large)  # type: ignore[arg-type]
    info = get_method("step_speculation")
    params = info.parse({**self_grade(threshold=4, reading="expected", question="abc?"), "max_step_tokens": 5})
    seq = Sequence(ids("?ab"), SamplingParams(max_tokens=60), 3, (END,))
    kept = []
    async for segment in info.run(Request("r", seq), models, params):
        kept.append(segment.tokens[0].source)
        for model in (small, large):
            fresh = Sequence(seq.tokens, seq.sampling, 0, sharing=Sharing.private(f"{len(seq)}"))
            want = ReadSpec(draw=None, logits=True)
            [cached], [computed] = await model.extend(seq, want=want), await model.extend(fresh, want=want)
            assert torch.allclose(cached.logits, computed.logits, atol=1e-4)
            model.release(fresh)
    assert set(kept) == {"small", "large"}
    for model in (small, large):
        model.release(seq)
        model.pool.check_integrity()
        await model.close()


def test_features_by_hand() -> None:
    rows = [
        Readout(logits=torch.tensor([0.0, 0.0, -40.0, -100.0]), entropy_bits=1.0, hidden={-1: torch.tensor([5.0])}),
        Readout(logits=torch.tensor([0.0, 0.0, 0.0, 0.0]), entropy_bits=2.0, hidden={-1: torch.tensor([6.0])}),
        Readout(logits=torch.tensor([9.0, 0.0, 0.0, 0.0]), entropy_bits=0.1, hidden={-1: torch.tensor([7.0])}),
    ]
    found = step_features(rows, (0, 2))
    assert found.tolist() == pytest.approx([7.0, -math.log(4), -(math.log(2) + math.log(4)) / 2, 2.0])
    assert step_features(rows[2:], ()).tolist() == [7.0, 0.0, 0.0, 0.0]
    assert step_features(rows, (3, 0))[1] == -30.0  # whatever can never be said counts no more than that
