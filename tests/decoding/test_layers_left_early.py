"""What leaving a model early is worth where layers know more or less of a text: chosen against swept, by rounds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from decoding.drafters.base import PACKAGE, DraftBudget
from decoding.exit_choice import ExitChoice
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import Readout, ReadSpec
from decoding.partial_forward import Sketch
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from tests.decoding.markov_rounds import now
from turnout.registry import load
from turnout.types import SamplingParams, Token, TokenKind

DelDrafter = load(PACKAGE, "del", "part").PART
LAYERS, MOST, TOKENS, VOCAB = 16, 12, 1_500, 8

# Chance that a layer says the whole model's token: one task is easy from layer 3 on, the other before layer 8 hopeless.
TASKS = {
    "easy": [0.0, 0.1, 0.1, *[0.85] * 13],
    "deep": [0.0, *[0.05] * 7, *[0.93] * 8],
}


class Layered:
    """A model that counts up; at every place its layers know that, or say one too much."""

    name, num_layers, vocab_size = "large", LAYERS, VOCAB

    def __init__(self, task: str) -> None:
        chance = random.Random(0)
        self.rates, self.luck = TASKS[task], [chance.random() for _ in range(TOKENS + 64)]

    def knows(self, layer: int, place: int) -> bool:
        return layer == LAYERS or self.luck[place] < self.rates[layer]

    def state(self, layer: int, place: int, token: int) -> torch.Tensor:
        return torch.eye(VOCAB)[(token + (1 if self.knows(layer, place) else 2)) % VOCAB]

    def row(self, states: dict[int, torch.Tensor], last: int) -> Readout:
        said = int(states[last].argmax())
        return Readout(token=said, top=((said, math.log(0.9)),), hidden=states)

    async def partial_forward(self, seq: Sequence, sketch: Sketch, want: ReadSpec) -> list[Readout]:
        last = sketch.depth.last
        assert last is not None
        places = range(sketch.start, len(sketch.tokens))
        return [self.at(len(seq) - 1 + place, sketch.tokens[place], range(1, last + 1)) for place in places]

    async def read(
        self, seq: Sequence, states: torch.Tensor, paths: list[tuple[int, ...]], want: ReadSpec, normed: bool = False
    ) -> list[Readout]:
        return [self.row({0: state}, 0) for state in states]

    def at(self, place: int, token: int, layers: range) -> Readout:
        return self.row({layer: self.state(layer, place, token) for layer in layers}, layers[-1])

    def verified(self, seq: Sequence, draft: DraftTree) -> VerifyResult:
        base, emitted = len(seq) - 1, list[Token]()
        fed = (seq.tokens[-1], *draft.tokens)
        rows = [self.at(base + place, token, range(1, LAYERS + 1)) for place, token in enumerate(fed)]
        for token in draft.tokens:
            if rows[len(emitted)].token != token:
                break
            emitted.append(Token(token, "large", TokenKind.ACCEPTED))
        kind = TokenKind.BONUS if len(emitted) == len(draft) else TokenKind.RECOVERED
        path = tuple(range(len(emitted)))
        return VerifyResult(path, (*emitted, Token(rows[len(emitted)].token, "large", kind)), rows)


def chosen(task: str) -> tuple[float, list[int]]:
    """Tokens for each layer run, and the layer of every draft, where the drafter chooses both."""
    model: Any = Layered(task)
    drafter = DelDrafter(DelDrafter.Params(stops=False))
    drafter.choice = ExitChoice(LAYERS, 0.95)
    seq = Sequence([0, 1], SamplingParams(max_tokens=TOKENS + 64, temperature=0.0), 0)
    length, layers, ran = FixedLength(FixedParams(most=MOST)), [], 0
    while len(seq.generated) < TOKENS:
        draft = now(drafter.propose(model, seq, DraftBudget(MOST, MOST), length))
        layer = round(drafter.share * LAYERS)
        ran += len(draft) * layer + LAYERS
        layers += [layer] * (len(draft) > 0)
        verdict = model.verified(seq, draft)
        seq.extend(verdict.tokens, {"large": 1})
        drafter.observe(model, seq, draft, verdict)
    return len(seq.generated) / ran, layers


def fixed(task: str, layer: int, depth: int) -> float:
    """Tokens for each layer run where every round leaves at this layer and drafts so far."""
    model, place, rounds = Layered(task), 1, 0
    while place <= TOKENS:
        accepted = next((n for n in range(depth) if not model.knows(layer, place + n)), depth)
        place, rounds = place + accepted + 1, rounds + 1
    return (place - 1) / (rounds * (depth * layer + LAYERS))


@pytest.mark.parametrize(("task", "layer"), [("easy", 3), ("deep", 8)])
def test_the_layer_follows_the_task_and_pays_like_the_best_static_choice(task: str, layer: int) -> None:
    speed, layers = chosen(task)
    swept = {(e, d): fixed(task, e, d) for e in range(1, LAYERS) for d in range(MOST + 1)}
    best = max(swept, key=swept.__getitem__)
    assert best[0] == layer
    assert speed > 0.95 * swept[best]
    assert speed > 1.1 * max(worth for (_, depth), worth in swept.items() if depth == 0)
    assert layers.count(layer) > 0.8 * len(layers)
    # The other task's layer would not do.
    other = {"easy": 8, "deep": 3}[task]
    assert speed > 1.15 * max(worth for (at, _), worth in swept.items() if at == other)
