"""Every contrast: off it changes nothing, streams keep step, batches and drafts change nothing, nothing is left."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.contrast.base import Asked, Contrast, RequestContrast, Stream, StreamPrompt, StreamRows
from decoding.contrasted_model import LOGITS, contrasted
from decoding.logits import choice_scores
from decoding.model import ModelPool, Request
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from tests.conformance.parts import ALL_CONTRASTS, VOCAB, WIDTH, drafter_choice
from tests.conformance.test_identity import pool as pool
from tests.conformance.test_identity import prompts
from tests.conformance.test_structures import STRUCTURE, assert_fits
from tests.constrained import END, char_compiler
from turnout.part_choice import PartChoice
from turnout.registry import all_methods, get_method
from turnout.types import SamplingParams, Token

CONTRASTS: dict[str, type[Contrast]] = ALL_CONTRASTS
ASKED = Asked("Say it.\n>>> f(1)\n2\n", "A text that it is about.", "Be short.")
LONGEST = 12
ROWS = 6


def contrast_of(name: str, params: dict[str, Any] | None = None) -> RequestContrast:
    """As a request has it: its parameters are those with which it has something to do, its prompts random."""
    kind = CONTRASTS[name]
    part = kind(kind.Params.model_validate(kind.Params.example if params is None else params))
    draw = random.Random(name)
    made = {
        each: StreamPrompt(tuple(draw.randrange(2, VOCAB) for _ in range(5 + place)))
        for place, each in enumerate(part.prompts(ASKED))
    }
    return RequestContrast(part, made)


def sequence(place: int, **sampling: Any) -> Sequence:
    sampling = {"max_tokens": LONGEST, "temperature": 0.0} | sampling
    return Sequence(prompts(place + 1)[place], SamplingParams(**sampling), place, (END,))


async def written(
    pool: ModelPool,
    contrast: RequestContrast | None,
    seq: Sequence,
    method: str = "plain",
    params: dict[str, Any] | None = None,
) -> Request:
    info, request = get_method(method), Request("r", seq, contrast=contrast)
    parsed = info.parse(params or {})
    with contrasted(request, pool, parsed) as models:
        async for _ in info.run(request, models, parsed):
            pass
    for model in pool.models.values():
        model.release(seq)
    return request


async def answers(pool: ModelPool, contrast: RequestContrast | None, **sampling: Any) -> list[list[int]]:
    made = await asyncio.gather(*(written(pool, contrast, sequence(place, **sampling)) for place in range(2)))
    return [each.sequence.answer for each in made]


async def by_hand(pool: ModelPool, contrast: RequestContrast, seq: Sequence) -> torch.Tensor:
    """The combined row after a sequence, [1, vocab]: every stream is read alone and from its start."""
    rows, states = list[torch.Tensor](), dict[int, torch.Tensor]()
    for stream in (Stream(), *contrast.part.streams(pool, pool.large)):
        model = pool.by_role(stream.role) if stream.role else pool.large
        prompt = contrast.prompts[stream.prompt].tokens if stream.prompt else seq.tokens[: seq.num_prompt_tokens]
        alone = Sequence([*prompt, *seq.answer], SamplingParams(max_tokens=1), 0)
        layers = frozenset() if stream.layer is None else frozenset({stream.layer})
        wanted = contrast.part.reads().hidden if not rows else frozenset[int]()
        [row] = await model.extend(alone, want=replace(LOGITS, hidden=layers | wanted))
        states |= {layer: row.hidden[layer][None] for layer in wanted}
        for layer in layers:
            [row] = await model.read(alone, row.hidden[layer][None], [()], LOGITS, normed=True)
        model.release(alone)
        assert row.logits is not None
        rows.append(row.logits.float())
    return contrast.part.combine(torch.stack(rows)[None], StreamRows([RowContext(seq)], states))


def given(pool: ModelPool, name: str, params: dict[str, Any] | None) -> tuple[Contrast, torch.Tensor, StreamRows]:
    """A contrast that has seen the pool, logits of its streams, and the rows they are of."""
    part, draw = contrast_of(name, params).part, torch.Generator().manual_seed(3)
    streams = 1 + len(part.streams(pool, pool.large))
    logits = torch.randn((ROWS, streams, VOCAB), generator=draw) * 3
    seq = sequence(0)
    seq.append(Token(5, "m"))
    states = {layer: torch.randn((ROWS, WIDTH), generator=draw) for layer in part.reads().hidden}
    return part, logits, StreamRows([RowContext(seq, tuple(range(2, 2 + row))) for row in range(ROWS)], states)


def row_of(rows: StreamRows, place: int) -> StreamRows:
    return StreamRows(rows.contexts[place : place + 1], {k: each[place : place + 1] for k, each in rows.hidden.items()})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CONTRASTS)
async def test_off_is_plain_decoding(pool: ModelPool, name: str) -> None:
    off = dict(CONTRASTS[name].off)
    part, logits, rows = given(pool, name, off)
    made = part.combine(logits, rows)
    assert torch.allclose(made.softmax(-1), logits[:, 0].softmax(-1), atol=1e-6)
    plain = await answers(pool, None, temperature=0.9)
    assert await answers(pool, contrast_of(name, off), temperature=0.9) == plain
    assert await answers(pool, contrast_of(name), temperature=0.9) != plain
    request = await written(pool, contrast_of(name, off), sequence(0))
    assert not request.stream_meter.models


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CONTRASTS)
async def test_rows_are_what_they_are_alone(pool: ModelPool, name: str) -> None:
    part, logits, rows = given(pool, name, None)
    before = logits.clone()
    made = part.combine(logits, rows)
    assert torch.equal(logits, before)
    assert made.shape == (ROWS, VOCAB)
    assert made.isfinite().all()
    for place in range(ROWS):
        assert torch.equal(part.combine(logits[place : place + 1], row_of(rows, place))[0], made[place])
    others = [None, contrast_of(list(CONTRASTS)[list(CONTRASTS).index(name) - 1])]
    together = [answers(pool, each, temperature=0.9) for each in (contrast_of(name), *others)]
    assert await answers(pool, contrast_of(name), temperature=0.9) == (await asyncio.gather(*together))[0]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CONTRASTS)
async def test_streams_keep_step(pool: ModelPool, name: str) -> None:
    """Each token is what the combined logits say, of streams that are all read from their start."""
    contrast, seq = contrast_of(name), sequence(1)
    request = await written(pool, contrast, seq)
    again = sequence(1)
    for token in seq.answer:
        logits = await by_hand(pool, contrast, again)
        assert token == int(choice_scores(logits, [RowContext(again)]).argmax())
        again.append(Token(token, "large"))
    streams = {(stream.role, stream.prompt) for stream in contrast.part.streams(pool, pool.large)} - {("", "")}
    assert bool(request.stream_meter.models) == bool(streams)
    assert request.stream_meter.answer_tokens == 0
    read = sum(each.prompt_tokens for each in request.stream_meter.models.values())
    read += sum(each.cached_tokens for each in request.stream_meter.models.values())
    assert read >= sum(len(contrast.prompts[prompt].tokens) for _, prompt in streams if prompt)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CONTRASTS)
async def test_structures_and_processors_hold(pool: ModelPool, name: str) -> None:
    held = sequence(2, max_tokens=24, temperature=0.9)
    held.constraint = char_compiler().compile(STRUCTURE)
    once = sequence(2, max_tokens=24, ignore_eos=True, processors=(PartChoice.of("no_repeat_ngram", n=1),))
    await asyncio.gather(*(written(pool, contrast_of(name), each) for each in (held, once)))
    assert_fits(held)
    assert len(set(once.answer)) == 24


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CONTRASTS)
async def test_nothing_is_left_of_what_is_given_up(pool: ModelPool, name: str) -> None:
    plain = get_method("plain")
    for ends in ("closed", "cancelled"):
        request = Request("r", sequence(3, max_tokens=60, ignore_eos=True), contrast=contrast_of(name))
        begun = asyncio.Event()

        async def run(request: Request, begun: asyncio.Event, leaves: bool) -> None:
            params = plain.parse({})
            with contrasted(request, pool, params) as models:
                async with aclosing(plain.run(request, models, params)) as segments:  # type: ignore[type-var]
                    async for _ in segments:
                        begun.set()
                        if leaves:
                            return

        task = asyncio.create_task(run(request, begun, ends == "closed"))
        await begun.wait()
        if ends == "cancelled":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for model in pool.models.values():
            model.release(request.sequence)
            assert model.busy().sequences == 0


# Drafts in a row, in a tree, and with rows of the drafter's own.
DRAFTERS = ("model_chain", "model_tree", "lookahead")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CONTRASTS)
async def test_drafts_change_nothing(pool: ModelPool, name: str) -> None:
    """Speculation with the match verifier writes what plain decoding writes under the same contrast."""
    jobs: list[tuple[str, dict[str, Any]]] = [("plain", {})]
    jobs += [("speculative", {"drafter": drafter_choice(drafter), "length": "fixed"}) for drafter in DRAFTERS]
    greedy, drawn = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}
    made = await asyncio.gather(
        *(
            written(pool, contrast_of(name), sequence(place, **sampling), *job)
            for job in jobs
            for place, sampling in ((2, greedy), (3, drawn))
        )
    )
    texts = [each.sequence.answer for each in made]
    for drafter, first in zip(DRAFTERS, range(2, len(made), 2), strict=True):
        assert texts[first : first + 2] == texts[:2], drafter
    assert sum(each.sequence.meter.speculation.accepted_tokens for each in made) > 0
    assert all(model.busy().sequences == 0 for model in pool.models.values())


def test_methods_that_read_contrasts() -> None:
    assert {each.name for each in all_methods() if each.contrasts} == {"cntp", "plain", "search", "speculative"}
