"""Entropy switching between the draft and its target on held-out prompts (paper #2), next to same-start random.

No answer is right or wrong here: judged are the perplexity of what was written under the target, and its agreement with
it, against the share of tokens that the target wrote.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.bench_ead import alone, sweep
from benchmarks.harness import Report, note, signed
from benchmarks.pieces import Section, Values
from benchmarks.strategies import ArmResult
from benchmarks.switching_arms import SETTINGS, Prompts
from experiments import hf_model
from experiments.pairs import REAL, open_pair
from experiments.stats.intervals import Floats, Interval, bootstrap_mean
from pool.local_pool import LocalPool
from training.calibration_data import Question
from training.data import real_text
from turnout.calls import ChatMessage

# The paper's rule, and the gate that judges each token by itself.
NAMES = {"switching-paper": "paper", "switching-gate": "each"}
CALIBRATION = 1 / 3  # of each kind's prompts: thresholds are quantiles on them


@dataclass(frozen=True, slots=True)
class Scores:
    """Answers of an arm under the target, [prompts] each.

    Attributes:
        nats: mean negative log-probability of an answer's tokens.
        agreement: share of an answer's tokens that the target finds likeliest there.
        tokens: of the answer.
    """

    nats: Floats
    agreement: Floats
    tokens: Floats

    @property
    def perplexity(self) -> float:
        """Of all tokens together."""
        return float(np.exp((self.nats * self.tokens).sum() / self.tokens.sum()))


def held_out(each: int, max_tokens: int) -> Prompts:
    """Prompts of all kinds: the first third of each is for thresholds."""
    asked: list[Question] = []
    calibration: list[Question] = []
    for kind in real_text.KINDS:
        made = [Question(text, lambda _: 0.0) for text in real_text.prompts(kind)[:each]]
        cut = max(round(CALIBRATION * len(made)), 1)
        calibration += made[:cut]
        asked += made[cut:]
    return Prompts("real prompts", asked, calibration, max_tokens)


def score(target: Any, prompts: list[list[int]], answers: list[list[int]]) -> Scores:
    """Read each answer with the target, after its prompt.

    Args:
        target: a causal language model of transformers.
        prompts: token ids.
        answers: likewise, at least one each.
    """
    nats, agreement = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        ids = torch.tensor(answer)
        nats.append(-float(logits.log_softmax(-1).gather(-1, ids[:, None]).mean()))
        agreement.append(float((logits.argmax(-1) == ids).double().mean()))
    return Scores(np.array(nats), np.array(agreement), np.array([float(len(answer)) for answer in answers]))


async def measure(name: str, options: Namespace) -> Values:
    """Both models alone, and every threshold with its random baseline."""
    pair, setting = open_pair(REAL), SETTINGS[NAMES[name]]
    prompts = held_out(options.each, options.tokens)
    pool = LocalPool.load(pair.pool, pair.in_dtype("float32"))
    try:
        results = [*await alone(pool, prompts), *await sweep(pool, prompts, setting)]
        asked = [pool.tokenizer.encode_chat([ChatMessage("user", each.prompt)]) for each in prompts.asked]
    finally:
        await pool.close()
    note("scoring under the target")
    target = hf_model.load(str(pair.folder("large")), "float32")
    scored = [score(target, asked, [[token.id for token in each.tokens] for each in r.outcomes]) for r in results]
    return {
        "prompts": len(asked),
        "tokens": options.tokens,
        "title": setting.title,
        "rule": f"window {setting.window}, minimum stay {setting.stay}, effect {setting.effect}",
        "arms": rows(results, scored),
    }


def rows(results: list[ArmResult], scored: list[Scores]) -> list[dict[str, Any]]:
    """Figures of each arm; of an adaptive one, with its differences to the random arm that follows it."""
    made = []
    for place, (result, mine) in enumerate(zip(results, scored, strict=True)):
        row: dict[str, Any] = {
            "arm": result.arm.name,
            "large_share": result.large_share,
            "perplexity": mine.perplexity,
            "agreement": float((mine.agreement * mine.tokens).sum() / mine.tokens.sum()),
            "mean_run": result.mean_run,
        }
        if result.arm.method == "entropy_adaptive":
            random, less = scored[place + 1], result.large_share - results[place + 1].large_share
            nats = random.nats + less * _slope(scored, "nats")
            agreement = random.agreement + less * _slope(scored, "agreement")
            row["nats_over_random"] = _ends(bootstrap_mean(mine.nats - nats, seed=place))
            row["agreement_over_random"] = _ends(bootstrap_mean(mine.agreement - agreement, seed=place))
        made.append(row)
    return made


def _slope(scored: list[Scores], figure: str) -> float:
    """Change of a figure's mean from the small model alone, which comes first, to the large one alone."""
    small, large = (float(getattr(each, figure).mean()) for each in scored[:2])
    return large - small


def _ends(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """A table for each rule."""
    report.text(
        "The small model is the draft that `turnout train draft` made of the target. Greedy, float32; thresholds are"
        " quantiles of the small model's rolling mean entropy on other prompts. Perplexity and agreement are those of"
        " the written tokens under the target, read once more by Hugging Face's forward; agreement: the token is the"
        " target's likeliest there. The random arm below each threshold starts with the same model and has about its"
        " share and run length; it is moved to exactly its share along the line between the models alone. Differences"
        " are means over prompts with 95% bootstrap intervals: nats per token, where less is better, and agreement."
    )
    for values in pieces.values():
        report.text(
            f"**{values['title'].capitalize()}** ({values['rule']}), {values['prompts']} prompts, at most"
            f" {values['tokens']} tokens:"
        )
        columns = {
            "arm": lambda row: row["arm"],
            "target's tokens": lambda row: f"{row['large_share']:.1%}",
            "perplexity": lambda row: row["perplexity"],
            "agreement": lambda row: f"{row['agreement']:.1%}",
            "mean run": lambda row: f"{row['mean_run']:.1f}",
            "nats, less random's": lambda row: _difference(row, "nats_over_random"),
            "agreement, less random's": lambda row: _difference(row, "agreement_over_random"),
        }
        report.table(None, values["arms"], columns)


def _difference(row: Mapping[str, Any], key: str) -> str | None:
    return signed(Interval(*row[key])) if key in row else None


SECTION = Section(
    "Entropy switching",
    tuple(NAMES),
    measure,
    lambda options: {"tokens": options.tokens, "each": options.each},
    write,
)
