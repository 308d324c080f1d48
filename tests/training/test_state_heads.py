"""Rewards and judgements: labels by hand, heads that learn planted rules, and what they bring in use."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding.artifacts import Artifacts
from decoding.fakes import TableModel
from decoding.model import ModelPool, Readout, ReadSpec
from decoding.sequence import Sequence
from tests.decoding.step_models import ALPHABET, END, ID, VOCAB, Characters, answer, ids, pool, text
from training.entropy_gate import calibrate, calibrate_enough, measure, report
from training.fitting import Schedule
from training.judgements import final_answers, mine_judgements
from training.length_data import Source
from training.state_heads import STEADY, HeadRecipe, examples_of, train_state_head
from training.step_rewards import make_wrong, mine_steps
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

# Two models that count up from the number in the prompt, for three lines: a word, and a digit. The target's word is
# always a; the draft's is a, b or c, which means the same; and now and then the draft miscounts. What the word is does
# not matter to what comes after it; what the digit is does.
WORDS = "abc"
LINES = 3


class Counting(TableModel):
    """Its hidden state tells the last character, and whether a digit is the one that ought to stand there."""

    def __init__(self, name: str, words: str, miscounts: int) -> None:
        super().__init__(name, self._logits, VOCAB, 1 if name == "small" else 10)
        self.words = words
        self.miscounts = miscounts

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        row = torch.zeros(VOCAB)
        row[ID[self._next(text(tokens))]] = 50.0
        return row

    def _next(self, written: str) -> str:
        prompt, _, rest = written.partition("?")
        lines = rest.split("\n")
        if len(lines) > LINES:
            return "$"
        if lines[-1] == "":
            return self.words[(sum(map(ord, written))) % len(self.words)]
        if len(lines[-1]) == 1:
            before = lines[-2][1] if len(lines) > 1 else prompt[-1]
            wrong = self.miscounts and sum(map(ord, written)) % self.miscounts == 0
            return str((int(before) + (2 if wrong else 1)) % 10)
        return "\n"

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                row.hidden = {-1: self.state(seq.tokens + list(path))}
        return rows

    def state(self, tokens: list[int]) -> torch.Tensor:
        """[VOCAB + 1]."""
        written = text(tokens)
        state = torch.zeros(VOCAB + 1)
        state[tokens[-1]] = 1.0
        lines = written.partition("?")[2].split("\n")
        start = int(written[written.index("?") - 1])
        digits = [each[1] for each in lines if len(each) > 1]
        state[VOCAB] = float(all(digit == str((start + place) % 10) for place, digit in enumerate(digits, start=1)))
        return state


def counters(miscounts: int = 5) -> ModelPool:
    return pool(Counting("small", WORDS, miscounts), Counting("large", "a", 0))


def source(count: int, **sampling: Any) -> Source:
    prompts = [ids(f"{'h' * (index // 10)}{index % 10}?") for index in range(count)]
    return Source(prompts, SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **sampling}), frozenset({END}))


def digits_of(tokens: tuple[int, ...]) -> str:
    """What a count comes to: its last digit."""
    return "".join(each for each in text(list(tokens)) if each.isdigit())[-1:]


def right_answer(prompt: list[int]) -> str:
    return str((int(text(prompt)[-2]) + LINES) % 10)


JUDGE = HeadRecipe("judge", "large", 0, True, 60, replace(STEADY, batch_size=64, learning_rate=0.03))


# Labels


async def test_forced_tokens_are_labelled_by_the_final_answer() -> None:
    mined = await mine_judgements(counters(), source(40), 7, digits_of, most=20)
    assert len(mined) >= 2
    for state, label in zip(mined.inputs, mined.labels, strict=True):
        char = ALPHABET[int(state[:VOCAB].argmax())]
        assert char.isdigit() or char in WORDS
        assert label == float(char in WORDS)


async def test_a_right_token_is_kept_and_a_wrong_one_is_not() -> None:
    """By hand: words are always others than the target's, digits always miscount by one."""
    small = Counting("small", "b", 1)
    models = pool(small, Counting("large", "a", 0))
    asked: list[str] = []

    def answer_of(tokens: tuple[int, ...]) -> str:
        asked.append(text(list(tokens)))
        return digits_of(tokens)

    mined = await mine_judgements(models, source(1), 0, answer_of, most=20)
    assert mined.labels.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    # Every word of the draft has been taken over by the end, none of its digits.
    assert asked[-1] == "b1\nb2\nb3\n$"
    assert not small.cached


async def test_no_more_disagreements_than_allowed_are_looked_at() -> None:
    models = pool(Counting("small", "b", 1), Counting("large", "a", 0))
    assert len(await mine_judgements(models, source(1), 0, digits_of, most=4)) == 4


def test_an_answer_comes_to_what_stands_after_the_mark() -> None:
    class Words(Characters):
        def decode(self, ids: Sequence[int]) -> str:
            return "".join(["1+1=2\n", "Answer: 2", " \n", "so it is 3"][token_id] for token_id in ids)

    answer_of = final_answers(Words())
    assert answer_of((0, 1, 2)) == answer_of((1,)) == "2"
    assert answer_of((3, 2)) == "so it is 3"


# The judge in use


async def test_the_judge_learns_to_take_words_and_refuse_digits(tmp_path: Path) -> None:
    """Free wording, strict digits: accuracy stays, more is accepted than by the standard verifier."""
    models, questions = counters(), source(160)

    async def mine(index: int) -> Any:
        return await mine_judgements(models, questions, index, digits_of, most=20)

    trained = await train_state_head(models, questions, JUDGE, mine)
    assert trained.heldout.auc > 0.95
    assert trained.artifact.settings["data"] == questions.digest != source(161).digest
    trained.artifact.save(tmp_path / "judge.safetensors")
    models.artifacts = Artifacts(tmp_path)
    accepted, rounds, right = {}, {}, {}
    for verifier in ("match", "judge"):
        accepted[verifier] = rounds[verifier] = right[verifier] = 0
        for index in range(160, 200):
            prompt = ids(f"h{index % 10}?")
            params = {"draft_length": 12, "verifier": verifier}
            seq, _, _ = await answer(models, "speculative", params, prompt=prompt, max_tokens=16)
            accepted[verifier] += seq.meter.speculation.accepted_tokens
            rounds[verifier] += seq.meter.speculation.rounds
            right[verifier] += digits_of(tuple(token.id for token in seq.generated)) == right_answer(prompt)
    assert right == {"match": 40, "judge": 40}
    assert accepted["judge"] > accepted["match"]
    assert rounds["judge"] < 0.7 * rounds["match"]


# Rewards


def worked(index: int) -> list[str]:
    return [f"a{(index % 10 + step) % 10}" for step in range(1, LINES + 1)]


async def test_steps_are_right_up_to_the_first_that_is_not() -> None:
    models = pool(Counting("small", "a", 2), Counting("large", "a", 0))
    recipe = HeadRecipe("reward_model", "small")
    kinds = set()
    for index in range(20):
        seq, _, _ = await answer(models, "plain", {"model": "small"}, source(20).prompts[index], max_tokens=16)
        lines = text(seq.tokens).partition("?")[2].removesuffix("$").splitlines()
        place = next((at for at, line in enumerate(lines) if line != worked(index)[at]), None)
        right = LINES if place is None else place
        expected = [1.0] * right + [0.0] * (place is not None) + [0.0] * (right > 0)  # the last is one made wrong
        fresh = pool(Counting("small", "a", 2), Counting("large", "a", 0))
        mined = await mine_steps(fresh, Characters(), source(20), index, worked(index), recipe)
        assert not fresh.small.cached  # type: ignore[attr-defined]
        assert mined.labels.tolist() == expected
        # The state says the same, except where a step was made wrong, which it sees too.
        assert mined.inputs[:, VOCAB].tolist() == expected
        assert mined.inputs[:, ID["\n"]].tolist() == [1.0] * len(expected)
        kinds.add(right)
    assert len(kinds) > 1


def test_a_wrong_step_differs_in_one_digit_of_its_result() -> None:
    rng = random.Random(0)
    for _ in range(200):
        step = f"{rng.randrange(99)}+{rng.randrange(99)}={rng.randrange(999)}\n"
        wrong = make_wrong(step, rng)
        assert wrong.partition("=")[0] == step.partition("=")[0]
        assert sum(a != b for a, b in zip(wrong, step, strict=True)) == 1
        assert wrong[wrong.index("=") + 1 : -1].isdigit()
    assert make_wrong("so\n", rng) == "so 1\n"


async def test_rewarded_steps_bring_the_accuracy_of_the_large_model(tmp_path: Path) -> None:
    """The direction of the card: at the default delta as accurate as the large model, at a cost between the two."""
    models, questions = pool(Counting("small", "a", 3), Counting("large", "a", 0)), source(80)
    recipe = HeadRecipe(
        "reward_model", "small", 8, False, 60, Schedule(batch_size=64, learning_rate=0.02, warmup_steps=0)
    )

    async def mine(index: int) -> Any:
        return await mine_steps(models, Characters(), questions, index, worked(index), recipe)

    trained = await train_state_head(models, questions, recipe, mine)
    trained.artifact.save(tmp_path / "reward_model.safetensors")
    models.artifacts = Artifacts(tmp_path)
    right = {"small": 0, "step_speculation": 0, "large": 0}
    by_large = []
    for index in range(40):
        prompt = ids(f"{'g' * (1 + index // 10)}{index % 10}?")
        for name, method, params in (
            ("small", "plain", {"model": "small"}),
            ("large", "plain", {"model": "large"}),
            ("step_speculation", "step_speculation", {"scorer": "reward_model"}),
        ):
            seq, _, _ = await answer(models, method, params, prompt, max_tokens=16)
            right[name] += digits_of(tuple(token.id for token in seq.generated)) == right_answer(prompt)
            if name == "step_speculation":
                by_large.append(
                    seq.meter.models["large"].generated_tokens / len(seq.generated)
                    if "large" in seq.meter.models
                    else 0.0
                )
    assert right["small"] < 40
    assert right["step_speculation"] == right["large"] == 40
    assert 0.0 < sum(by_large) / 40 < 0.6


# Bad input, and runs that are interrupted


async def test_labels_all_alike_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    models = pool(Counting("small", "b", 0), Counting("large", "a", 0))

    async def mine(index: int) -> Any:
        return await mine_judgements(models, source(16), index, digits_of, most=20)

    with pytest.raises(TurnoutError, match="all right"):
        await train_state_head(models, source(16), JUDGE, mine)

    async def nothing(index: int) -> Any:
        return examples_of([], [], index)

    with pytest.raises(TurnoutError, match="no examples"):
        await train_state_head(models, source(16), JUDGE, nothing)


async def test_what_was_mined_is_not_mined_again(tmp_path: Path) -> None:
    calls = []
    recipe = replace(JUDGE, epochs=2)

    async def mine(index: int) -> Any:
        calls.append(index)
        states = [torch.randn(4, generator=torch.Generator().manual_seed(index * 2 + place)) for place in range(2)]
        return examples_of(states, [0.0, 1.0], index)

    made = [await train_state_head(counters(), source(16), recipe, mine, tmp_path / "run") for _ in range(2)]
    assert calls == list(range(16))
    for name, tensor in made[0].artifact.tensors.items():
        assert torch.equal(tensor, made[1].artifact.tensors[name])
    with pytest.raises(TurnoutError, match="other settings"):
        await train_state_head(counters(), source(16), replace(recipe, epochs=3), mine, tmp_path / "run")


# The gate of `enough`


def test_thresholds_by_hand() -> None:
    entropies = np.array([0.1, 0.2, 0.3, 0.9, 1.0, 1.1])
    right = np.array([True, True, True, False, False, False])
    gate = calibrate(entropies, right)
    assert gate.thresholds["mean"] == pytest.approx(0.2)
    assert gate.thresholds["information"] == pytest.approx(0.3)  # tells right from wrong without fail
    assert gate.thresholds["bayes"] == pytest.approx(0.6, abs=1e-6)  # equal spreads and shares: the middle
    assert gate.thresholds["scale_free"] == pytest.approx(0.6)
    assert gate.effect_size == pytest.approx(8.0)


def test_the_prior_moves_the_bayes_threshold_as_the_densities_say() -> None:
    rng = np.random.default_rng(0)
    entropies = np.concatenate([rng.normal(0.5, 0.1, 900), rng.normal(1.0, 0.2, 100)])
    right = np.arange(1000) < 900
    gate = calibrate(entropies, right)
    x = gate.thresholds["bayes"]
    good, bad = entropies[right], entropies[~right]

    def weighted(values: Any, share: float) -> float:
        mean, spread = values.mean(), values.std(ddof=1)
        return share * math.exp(-0.5 * ((x - mean) / spread) ** 2) / spread

    assert weighted(good, 0.9) == pytest.approx(weighted(bad, 0.1), rel=1e-6)
    scaled = calibrate(entropies * 7.0, right)
    for name, threshold in gate.thresholds.items():
        assert scaled.thresholds[name] == pytest.approx(7.0 * threshold, rel=1e-6)
    assert scaled.effect_size == pytest.approx(gate.effect_size)


def test_more_stop_at_a_higher_threshold() -> None:
    entropies = np.linspace(0.0, 1.0, 50)
    right = entropies < 0.6
    gate = calibrate(entropies, right)
    shares = [
        report(replace(gate, thresholds={"mean": threshold}), "mean", entropies, right).stopped
        for threshold in (-1.0, 0.1, 0.5, 2.0)
    ]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("wrong", [0, 1])
def test_too_few_of_a_kind_are_refused(wrong: int) -> None:
    right = np.array([True] * 8)
    right[:wrong] = False
    with pytest.raises(TurnoutError, match=f"{wrong} wrong"):
        calibrate(np.linspace(0, 1, 8), right)


async def test_entropies_are_of_the_answers_and_calibration_and_report_are_apart(tmp_path: Path) -> None:
    """Answers of two letters; those to odd numbers are drawn from four, and half of them wrong."""

    def logits(tokens: list[int]) -> torch.Tensor:
        prompt, _, rest = text(tokens).partition("?")
        row = torch.full((VOCAB,), -60.0)
        options = "abcd" if int(prompt[-1]) % 2 else "a"
        row[[ID[char] for char in (options if len(rest) < 2 else "$")]] = 0.0
        return row

    models = pool(TableModel("small", logits, VOCAB), TableModel("large", logits, VOCAB))
    questions = replace(source(80, temperature=1.0), prompts=[ids(f"{(index // 2) % 10}?") for index in range(80)])

    def is_right(index: int, tokens: tuple[int, ...]) -> bool:
        return text(list(tokens))[0] in "ab"

    entropies, right = await measure(models, questions, is_right, top=20)
    odd = np.array([(index // 2) % 2 == 1 for index in range(80)])
    assert entropies[~odd] == pytest.approx(0.0, abs=1e-6)
    assert entropies[odd] == pytest.approx(2 / 3 * math.log(4), abs=1e-6)
    assert right[~odd].all()
    made = await calibrate_enough(models, questions, is_right, top=20, rounds=2, cue="3?")
    used = np.arange(80) % 2 == 0
    assert made.gate == calibrate(entropies[used], right[used])
    alone = replace(made.reports["mean"], against_all_rounds=None)
    assert alone == report(made.gate, "mean", entropies[~used], right[~used])
    assert made.artifact.settings["data"] == questions.digest
    made.artifact.save(tmp_path / "enough.safetensors")
    models.artifacts = Artifacts(tmp_path)
    for number, rounds in ((2, 1), (3, 2)):
        params = {"monitor": {"name": "enough", "cue": "3?", "rounds": 2}}
        seq, _, _ = await answer(models, "monitored", params, f"{number}?", max_tokens=20, temperature=1.0)
        assert text(seq.tokens).count("$") == rounds
