"""EM-FT and EM-RL: the entropy of held-out answers falls, and gradients have the sign and size of those by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.sequence import Sequence
from tests.engine.harness import engine_model
from training import entropy_minimisation
from training.demo_prompts import Prompt
from training.entropy_minimisation import (
    Along,
    EntropyPlan,
    EntropyRun,
    advantages,
    divergence,
    read_along,
    rewards,
    write,
)
from training.fitting import Schedule
from training.head_runs import Questions
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

SURE, OPEN = [3], [*range(10, 18)]
QUESTIONS = Questions([Prompt(f"q{n}", False) for n in range(6)], [Prompt(f"h{n}", False) for n in range(12)])
QUICK = Schedule(steps=12, batch_size=3, learning_rate=2e-2, warmup_steps=0, clip=1.0)
PLAN = EntropyPlan("ft", QUESTIONS, QUICK, max_tokens=5)
RL = replace(PLAN, form="rl", samples=4, kl=0.0, schedule=replace(QUICK, learning_rate=3e-3))


def forked() -> Any:
    """A model of two ways: after a prompt, SURE or OPEN; after SURE nearly always SURE, after OPEN one of eight."""
    model = random_model(llama_config(num_hidden_layers=1, tie_word_embeddings=False), seed=4)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        states, head = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.zero_()
        states[:, 0], states[SURE, :2], states[OPEN, ::2] = 1.0, torch.tensor([0.0, 1.0]), 0.0
        states[OPEN, 2] = 1.0
        head[SURE, 0], head[SURE, 1], head[OPEN[0], 0] = 1.0, 1.0, 1.02
        head[OPEN, 2] = torch.linspace(1.0, 0.93, len(OPEN))  # no two are equally likely
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    forked().save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    return made


def fall(folder: Path, plan: EntropyPlan) -> float:
    """Nats a token by which the entropy of held-out answers falls."""
    held = EntropyRun(folder, plan, None).tune().report["heldout"]
    assert held["before"]["kl_from_start_nats"] == pytest.approx(0.0, abs=1e-5)
    assert held["after"]["kl_from_start_nats"] > 0.0
    return float(held["before"]["entropy_nats"] - held["after"]["entropy_nats"])


@pytest.mark.parametrize("plan", [PLAN, RL, replace(RL, reward="trajectory")], ids=["ft", "rl", "rl, trajectory"])
def test_the_entropy_of_held_out_answers_falls(folder: Path, plan: EntropyPlan) -> None:
    assert fall(folder, plan) > 0.1


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["", "a turned sign is seen"])
@pytest.mark.parametrize("reward", ["token", "trajectory"])
def test_the_gradient_makes_answers_likelier_of_which_the_model_is_surer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reward: Any, sign: float
) -> None:
    """Along it, the sum of gain times log-likelihood changes by the square of its length; gains are by hand."""
    run, drawn = EntropyRun(folder, replace(RL, reward=reward), None), []
    monkeypatch.setattr(entropy_minimisation, "rewards", lambda *given: sign * rewards(*given))
    monkeypatch.setattr(entropy_minimisation, "write", lambda *given: (drawn.append(write(*given)), drawn[-1])[-1])
    model = run._model.requires_grad_(True)
    run._reinforced(torch.arange(6)).backward()

    def read() -> list[Along]:
        return [read_along(model, prompt, answers) for prompt, answers in zip(run._prompts, drawn, strict=True)]

    with torch.no_grad():
        before, gains = read(), []
        for along in before:
            sure = -along.entropies.sum(-1) if reward == "token" else along.chosen.sum(-1)
            gains.append(torch.stack([one - (sure.sum() - one) / 3 for one in sure]))
        square = sum(float(each.grad.square().sum()) for each in model.parameters())
        for each in model.parameters():
            each -= 1e-3 / square * each.grad
        rises = [(now.chosen - then.chosen).sum(-1) for now, then in zip(read(), before, strict=True)]
    risen = torch.stack([gain * rise for gain, rise in zip(gains, rises, strict=True)]).mean()
    assert torch.stack(gains).abs().max() > 0.1
    assert risen.item() == pytest.approx(sign * 1e-3, rel=0.1)


def test_a_divergence_that_weighs_much_keeps_the_model_near_its_start(folder: Path) -> None:
    moved = [
        EntropyRun(folder, replace(RL, kl=kl, schedule=replace(QUICK, steps=8)), None)
        .tune()
        .report["heldout"]["after"]["kl_from_start_nats"]
        for kl in (0.0, 100.0)
    ]
    assert moved[1] < 0.3 * moved[0]


@pytest.mark.parametrize("plan", [PLAN, RL], ids=["ft", "rl"])
def test_an_interrupted_run_ends_bit_for_bit_as_one_that_was_not(
    folder: Path, tmp_path: Path, plan: EntropyPlan
) -> None:
    plan = replace(plan, schedule=replace(plan.schedule, steps=4))
    whole = EntropyRun(folder, plan, None).tune()

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("tuning") and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EntropyRun(folder, plan, tmp_path / "run", stop).tune()
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    resumed = EntropyRun(folder, plan, tmp_path / "run").tune()
    assert resumed.report == whole.report
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(TurnoutError, match="holds a run with other settings"):
        EntropyRun(folder, replace(plan, temperature=0.5), tmp_path / "run")


async def test_answers_are_those_that_the_engine_draws(folder: Path) -> None:
    """So that the held-out figures are of what would be served."""
    prompt, model = [5, 17, 60], forked()
    served = engine_model(forked())
    for temperature in (0.0, 0.8):
        plan = replace(PLAN, temperature=temperature, max_tokens=6)
        ends = frozenset({256, write(model, prompt, [1], plan, frozenset())[0][2]})
        drawn = write(model, prompt, [1, 2], plan, ends)
        for seed, answer in zip((1, 2), drawn, strict=True):
            seq = Sequence(prompt, SamplingParams(max_tokens=6, temperature=temperature), seed, ends)
            await served.decode(seq)
            assert tuple(seq.answer) == answer
            served.release(seq)
        assert len(drawn[0]) <= 3
    await served.close()


def test_rewards_baselines_and_divergences_are_those_computed_by_hand() -> None:
    logp = torch.tensor([[[0.5, 0.5], [0.25, 0.75]], [[1.0, 1e-30], [0.5, 0.5]]]).log()
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    chosen = torch.tensor([[0.5, 0.25], [1.0, 1.0]]).log()
    along = Along(logp, mask, chosen)
    entropy = math.log(2) - 0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert rewards(along, "token").tolist() == pytest.approx([-entropy, 0.0], abs=1e-6)
    assert rewards(along, "trajectory").tolist() == pytest.approx([math.log(0.125), 0.0])
    assert advantages(torch.tensor([1.0, 2.0, 6.0])).tolist() == [-3.0, -1.5, 4.5]
    start = torch.full_like(logp, 0.5).log()
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5) + math.log(2)
    assert divergence(along, start).item() == pytest.approx(kl / 3)
    assert divergence(along, logp).item() == 0.0


def test_answers_of_several_lengths_are_read_as_each_alone() -> None:
    model = forked()
    answers: list[tuple[int, ...]] = [(7, 8, 9), (3,)]
    together = read_along(model, [5, 6], answers)
    for row, answer in enumerate(answers):
        alone = read_along(model, [5, 6], [answer])
        assert torch.allclose(together.entropies[row, : len(answer)], alone.entropies[0], atol=1e-5)
        assert torch.allclose(together.chosen[row, : len(answer)], alone.chosen[0], atol=1e-5)
    assert together.entropies[1, 1:].tolist() == [0.0, 0.0]


def test_answers_beyond_the_context_are_refused(folder: Path) -> None:
    with pytest.raises(TurnoutError, match="511 after a prompt of 3; the context has 512") as refused:
        EntropyRun(folder, replace(PLAN, max_tokens=511), None)
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "max_tokens")
