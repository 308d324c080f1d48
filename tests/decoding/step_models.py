"""Models that write steps in a small alphabet, and a tokenizer for it, for tests of methods that work step by step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.fakes import ListText, TableModel, pair
from decoding.model import ModelPool, Readout, ReadSpec, Request
from decoding.sequence import Sequence
from decoding.step_heads import StateHead
from decoding.thinking import Marker, Start, Thinking
from turnout.registry import get_method
from turnout.types import SamplingParams, Segment

ALPHABET = [*"0123456789", "\n", *"abcdefgh", "?", " ", "$"]
VOCAB = len(ALPHABET)
ID = {char: index for index, char in enumerate(ALPHABET)}
END = ID["$"]


class Characters(ListText):
    """One token a character."""

    def __init__(self) -> None:
        super().__init__(ALPHABET)

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [ID[char] for char in text]


def ids(text: str) -> list[int]:
    return [ID[char] for char in text]


def thinking(begin: str, end: str, start: Start) -> Thinking:
    """Thinking between two texts."""
    return Thinking(*(Marker(text, tuple(ids(text))) for text in (begin, end)), start=start)


def text(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


def scripted(name: str, script: Callable[[str], str], num_parameters: int = 1) -> TableModel:
    """Writes, almost surely, the character that a function of the whole text names."""

    def logits(tokens: list[int]) -> torch.Tensor:
        row = torch.zeros(VOCAB)
        row[ID[script(text(tokens))]] = 50.0
        return row

    return TableModel(name, logits, VOCAB, num_parameters)


def line(char: str, length: int = 3, same: bool = False) -> Callable[[str], str]:
    """Lines of one character, in whose middle stands the line's number unless all are to be the same.

    A line that somebody else has begun is gone on with; blanks and question marks before it do not count.
    """

    def next_char(written: str) -> str:
        begun = len(written.rpartition("\n")[2].lstrip("? "))
        if begun == length:
            return "\n"
        return str(written.count("\n")) if begun == 1 and not same else char

    return next_char


class LastTokenModel(TableModel):
    """A table model whose hidden state is the last token, one-hot."""

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        if want.hidden:
            for row, path in zip(rows, paths, strict=True):
                last = (seq.tokens + list(path))[-1]
                row.hidden = {-1: torch.eye(self.vocab_size)[last]}
        return rows


def with_head(
    models: ModelPool, kind: str, role: str, folder: Path, chances: list[float], unread: int = 0
) -> ModelPool:
    """The pool with an artifact whose head says, of a one-hot state, the probability at its place.

    `unread` is how many features after the state it leaves out of account.
    """
    head = StateHead(len(chances) + unread)
    head.last.weight.data = torch.cat([torch.tensor([chances]).logit(eps=1e-6), torch.zeros(1, unread)], 1)
    head.last.bias.data.zero_()
    artifact = Artifact(
        kind, "test", {"head": head.settings}, {role: models.by_role(role).digest}, dict(head.state_dict())
    )
    artifact.save(folder / f"{kind}.safetensors")
    return replace(models, artifacts=Artifacts(folder))


def pool(small: TableModel, large: TableModel) -> ModelPool:
    return pair(small, large, Characters())


async def answer(
    models: ModelPool, method: str, params: dict[str, Any], prompt: str | list[int] = "?", seed: int = 0, **options: Any
) -> tuple[Sequence, list[Segment], Request]:
    """One request, run to the end of its method."""
    eos, delivered = options.pop("eos", (END,)), tuple(options.pop("delivered", ()))
    found = options.pop("thinking", None)
    info = get_method(method)
    prompt = ids(prompt) if isinstance(prompt, str) else prompt
    seq = Sequence(prompt, SamplingParams(**{"max_tokens": 24, "temperature": 0.0, **options}), seed, eos)
    seq.thinking = found
    request = Request("r", seq, delivered=delivered)
    async with aclosing(info.run(request, models, info.parse(params))) as stream:
        segments = [segment async for segment in stream]
    assert [token.id for segment in segments for token in segment.tokens] == [token.id for token in seq.generated]
    return seq, segments, request


def owners(seq: Sequence) -> str:
    """One letter per line of the answer: the writer's first; every line has one writer."""
    found, line_writers = "", set()
    for token in seq.generated:
        line_writers.add(token.source[0])
        if ALPHABET[token.id] == "\n":
            assert len(line_writers) == 1
            found += line_writers.pop()
    return found
