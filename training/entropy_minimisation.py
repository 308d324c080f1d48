"""Entropy minimisation of a model's weights on its own answers: EM-FT and EM-RL (paper #24).

Neither needs labels. The third form of the paper, EM-INF, is the logits processor `entropy_minimisation`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from decoding.artifacts import weights_digest
from decoding.noise import Purpose, derive_seed, gumbel, noise_key
from engine.checkpoints import read_model
from pool.text import TextTokenizer
from training.checkpoint import Checkpoint
from training.fitting import Schedule, fit
from training.head_runs import Advance, Questions
from training.length_predictors import claim
from turnout.atomic_files import write_whole
from turnout.errors import out_of_range

Form = Literal["ft", "rl"]
Reward = Literal["token", "trajectory"]
SCHEDULES = {
    "ft": Schedule(steps=100, batch_size=8, learning_rate=1e-5, warmup_steps=10, clip=1.0),
    "rl": Schedule(steps=100, batch_size=4, learning_rate=1e-5, warmup_steps=10, clip=1.0),
}


@dataclass(frozen=True)
class EntropyPlan:
    """All that a run follows from, besides the model.

    Attributes:
        form: "ft": the mean entropy of the tokens is the loss, on answers drawn once from the model as it was. "rl": it
            is the reward, of answers drawn from the model as it is (REINFORCE with a leave-one-out baseline).
        questions: prompts without answers.
        schedule: a step learns from `batch_size` answers (ft), or prompts (rl).
        samples: answers of a prompt in a step of rl, at least two.
        reward: of rl. "token": the negative sum of the entropies at an answer's tokens; "trajectory": its
            log-probability.
        kl: weight of the divergence from the model as it was, nats a token, in rl.
        max_tokens: longest answer.
        temperature: the answers are drawn at.
    """

    form: Form
    questions: Questions
    schedule: Schedule
    samples: int = 4
    reward: Reward = "token"
    kl: float = 0.001
    max_tokens: int = 128
    temperature: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """The plan in plain values, the questions as a digest."""
        questions = hashlib.blake2b(json.dumps(asdict(self.questions)).encode(), digest_size=16).hexdigest()
        return {**asdict(self), "questions": questions}


@dataclass(frozen=True)
class Tuned:
    """A tuned model, in evaluation mode, and what was measured on held-out prompts, in plain values."""

    model: Any
    report: dict[str, Any]


@dataclass(frozen=True)
class Along:
    """What a model says along answers to one prompt.

    Attributes:
        logp: float32 [answers, longest, vocab] log-probabilities, out of which each token was drawn.
        mask: float32 [answers, longest] 1 at an answer's tokens, 0 behind its end.
        chosen: float32 [answers, longest] log-probabilities of the tokens, 0 behind the end.
    """

    logp: torch.Tensor
    mask: torch.Tensor
    chosen: torch.Tensor

    @property
    def entropies(self) -> torch.Tensor:
        """[answers, longest] in nats, 0 behind the end."""
        return -(self.logp.exp() * self.logp).sum(-1) * self.mask


@torch.no_grad()
def write(
    model: Any, prompt: list[int], seeds: list[int], plan: EntropyPlan, ends: frozenset[int]
) -> list[tuple[int, ...]]:
    """Draw an answer for each seed, with the engine's noise; it has its end token, if it ended.

    Args:
        model: as transformers has it.
        prompt: token ids.
        seeds: one for each answer.
        plan: says how long they may be, and the temperature.
        ends: tokens that end an answer.
    """
    answers: list[list[int]] = [[] for _ in seeds]
    is_open = [True] * len(seeds)
    found = model(torch.tensor([prompt] * len(seeds)), use_cache=True)
    for place in range(plan.max_tokens):
        scores = found.logits[:, -1].float()
        if plan.temperature > 0.0:
            keys = [noise_key(seed, len(prompt) + place, Purpose.SAMPLE) for seed in seeds]
            scores = scores / plan.temperature + gumbel(keys, scores.shape[1], scores.device)
        tokens = scores.argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            if is_open[row]:
                answers[row].append(token)
                is_open[row] = token not in ends
        if not any(is_open) or place == plan.max_tokens - 1:
            break
        found = model(tokens[:, None], past_key_values=found.past_key_values, use_cache=True)
    return [tuple(answer) for answer in answers]


def read_along(model: Any, prompt: list[int], answers: list[tuple[int, ...]]) -> Along:
    """Read answers to a prompt in one forward, with the gradient."""
    longest = max(map(len, answers))
    rows = torch.tensor([[*prompt, *answer, *[prompt[0]] * (longest - len(answer))] for answer in answers])
    logits = model(rows, use_cache=False).logits[:, len(prompt) - 1 : -1].float()  # padded behind: it is causal
    logp = logits.log_softmax(-1)
    mask = (torch.arange(longest) < torch.tensor([[len(answer)] for answer in answers])).float()
    chosen = logp.gather(-1, rows[:, len(prompt) :, None])[..., 0] * mask
    return Along(logp, mask, chosen)


def rewards(along: Along, reward: Reward) -> torch.Tensor:
    """Reward of each answer, [answers], without a gradient: it comes from the model alone."""
    return (along.chosen if reward == "trajectory" else -along.entropies).sum(-1).detach()


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Each reward less the mean of the others (leave-one-out baseline): [answers], at least two."""
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def divergence(along: Along, start: torch.Tensor) -> torch.Tensor:
    """KL(model || model as it was) at the answers' tokens: mean, nats a token.

    Args:
        along: answers.
        start: log-probabilities of the model as it was, of the shape of `along.logp`.
    """
    return ((along.logp.exp() * (along.logp - start)).sum(-1) * along.mask).sum() / along.mask.sum()


class EntropyRun:
    """One run, resumable: it claims a folder and keeps its answers and checkpoints there.

    Args:
        folder: of the checkpoint; stays as it is.
        plan: what to do.
        run: state from which an interrupted run continues; None: nothing is kept.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: `run` is that of another plan; OUT_OF_RANGE: an answer of the greatest length
            does not fit the context.
    """

    def __init__(self, folder: Path, plan: EntropyPlan, run: Path | None, advance: Advance = lambda *_: None) -> None:
        self._model, _ = read_model(folder, torch.float32)
        self._plan, self._run, self._advance = plan, run, advance
        tokenizer = TextTokenizer(folder)
        self._ends = frozenset(tokenizer.eos_ids)
        self._prompts = [each.encode(tokenizer) for each in plan.questions.training]
        self._heldout = [each.encode(tokenizer) for each in plan.questions.heldout]
        self._model.eval()  # without dropout: what is learnt from is what was drawn
        most = int(getattr(self._model.config, "max_position_embeddings", 1 << 20))
        longest = max(map(len, [*self._prompts, *self._heldout]))
        if longest + plan.max_tokens > most:
            raise out_of_range("max_tokens", f"{plan.max_tokens} after a prompt of {longest}; the context has {most}")
        digest = weights_digest(self._model.config.to_dict(), self._model.state_dict())
        claim(run, {"kind": f"em_{plan.form}", "model": digest, **plan.settings})
        self._start = copy.deepcopy(self._model).requires_grad_(False)
        self._step = 0

    def tune(self) -> Tuned:
        """Train, or continue to.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the learning rate is too high.
        """
        plan, model = self._plan, self._model
        before = self._measured(self._start)
        checkpoint = None if self._run is None else self._run / "checkpoint.pt"
        if checkpoint is not None and checkpoint.exists():
            self._step = Checkpoint.load(checkpoint).progress.step
        loss = self._supervised() if plan.form == "ft" else self._reinforced
        model.requires_grad_(True)
        every = max(1, plan.schedule.steps // 10)
        losses = fit(model, loss, len(self._prompts), plan.schedule, checkpoint, every, self._note)
        model.requires_grad_(False)
        after = self._measured(model)
        report = {
            "form": plan.form,
            "prompts": len(self._prompts),
            "heldout_prompts": len(self._heldout),
            "heldout": {"before": before, "after": after},
            "losses": losses,
            "settings": plan.settings,
        }
        return Tuned(model, report)

    def _note(self, step: int, value: float) -> None:
        self._step = step
        self._advance(f"tuning, loss {value:.3f}", step, self._plan.schedule.steps)

    def _supervised(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """EM-FT: the mean entropy at the tokens of answers that the model gave before."""
        answers = self._answers()

        def loss(picked: torch.Tensor) -> torch.Tensor:
            read = [read_along(self._model, self._prompts[at], [answers[at]]) for at in picked.tolist()]
            total = torch.stack([along.entropies.sum() for along in read]).sum()
            return total / sum(len(answers[at]) for at in picked.tolist())

        return loss

    def _answers(self) -> list[tuple[int, ...]]:
        path = None if self._run is None else self._run / "answers.json"
        if path is not None and path.exists():
            return [tuple(each) for each in json.loads(path.read_text(encoding="utf-8"))]
        answers: list[tuple[int, ...]] = []
        for at, prompt in enumerate(self._prompts):
            seed = derive_seed(self._plan.schedule.seed, at)
            answers += write(self._start, prompt, [seed], self._plan, self._ends)
            self._advance("answering", at + 1, len(self._prompts))
        if path is not None:
            write_whole(path, json.dumps(answers).encode())
        return answers

    def _reinforced(self, picked: torch.Tensor) -> torch.Tensor:
        """EM-RL: policy gradient on answers of the model as it is; the noise follows from step and prompt alone."""
        plan = self._plan
        losses: list[torch.Tensor] = []
        for at in picked.tolist():
            prompt = self._prompts[at]
            first = (self._step * len(self._prompts) + at) * plan.samples
            seeds = [derive_seed(plan.schedule.seed, first + sample) for sample in range(plan.samples)]
            along = read_along(self._model, prompt, answers := write(self._model, prompt, seeds, plan, self._ends))
            gained = advantages(rewards(along, plan.reward))
            loss = -(gained * along.chosen.sum(-1)).mean()
            if plan.kl > 0.0:
                with torch.no_grad():
                    start = read_along(self._start, prompt, answers).logp
                loss = loss + plan.kl * divergence(along, start)
            losses.append(loss)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _measured(self, model: Any) -> dict[str, float]:
        """Entropy of a model's own answers to the held-out prompts, each drawn with the same noise."""
        entropy = divergent = tokens = 0.0
        for at, prompt in enumerate(self._heldout):
            seed = derive_seed(self._plan.schedule.seed + 1, at)
            answers = write(model, prompt, [seed], self._plan, self._ends)
            along = read_along(model, prompt, answers)
            count = len(answers[0])
            entropy += float(along.entropies.sum())
            divergent += float(divergence(along, read_along(self._start, prompt, answers).logp)) * count
            tokens += count
        mean_length = tokens / len(self._heldout)
        return {"entropy_nats": entropy / tokens, "kl_from_start_nats": divergent / tokens, "tokens": mean_length}
