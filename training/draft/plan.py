"""Settings of a draft model's training, and where its prompts come from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pool.text import TextTokenizer
from training.demo_prompts import Prompt
from training.draft.answers import TOP, TargetAnswers
from training.fitting import Schedule, TimedSchedule
from training.head_runs import Questions
from turnout.errors import invalid
from turnout.types import SamplingParams

BUNDLED = Path(__file__).parent.parent / "data" / "draft_prompts.txt"
TEXT_ROW = 256  # tokens of a row of plain text
HELDOUT_TOKENS = 160  # longest held-out answer


@dataclass(frozen=True)
class Shares:
    """Parts of a time budget; loading, the choice of layers and measuring take the rest."""

    answers: float = 0.32
    shapes: float = 0.06
    text: float = 0.12
    distillation: float = 0.38


@dataclass(frozen=True)
class DraftPlan:
    """All that a run follows from, besides the target.

    Attributes:
        questions: asked of the target.
        layers: how many of the target's the draft keeps; None: chosen by predicted speed-up.
        depth: tokens of the chain that it is judged by.
        minutes: budget of the whole run; ignored where `steps` is given.
        steps: of each stage of training, and of a tenth of that for each shape tried; None: as many as there is time.
        temperatures: of the target's answers; all prompts are asked at the first, then all at the next.
        max_tokens: longest answer.
        text: plain text learnt before the answers; None: none.
        count_text: whether the head's ids are counted in `text` instead of the target's answers.
        hard: weight of the answers' tokens, relative to the target's probabilities, 0 to 1.
        trained_ids: ids of the head while it learns; the head of the finished draft has its own size.
        batch_tokens: of a step, prompts and padding included.
        learning_rate: at its highest.
        seed: of answers and order.
        autocast: multiply in bfloat16 while training.
    """

    questions: Questions
    layers: int | None = None
    depth: int = 4
    minutes: float = 60.0
    steps: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 256
    text: Path | None = None
    count_text: bool = False
    hard: float = 0.0
    trained_ids: int = 16384
    batch_tokens: int = 1024
    learning_rate: float = 1e-3
    seed: int = 0
    autocast: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The plan in plain values, the questions and the text as digests."""
        plain = {**asdict(self), "questions": _digest(json.dumps(asdict(self.questions)).encode())}
        plain["text"] = None if self.text is None else _digest(self.text.read_bytes())
        return plain

    def seconds(self, share: float) -> float | None:
        """Time of a share of the budget; None: not limited by time."""
        return None if self.steps is not None else 60.0 * self.minutes * share

    def schedule(self, share: float, trial: bool = False) -> Schedule:
        """Of a stage: by steps, or by a share of the time.

        Args:
            share: of the budget.
            trial: whether a shape is only tried: then a tenth of the steps, where these are given.
        """
        common: dict[str, Any] = {
            "batch_size": 1,
            "learning_rate": self.learning_rate,
            "warmup_steps": 20,
            "clip": 1.0,
            "seed": self.seed,
        }
        if self.steps is not None:
            return Schedule(steps=max(1, self.steps // 10) if trial else self.steps, **common)
        return TimedSchedule(seconds=60.0 * self.minutes * share, **common)

    def sampling(self, temperature: float, max_tokens: int) -> SamplingParams:
        """How the target answers."""
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, logprobs=TOP)


def bundled_questions() -> Questions:
    """Return the bundled instructions, every eighth held out; a line break in one is written as backslash and n.

    They were written for this: questions, code, edits, summaries with a passage, a few languages and scripts.
    """
    lines = [line.replace("\\n", "\n") for line in BUNDLED.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [Prompt(line) for line in lines]
    return Questions([prompt for index, prompt in enumerate(prompts) if index % 8 != 7], prompts[7::8])


def text_rows(path: Path, tokenizer: TextTokenizer, field: str = "text") -> TargetAnswers:
    """Return a text file as rows that are learnt token by token: each row's first token is its prompt.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: it cannot be read, or is shorter than two tokens.
    """
    try:
        tokens = torch.tensor(tokenizer.encode(path.read_text(encoding="utf-8-sig")), dtype=torch.int64)
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(field, f"cannot read {path}: {error}") from None
    rows = [row for row in torch.split(tokens, TEXT_ROW) if len(row) > 1]
    if not rows:
        raise invalid(field, f"{path} must have at least two tokens")
    learnt = torch.cat([row[1:] for row in rows])
    return TargetAnswers(
        prompt_lengths=torch.ones(len(rows), dtype=torch.int64),
        lengths=torch.tensor([len(row) - 1 for row in rows]),
        prompts=torch.stack([row[0] for row in rows]),
        tokens=learnt,
        top_ids=learnt[:, None],
        top_logprobs=torch.zeros(len(learnt), 1),
        seconds=torch.zeros(0, dtype=torch.float64),
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def multiplies_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware, which makes training about twice as fast."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
