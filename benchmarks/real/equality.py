"""Greedy float32 answers of the served model and of Hugging Face's `generate`, on fifty prompts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.harness import Report, note
from benchmarks.pieces import Section, Values
from benchmarks.strategies import at_once
from experiments import hf_model, real_model
from experiments.speculation.tasks import docstrings
from pool.local_pool import LocalPool
from training.data import real_text
from turnout.calls import ChatMessage, Chunk, GenerateCall
from turnout.types import SamplingParams

EQUALITY = "equality"
AT_ONCE = 16
TIE_NATS = 1e-4  # rounding of float32 moves log-probabilities by about a tenth of it
# How many prompts of each kind: fifty.
COUNTS = {"question": 12, "code": 12, "summary": 8, real_text.SCRIPTS: 10, "long": 8}
LONG_CHARACTERS = 6000  # about 1,500 tokens


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First token in which two answers differ.

    Attributes:
        prompt: its number within its kind.
        place: number of the token in the answer, from 0.
        tokens: `generate`'s and ours; the end token where the answer had ended.
        margin: nats between the two best tokens there, by an independent forward.
        behind: nats that the worse of the two tokens is behind the best one there.
    """

    kind: str
    prompt: int
    place: int
    tokens: tuple[int, int]
    margin: float
    behind: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone can decide between the two."""
        return self.behind < TIE_NATS


def prompts(kind: str) -> list[str]:
    """User messages of a kind."""
    if kind == "long":
        whole = "\n\n".join(docstrings())
        starts = range(0, COUNTS[kind] * LONG_CHARACTERS, LONG_CHARACTERS)
        texts = [whole[start : start + LONG_CHARACTERS] for start in starts]
        return [f"Summarise this documentation in three sentences:\n{text}" for text in texts]
    return list(real_text.prompts(kind)[: COUNTS[kind]])


def generated(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Answer of `generate`, without its end token."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return without_end(answer[0, len(prompt) :].tolist(), model.generation_config.eos_token_id)


def without_end(tokens: list[int], end: int) -> list[int]:
    """Tokens before the end token."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


async def served(pool: LocalPool, prompt: list[int], tokens: int) -> list[int]:
    """Greedy answer of the pool's model."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    call = GenerateCall("equality", pool.name, sampling, prompt=tuple(prompt), method="plain")
    return [token.id async for event in pool.generate(call) if isinstance(event, Chunk) for token in event.tokens]


def compare(
    model: Any, kind: str, number: int, prompt: list[int], pair: tuple[list[int], list[int]]
) -> Mismatch | None:
    """Where the answers of a pair differ, `generate`'s first; None: nowhere."""
    theirs, ours = pair
    if theirs == ours:
        return None
    end = model.generation_config.eos_token_id
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(map(len, pair)))
    with torch.inference_mode():
        scores = model(torch.tensor([prompt + theirs[:place]])).logits[0, -1].log_softmax(-1)
    best = scores.topk(2).values
    first, second = (answer[place] if place < len(answer) else end for answer in pair)
    behind = float(best[0] - min(scores[first], scores[second]))
    return Mismatch(kind, number, place, (first, second), float(best[0] - best[1]), behind)


async def measure(_: str, options: Namespace) -> Values:
    """Answers of both, kind by kind."""
    folder = real_model.model_folder()
    model = hf_model.load(str(folder), "float32")
    pool = LocalPool.load(real_model.POOL, real_model.alone("float32"))
    kinds: dict[str, dict[str, Any]] = {}
    try:
        for kind in COUNTS:
            note(f"equality: {kind}")
            texts = prompts(kind)[: options.each]
            asked = [pool.tokenizer.encode_chat([ChatMessage("user", text)]) for text in texts]
            ours = await at_once((served(pool, prompt, options.tokens) for prompt in asked), AT_ONCE)
            end = model.generation_config.eos_token_id
            found = [
                compare(model, kind, number, prompt, (generated(model, prompt, options.tokens), without_end(mine, end)))
                for number, (prompt, mine) in enumerate(zip(asked, ours, strict=True))
            ]
            wrong = [each for each in found if each is not None]
            kinds[kind] = {
                "prompts": len(asked),
                "longest": max(map(len, asked)),
                "equal": found.count(None),
                "near_ties": sum(each.is_near_tie for each in wrong),
                "mismatches": [asdict(each) for each in wrong],
            }
    finally:
        await pool.close()
    return {"kinds": kinds, "tokens": options.tokens}


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """Counts by kind, and every mismatch."""
    found = pieces[EQUALITY]
    report.text(
        f"Greedy, float32, at most {found['tokens']} tokens; Hugging Face `generate` one prompt at a time, the served"
        f" model {AT_ONCE} at once. A near tie: both tokens are within {TIE_NATS:g} nats of the best one, where"
        " rounding decides; anything else would be a fault."
    )
    columns = {
        "text": lambda row: row[0],
        "prompts": lambda row: row[1]["prompts"],
        "longest prompt, tokens": lambda row: row[1]["longest"],
        "equal": lambda row: row[1]["equal"],
        "near ties": lambda row: row[1]["near_ties"],
        "faults": lambda row: faults(row[1]),
    }
    report.table(None, list(found["kinds"].items()), columns)
    for each in (each for kind in found["kinds"].values() for each in kind["mismatches"]):
        report.text(
            f"- {each['kind']} {each['prompt']}, token {each['place']}: {each['tokens'][0]} and {each['tokens'][1]};"
            f" the two best are {each['margin']:.6f} nats apart, the worse of these {each['behind']:.6f} behind the"
            " best."
        )
    wrong = sum(map(faults, found["kinds"].values()))
    if wrong:
        report.failures.append(f"{wrong} answers differ from those of generate beyond a near tie")


def faults(kind: Values) -> int:
    """Answers of a kind that are neither equal nor differ by a near tie."""
    return int(kind["prompts"] - kind["equal"] - kind["near_ties"])


SECTION = Section(
    "Equal to Hugging Face",
    (EQUALITY,),
    measure,
    lambda options: {"tokens": options.tokens, "each": options.each},
    write,
)
