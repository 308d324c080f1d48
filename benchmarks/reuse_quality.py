"""Difference between answers over KV that was moved and over KV that was computed: on held-out Python, in nats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence as TokenSequence
from engine.device import Device
from engine.loading import load_checkpoint
from engine.model import EngineModel
from engine.reuse.edits import Edit
from engine.reuse.forward import ReusingRunner
from engine.reuse.rotation import Rotation
from engine.reuse.settings import MOVED_ONLY, ReuseSettings
from experiments.pairs import Pair
from pool.text import TextTokenizer
from training.data.python_sources import read_sources
from turnout.config import EngineConfig
from turnout.types import SamplingParams, Sharing, Token

PIECE = 96  # tokens of a piece that prompts share
FRESH = 24  # tokens of a prompt's own, before the pieces and after them
SCORED = 24  # tokens of the continuation that is read
EDIT = 10  # tokens an edit replaces, by 4 more

READERS, OTHERS = Sharing.private("readers"), Sharing.private("others")
LOGITS = ReadSpec(draw=None, logits=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt made of pieces of others.

    Attributes:
        sources: prompts seen before, which hold its pieces in another order, after other text.
        prompt: own tokens, the pieces, own tokens.
        continuation: what comes next in the last piece's text.
    """

    sources: tuple[list[int], ...]
    prompt: list[int]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """Over all rows of all cases.

    Attributes:
        nats: KL of the answers from those over computed KV, mean over rows.
        agreement: share of rows with the same most probable token.
        computed: share of the prompts' tokens that went through the layers.
        corrected: tokens computed again while decoding, for each token decoded.
    """

    nats: float
    agreement: float
    computed: float
    corrected: float = 0.0


def large_model(device: Device, pair: Pair) -> tuple[EngineModel, TextTokenizer]:
    """The large model of a pair in float32, and its tokenizer."""
    path, settings = pair.folder("large"), pair.model("large").model_copy(update={"dtype": "float32"})
    checkpoint = load_checkpoint(path, torch.float32, device.torch_device)
    return EngineModel("large", checkpoint, settings, EngineConfig(), device), TextTokenizer(path)


def build_cases(tokenizer: TextTokenizer, count: int, seed: int = 0) -> list[Case]:
    """Prompts of three pieces of three texts."""
    rng = random.Random(seed)
    needed = PIECE + FRESH + SCORED
    texts = [ids for text in read_sources(heldout=True) if len(ids := tokenizer.encode(text[:4000])) > 2 * needed]

    def piece(length: int) -> list[int]:
        ids = rng.choice(texts)
        start = rng.randrange(len(ids) - length)
        return ids[start : start + length]

    cases = []
    for _ in range(count):
        first, second, third = piece(PIECE), piece(PIECE), piece(needed)
        last, rest = third[:PIECE], third[PIECE:]
        sources = ([*piece(41), *last, *first, *piece(20)], [*piece(67), *second, *piece(20)])
        prompt = [*piece(FRESH), *first, *second, *last, *rest[:FRESH]]
        cases.append(Case(sources, prompt, tuple(rest[FRESH:])))
    return cases


def sequence(tokens: Sequence[int], sharing: Sharing, lossy: bool = False) -> TokenSequence:
    """One that only reads."""
    return TokenSequence(tokens, SamplingParams(temperature=0.0, max_tokens=512), 0, sharing=sharing, lossy=lossy)


async def read(model: EngineModel, seq: TokenSequence, continuation: tuple[int, ...]) -> torch.Tensor:
    """Logits [1 + n, vocab] after the prompt and after each token of a continuation, all in one forward."""
    rows = await model.extend(seq, continuation, LOGITS, every=True)
    return torch.stack([row.logits for row in rows if row.logits is not None]).float().cpu()


async def decode(model: EngineModel, seq: TokenSequence, continuation: tuple[int, ...]) -> torch.Tensor:
    """The same, one token after the other, as if they were being generated."""
    rows = [(await model.extend(seq, want=LOGITS))[0].logits]
    for token in continuation:
        seq.append(Token(token, model.name))
        rows.append((await model.extend(seq, want=LOGITS))[0].logits)
    return torch.stack([row for row in rows if row is not None]).float().cpu()


async def computed_exactly(model: EngineModel, cases: list[Case]) -> list[torch.Tensor]:
    """What a full prefill says."""
    answers = []
    for case in cases:
        seq = sequence(case.prompt, OTHERS)
        answers.append(await read(model, seq, case.continuation))
        model.release(seq)
    return answers


async def reuse_quality(
    model: EngineModel, cases: list[Case], exact: list[torch.Tensor], settings: ReuseSettings, decoding: bool = False
) -> Quality:
    """Answer with spans taken over.

    Args:
        model: idle.
        cases: what to answer.
        exact: `computed_exactly`.
        settings: of the reuse.
        decoding: read token after token, so that decoding corrects.
    """
    model.reuse(settings)
    model.pool.clear_cached()  # a lossy sequence finds what another one like it took over
    answers, spared, corrected = [], 0.0, 0
    for case in cases:
        for source in case.sources:
            seen = sequence(source, READERS)
            await model.extend(seen)
            model.release(seen)
        seq = sequence(case.prompt, READERS, lossy=True)
        answers.append(await (decode if decoding else read)(model, seq, case.continuation))
        reused = model.batcher.tables[seq].reused
        if reused is not None:
            corrected += reused.counts.corrected
        spared += seq.meter.models[model.name].spared_tokens
        model.release(seq)
    fed = sum(len(case.prompt) for case in cases)
    steps = sum(len(case.continuation) for case in cases)
    return _compare(exact, answers, 1 - (spared + corrected) / fed, corrected / steps)


async def edit_quality(model: EngineModel, cases: list[Case], turned: bool = True) -> Quality:
    """Answer after an edit of each cached prompt, a third into it: ten tokens become fourteen.

    Args:
        model: idle.
        cases: their prompts are edited.
        turned: move keys to their new positions; False is the control, in which positions conflict.
    """
    model.reuse(MOVED_ONLY)
    runner = model.batcher.runner
    if not turned and isinstance(runner, ReusingRunner):
        runner.rotation = Rotation([torch.zeros(1, dtype=torch.float64)] * model.num_layers)
    model.pool.clear_cached()
    exact, answers = [], []
    fed, rows = 0, 0
    for case in cases:
        seq = sequence(case.prompt, READERS)
        await model.extend(seq)
        place = len(case.prompt) // 3
        twin = model.edit(seq, [Edit(place, place + EDIT, _others(case, place))])
        answers.append(await read(model, twin, case.continuation))
        reused = model.batcher.tables[twin].reused
        rows += reused.counts.rows - len(case.continuation) if reused is not None else len(twin)
        fed += len(twin)
        model.release(seq)
        model.release(twin)
        exact += await computed_exactly(model, [Case((), twin.tokens, case.continuation)])
    return _compare(exact, answers, rows / fed)


def _others(case: Case, place: int) -> tuple[int, ...]:
    """Tokens from elsewhere in the same prompt."""
    return tuple(case.prompt[place + 2 * EDIT : place + 3 * EDIT + 4])


def _compare(exact: list[torch.Tensor], answers: list[torch.Tensor], computed: float, corrected: float = 0) -> Quality:
    expected, got = torch.cat(exact), torch.cat(answers)
    log_p, log_q = expected.log_softmax(-1), got.log_softmax(-1)
    nats = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    agreement = (expected.argmax(-1) == got.argmax(-1)).float().mean()
    return Quality(float(nats), float(agreement), computed, corrected)
