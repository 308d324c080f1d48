"""The training stream: step number in, packed batch out, so that resuming needs nothing but the number."""

import random

from transformers import PreTrainedTokenizerFast

from training.data import arithmetic, edits, lists, passages, templates, worksheets
from training.data.problem import Problem
from training.data.python_sources import read_sources
from training.packing import Batch, Document, fits, pack
from training.recipe import Recipe
from training.tokenizer import ASSISTANT, END, PAD, SYSTEM, USER

_SYSTEM_PROMPTS = (
    "You are a careful calculator.",
    "You are a helpful assistant.",
    "Show every step, then give the answer.",
    "Answer step by step.",
)
_MAX_MISFITS = 8


_KINDS = {"edits": edits, "lists": lists, "passages": passages, "templates": templates, "worksheets": worksheets}
EASY_GRADES = (0.40, 0.30, 0.20, 0.07, 0.03)
FINAL_GRADES = (0.08, 0.17, 0.42, 0.20, 0.13)


def grade_weights(step: int, curriculum_steps: int) -> list[float]:
    """Chance of each arithmetic grade at a step: from EASY_GRADES in a straight line to FINAL_GRADES."""
    part = min(1.0, step / curriculum_steps) if curriculum_steps else 1.0
    return [easy + (final - easy) * part for easy, final in zip(EASY_GRADES, FINAL_GRADES, strict=True)]


class TrainingStream:
    """Batches by step number; the same recipe, tokenizer and interpreter give the same batches."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._shares = recipe.shares
        self._python = [self._encode(text + END) for text in read_sources()] if self._shares.python > 0 else []
        self._python_ends: list[int] = []
        total = 0
        for ids in self._python:
            total += len(ids)
            self._python_ends.append(total)

    def batch(self, step: int) -> Batch:
        """The packed rows of one optimiser step."""
        rng = random.Random(f"{self._recipe.seed}-step-{step}")
        num_rows, row_len = self._recipe.num_rows, self._recipe.row_len
        num_python = sum(rng.random() < self._shares.python for _ in range(num_rows))
        rows = [[self._python_document(rng, row_len)] for _ in range(num_python)]
        rows += self._chat_rows(rng, num_rows - num_python, grade_weights(step, self._recipe.curriculum_steps))
        return pack(rows, row_len, pad_id=int(self._tokenizer.convert_tokens_to_ids(PAD)))

    def _chat_rows(self, rng: random.Random, num_rows: int, weights: list[float]) -> list[list[Document]]:
        rows: list[list[Document]] = [[] for _ in range(num_rows)]
        shares = dict(self._shares.chats)
        num_tokens = dict.fromkeys(shares, 0)
        misfits = 0
        while misfits < _MAX_MISFITS and num_rows:
            kind = min(shares, key=lambda kind: num_tokens[kind] / shares[kind])  # the one that is furthest behind
            document = self._chat_document(rng, kind, weights)
            home = next((row for row in rows if fits(row, document, self._recipe.row_len)), None)
            if home is None:
                misfits += 1
                continue
            home.append(document)
            num_tokens[kind] += len(document.token_ids)
        return rows

    def _chat_document(self, rng: random.Random, kind: str, weights: list[float]) -> Document:
        def draw() -> Problem:
            if kind == "arithmetic":
                return arithmetic.draw_training(rng, rng.choices(arithmetic.DIFFICULTIES, weights)[0])
            source = _KINDS[kind]
            drawn: Problem = source.draw_training(rng, rng.choice(source.DIFFICULTIES))
            return drawn

        token_ids: list[int] = []
        if rng.random() < self._shares.system_message:
            token_ids += self._encode(SYSTEM + rng.choice(_SYSTEM_PROMPTS))
        learned = [False] * len(token_ids)
        for _ in range(2 if rng.random() < self._shares.second_turn else 1):
            problem = draw()
            question = self._encode(f"{USER}{problem.prompt}{ASSISTANT}")
            answer = self._encode(problem.answer + END)
            token_ids += question + answer
            learned += [False] * len(question) + [True] * len(answer)
        return Document(token_ids, learned)

    def _python_document(self, rng: random.Random, row_len: int) -> Document:
        offset = rng.randrange(self._python_ends[-1])
        which = next(index for index, end in enumerate(self._python_ends) if offset < end)
        ids = self._python[which]
        start = max(0, min(offset - self._python_ends[which] + len(ids), len(ids) - row_len))
        chunk = ids[start : start + row_len]
        return Document(chunk, [True] * len(chunk))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
