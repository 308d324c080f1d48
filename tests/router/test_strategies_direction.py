"""The direction of seed 52: planted questions, labelled by the model's own samples, answered as a probe chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from decoding.artifacts import Artifacts
from decoding.fakes import TableModel, pair
from decoding.model import ModelPool, Readout, ReadSpec, Request
from decoding.sequence import Sequence
from pool.validation import PreparedRequest, RequestValidator
from router.base import Asked, make_policy
from router.decision import Decision
from router.difficulty.strategies import STRATEGIES
from training.router_outcomes import Outcome, Outcomes, Sample
from training.router_targets import WhichStrategy
from training.router_training import Recipe, read_prompts, train_probe
from turnout.calls import GenerateCall
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

KINDS = ("easy", "normal", "hard")
QUESTIONS = {kind: range(4 * place, 4 * place + 4) for place, kind in enumerate(KINDS)}  # the prompt's last token
WORDS, RIGHT, WRONG, END, VOCAB = range(12, 28), 28, 29, 30, 31
MOST, STEPS = 20, 14


class Planted(TableModel):
    """Says words, then whether it got there, then ends. Its hidden state is its last token, one-hot.

    Easy questions: it might be done at every word, and is unsure whether it is. Normal ones take 14 words, all sure.
    Hard ones: it rambles, and comes to nothing but a wrong answer now and then.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, self._logits, VOCAB, 10)

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        law, asked = torch.zeros(VOCAB), next(token for token in reversed(tokens) if token < WORDS[0])
        said = len(tokens) - 1 - max(place for place, token in enumerate(tokens) if token == asked)
        if tokens[-1] in (RIGHT, WRONG):
            law[END] = 1.0
        elif asked in QUESTIONS["normal"]:
            law[WORDS[said] if said < STEPS else RIGHT] = 1.0
        else:
            done, at = (0.36, RIGHT) if asked in QUESTIONS["easy"] else (0.03, WRONG)
            law[WORDS] = (1.0 - done) / len(WORDS)
            law[at] = done
        return law.log()

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                row.hidden = {-1: torch.eye(VOCAB)[(seq.tokens + list(path))[-1]]}
        return rows


class Answered(NamedTuple):
    right: bool
    tokens: int


def planted() -> ModelPool:
    return pair(Planted("small"), Planted("large"))


async def written(models: ModelPool, prompt: list[int], sampling: SamplingParams, seed: int) -> Sequence:
    seq = Sequence(prompt, sampling, seed, (END,))
    await models.small.decode(seq)
    models.small.release(seq)
    return seq


async def outcome_of(models: ModelPool, prompt: list[int]) -> Outcome:
    """What the card labels by: ten samples of the model itself, and how sure it was of each token."""
    sampling, drawn = SamplingParams(temperature=1.0, max_tokens=MOST, token_details=True), []
    for seed in range(10):
        said = (await written(models, prompt, sampling, seed)).generated
        bits = [token.entropy_bits or 0.0 for token in said]
        reward = float(any(token.id == RIGHT for token in said))
        drawn.append(Sample(reward=reward, entropy_bits=max(sum(bits) / len(bits), 0.0)))
    return Outcome(prompt=str(prompt), samples_small=tuple(drawn), correct_large=True)


async def answered(models: ModelPool, prompt: list[int], seed: int, decision: Decision) -> Answered:
    """The answer to a caller of 20 tokens, sampled as the decision says; this model knows no words to be told."""
    call = GenerateCall("r", "pool", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=MOST))
    intake = RequestValidator("pool", {}, None, 1000, VOCAB, "plain", {})  # type: ignore[arg-type]
    followed = intake.follow(PreparedRequest(call, None, prompt, seed, MOST), replace(decision, suffix=""))
    said = await written(models, prompt, followed.sampling, seed)
    return Answered(any(token.id == RIGHT for token in said.generated), len(said.generated))


def totals(found: list[Answered]) -> tuple[int, int]:
    """Right answers, and tokens of all."""
    return sum(each.right for each in found), sum(each.tokens for each in found)


async def trained(models: ModelPool, folder: Path) -> None:
    """A probe of strategies from the model's own samples, as an artifact of the pool."""
    prompts = [[number % WORDS[0], asked] for number in range(6) for asked in range(WORDS[0])]
    rows = [await outcome_of(models, prompt) for prompt in prompts]
    found = {WhichStrategy().rule.label(row.reward("small"), row.mean("small", "entropy_bits") or 0.0) for row in rows}
    assert found == set(KINDS)
    inputs = await read_prompts(models, prompts, lambda *_: None)
    recipe = Recipe(32, epochs=60, learning_rate=1e-2)
    run = train_probe(models, Outcomes.of(rows), inputs, WhichStrategy(), recipe)
    run.artifact.save(folder / "strategies.safetensors")
    models.artifacts = Artifacts(folder)


async def test_fewer_tokens_than_always_normal_at_equal_accuracy(tmp_path: Path) -> None:
    models = planted()
    await trained(models, tmp_path)
    policy = make_policy(PartChoice(name="strategies"), "policy")
    policy.check(models)
    routed: list[Answered] = []
    by_strategy: dict[str, list[Answered]] = {name: [] for name in STRATEGIES}
    for seed, asked in enumerate([*range(WORDS[0])] * 2):
        prompt = [7 + seed % 5, 9, asked]  # none that was trained on
        request = Request("r", Sequence(prompt, SamplingParams(max_tokens=MOST), seed))
        decision = await policy.decide(Asked(request, "pool", "tenant", "", "text"), models)
        routed.append(await answered(models, prompt, seed, decision))
        for name, strategy in STRATEGIES.items():
            sampling = {"temperature": strategy.temperature, "max_tokens_share": strategy.share}
            by_strategy[name].append(await answered(models, prompt, seed, replace(decision, sampling=sampling)))
    right, tokens = totals(routed)
    normal_right, normal_tokens = totals(by_strategy["normal"])
    assert right == normal_right == 16
    assert tokens < 0.85 * normal_tokens
    # A short answer for all is no way to it: whoever needs his words is cut off.
    assert totals(by_strategy["easy"])[0] == totals(by_strategy["hard"])[0] == 8
    # Nobody does better than whoever knows beforehand what each strategy would have brought; the probe comes near.
    best = [min(each, key=lambda one: (not one.right, one.tokens)) for each in zip(*by_strategy.values(), strict=True)]
    best_right, best_tokens = totals(best)
    assert (best_right, best_tokens <= tokens) == (right, True)
    assert normal_tokens - tokens > 0.6 * (normal_tokens - best_tokens)


def test_strategies_told_by_few_answers_are_doubted():
    def rows(count: int) -> Outcomes:
        drawn = [tuple(Sample(reward=1, entropy_bits=0.1) for _ in range(number)) for number in (12, count)]
        return Outcomes.of([Outcome(prompt=f"p{len(each)}", samples_small=each, correct_large=True) for each in drawn])

    assert WhichStrategy().doubt(rows(10)) == ""
    said = WhichStrategy().doubt(rows(4))
    assert "have 4 of samples_small, 10 are usual: the share of right ones is known to 25% there" in said
    assert "above 60% or 85%" in said
