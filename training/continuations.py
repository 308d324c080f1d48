"""Training of what tells good continuations of a passage from others: rankers, and coefficients of metrics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch.nn.functional import cross_entropy

from decoding.aggregators._embeddings import mean_states
from decoding.aggregators.daemon import measured
from decoding.aggregators.uni_encoder import pooled_states
from decoding.artifacts import Artifact
from decoding.length_heads import Head
from decoding.metric_matching import Metric, fit_coefficients, tilt
from decoding.model import Model, ModelPool
from decoding.noise import derive_seed
from decoding.pair_heads import PairHead
from decoding.recorder import watched
from decoding.sequence import Sequence
from decoding.step_heads import StateHead
from training.fitting import Schedule, fit
from turnout.errors import invalid
from turnout.types import SamplingParams

AT_ONCE = 16
STEADY = Schedule(batch_size=64, learning_rate=3e-3, warmup_steps=0, clip=None)
Advance = Callable[[str, int, int], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """Passage of a text, cut up: tokens of each part, all of one length.

    Attributes:
        prefix: what is continued.
        continuation: how the text continues.
        elsewhere: another part of the same text.
    """

    prefix: tuple[int, ...]
    continuation: tuple[int, ...]
    elsewhere: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """An artifact, and what was measured of it on passages it has not seen."""

    artifact: Artifact
    report: dict[str, Any]


def cut(texts: Iterable[Items[int]], size: int, seed: int) -> list[Passage]:
    """Cut a passage out of each text that is long enough; the part elsewhere stands before or after the other two.

    Raises:
        TurnoutError: INVALID_ARGUMENT: fewer than 16 texts have three times `size` tokens.
    """
    rng, made = random.Random(f"passages-{seed}"), []
    for text in texts:
        spare = len(text) - 3 * size
        if spare < 0:
            continue
        start = rng.randint(0, spare)
        parts = [tuple(text[start + place * size : start + (place + 1) * size]) for place in range(3)]
        if rng.random() < 0.5:
            parts = [*parts[1:], parts[0]]
        made.append(Passage(*parts))
    if len(made) < 16:
        raise invalid("passages", f"{len(made)} texts have {3 * size} tokens; at least 16 must")
    return made


async def train_rank_gen(
    models: ModelPool,
    role: str,
    passages: list[Passage],
    size: int = 64,
    epochs: int = 40,
    schedule: Schedule = STEADY,
    advance: Advance = lambda *_: None,
) -> Made:
    """Fit the maps of `rank_gen` (paper #180, RankGen): contrastive, with both kinds of negatives.

    Negatives of a prefix are the continuations of the others in its batch, the other parts of all their texts, its own
    included, and the continuations that the model itself writes. Three quarters of the passages train.

    Args:
        models: frozen.
        role: whose states are read, and who writes negatives.
        passages: at least 16.
        size: of the vectors.
        epochs: passes over the passages.
        schedule: of the steps, whose number follows.
        advance: called with progress.
    """
    model, seq = models.by_role(role), _account(passages)
    generated = await _generate(model, passages, schedule.seed, advance)
    parts = {
        "prefix": [each.prefix for each in passages],
        "continuation": [each.continuation for each in passages],
        "elsewhere": [each.elsewhere for each in passages],
        "generated": generated,
    }
    states = {}
    for place, (name, texts) in enumerate(parts.items()):
        states[name] = torch.cat([await mean_states(model, seq, group) for group in _groups(texts)])
        advance("reading", place + 1, len(parts))
    count = 3 * len(passages) // 4
    torch.manual_seed(schedule.seed)
    head = PairHead(states["prefix"].shape[1], size)
    head.standardise(torch.cat([each[:count] for each in states.values()]))

    def scores(at: torch.Tensor) -> torch.Tensor:
        right = torch.cat([states[name][at] for name in ("continuation", "elsewhere", "generated")])
        made: torch.Tensor = head(states["prefix"][at], right)
        return made

    def loss(picked: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores(picked), torch.arange(len(picked)))

    losses = _fit(head, loss, count, epochs, schedule, advance)
    with torch.inference_mode():
        report = {"losses": losses, "heldout": _ranked(scores(torch.arange(count, len(passages))))}
    return Made(_artifact("rank_gen", role, model, _about(head, schedule, epochs, size=size), head, report), report)


def _ranked(scores: torch.Tensor) -> dict[str, float]:
    """How often the true continuation is above each kind of negative: scores [n, 3 n], as `train_rank_gen` has them."""
    count = len(scores)
    own, elsewhere, generated = (scores[:, start * count : (start + 1) * count] for start in range(3))
    true = own.diagonal()
    return {
        "passages": count,
        "above_elsewhere": float((true > elsewhere.diagonal()).float().mean()),
        "above_generated": float((true > generated.diagonal()).float().mean()),
        "first_of_continuations": float((own.argmax(1) == torch.arange(count)).float().mean()),
    }


async def train_uni_encoder(
    models: ModelPool,
    role: str,
    passages: list[Passage],
    candidates: int = 8,
    hidden: int = 0,
    epochs: int = 40,
    schedule: Schedule = STEADY,
    advance: Advance = lambda *_: None,
) -> Made:
    """Fit the head of `uni_encoder` (paper #160): the true continuation among those of other passages.

    Args:
        models: frozen.
        role: whose states are read.
        passages: at least 16.
        candidates: continuations of each prefix, the true one included; all are read in one forward if they fit.
        hidden: width of the head's hidden layer; 0: it is linear.
        epochs: passes over the passages.
        schedule: of the steps, whose number follows.
        advance: called with progress.
    """
    model, rng = models.by_role(role), random.Random(f"uni-encoder-{schedule.seed}")
    candidates = min(candidates, len(passages))

    async def read(place: int) -> torch.Tensor:
        others = rng.sample([each for each in range(len(passages)) if each != place], candidates - 1)
        seq = Sequence(passages[place].prefix, SamplingParams(max_tokens=1), 0)
        try:
            return await pooled_states(model, seq, [passages[each].continuation for each in (place, *others)])
        finally:
            model.release(seq)

    states = torch.stack(await _in_turns(range(len(passages)), read, "reading", advance))
    count = 3 * len(passages) // 4
    torch.manual_seed(schedule.seed)
    head = StateHead(states.shape[-1], hidden)
    head.standardise(states[:count].flatten(0, 1))

    def loss(picked: torch.Tensor) -> torch.Tensor:
        return cross_entropy(head(states[picked]), torch.zeros(len(picked), dtype=torch.int64))

    losses = _fit(head, loss, count, epochs, schedule, advance)
    with torch.inference_mode():
        first = (head(states[count:]).argmax(1) == 0).float().mean()
    heldout = {"passages": len(passages) - count, "candidates": candidates, "first": float(first)}
    report = {"losses": losses, "heldout": heldout}
    return Made(_artifact("uni_encoder", role, model, _about(head, schedule, epochs), head, report), report)


async def solve_daemon(
    models: ModelPool,
    role: str,
    passages: list[Passage],
    metrics: list[Metric],
    samples: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    advance: Advance = lambda *_: None,
) -> Made:
    """Solve for the coefficients of `daemon` (paper #25): mean metrics of the model become those of the passages.

    Args:
        models: frozen.
        role: who writes.
        passages: at least 16; three quarters are solved on, of the others the report says what comes out.
        metrics: at least one.
        samples: continuations of each prefix.
        temperature: they are drawn at.
        seed: of these.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the metrics of the passages are out of reach of the samples.
    """
    model = models.by_role(role)

    async def read(place: int) -> tuple[torch.Tensor, torch.Tensor]:
        passage, size = passages[place], len(passages[place].continuation)
        sampling = SamplingParams(max_tokens=size, temperature=temperature)
        seq = Sequence(passage.prefix, sampling, derive_seed(seed, place))
        forks = [model.fork(seq, derive_seed(seq.seed, index)) for index in range(samples)]
        try:
            await asyncio.gather(*(model.decode(fork, watched()) for fork in forks))
            [score] = await model.score(seq, [passage.continuation])
            answers = [tuple(fork.answer) for fork in forks]
            logprobs = [tuple(token.logprob or 0.0 for token in fork.generated) for fork in forks]
            true = await measured(model, seq, [passage.continuation], [score.token_logprobs], metrics)
            return await measured(model, seq, answers, logprobs, metrics), true
        finally:
            for fork in (*forks, seq):
                model.release(fork)

    found = await _in_turns(range(len(passages)), read, "writing", advance)
    count = 3 * len(passages) // 4
    drawn, held = (torch.cat([each for each, _ in part]) for part in (found[:count], found[count:]))
    targets = torch.cat([each for _, each in found[:count]]).mean(0)
    try:
        coefficients = fit_coefficients(drawn, targets)
    except ValueError as error:
        raise invalid("metrics", f"cannot be met by reweighting {metrics}: {error}") from None
    means = {"wanted": targets, "model": held.mean(0), "weighted": tilt(held, coefficients) @ held}
    report = {
        "heldout": {name: dict(zip(metrics, each.tolist(), strict=True)) for name, each in means.items()},
        "coefficients": dict(zip(metrics, coefficients.tolist(), strict=True)),
    }
    settings: dict[str, Any] = {"metrics": metrics, "coefficients": coefficients.tolist(), "targets": targets.tolist()}
    settings |= {"samples": samples, "temperature": temperature, "seed": seed}
    return Made(_artifact("daemon", role, model, settings, None, report), report)


async def _generate(model: Model, passages: list[Passage], seed: int, advance: Advance) -> list[tuple[int, ...]]:
    """The model's own continuation of each prefix, as long as the true one."""

    async def write(place: int) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=len(passages[place].continuation), temperature=1.0)
        seq = Sequence(passages[place].prefix, sampling, derive_seed(seed, place))
        try:
            await model.decode(seq)
            return tuple(seq.answer)
        finally:
            model.release(seq)

    return await _in_turns(range(len(passages)), write, "writing", advance)


async def _in_turns(places: range, work: Callable[[int], Awaitable[T]], what: str, advance: Advance) -> list[T]:
    found: list[T] = []
    for group in _groups(list(places)):
        found += await asyncio.gather(*map(work, group))
        advance(what, len(found), len(places))
    return found


def _groups(items: Items[T]) -> list[Items[T]]:
    return [items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE)]


def _account(passages: list[Passage]) -> Sequence:
    """A sequence that the work of reading is counted for."""
    return Sequence(passages[0].prefix, SamplingParams(max_tokens=1), 0)


def _fit(
    head: torch.nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    count: int,
    epochs: int,
    schedule: Schedule,
    advance: Advance,
) -> list[float]:
    steps = epochs * max(1, count // min(schedule.batch_size, count))
    made = replace(schedule, steps=steps)
    losses = fit(
        head, loss, count, made, on_step=lambda step, value: advance(f"fitting, loss {value:.4f}", step, steps)
    )
    head.requires_grad_(False).eval()
    return losses


def _about(head: Head, schedule: Schedule, epochs: int, **others: Any) -> dict[str, Any]:
    return {"head": head.settings, "schedule": {**asdict(schedule), "epochs": epochs}, **others}


def _artifact(
    kind: str, role: str, model: Model, settings: dict[str, Any], head: torch.nn.Module | None, report: dict[str, Any]
) -> Artifact:
    about = {**settings, "heldout": report["heldout"]}
    tensors = dict(head.state_dict()) if head is not None else {"none": torch.zeros(1)}
    return Artifact(kind, "training.continuations", about, {role: model.digest}, tensors)
