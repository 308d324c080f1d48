"""Combined rows over models that are functions: what fits, other vocabularies, faults of one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from decoding.contrast.base import Ask, RequestContrast, StreamPrompt, StreamRows
from decoding.contrast.cfg import Cfg
from decoding.contrast.contrastive import Contrastive
from decoding.contrasted_model import ContrastedModel, contrasted
from decoding.fakes import TableModel, pair
from decoding.model import Busy, Readout, ReadSpec, Request
from decoding.sequence import Sequence
from tests.decoding.head_models import StateModel
from turnout.registry import get_method
from turnout.types import SamplingParams

PROMPT = [0, 1, 2, 3]


def table(name: str, logits: list[float], max_length: int = 100) -> TableModel:
    return TableModel(name, lambda tokens: torch.tensor(logits), len(logits), max_length=max_length)


def sequence() -> Sequence:
    return Sequence(PROMPT, SamplingParams(max_tokens=6, temperature=0.0), seed=0)


def test_what_fits_is_what_fits_every_stream() -> None:
    small, large = table("small", [0.0] * 4, max_length=50), table("large", [0.0] * 4)
    negative = RequestContrast(Cfg(), {"negative": StreamPrompt(tuple(range(10)))})
    assert ContrastedModel(large, pair(small, large), negative, sequence()).max_length == 94
    short = RequestContrast(Cfg(), {"negative": StreamPrompt((0,))})
    assert ContrastedModel(large, pair(small, large), short, sequence()).max_length == 100
    assert ContrastedModel(large, pair(small, large), RequestContrast(Contrastive()), sequence()).max_length == 50


@pytest.mark.asyncio
@pytest.mark.parametrize("amateur", [[9.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0, 4.0]])
async def test_paddings_of_vocabularies_may_differ(amateur: list[float]) -> None:
    small, large = table("small", amateur), table("large", [2.0, 1.9, 0.0, -9.0])
    model = ContrastedModel(large, pair(small, large), RequestContrast(Contrastive()), sequence())
    [row] = await model.extend(sequence(), want=ReadSpec(logits=True))
    assert row.token == 1
    assert row.logits is not None
    assert row.logits.shape == (4,)


@pytest.mark.asyncio
async def test_a_stream_that_fails_ends_the_answer_and_leaves_nothing() -> None:
    def fails(tokens: list[int]) -> torch.Tensor:
        if len(tokens) > len(PROMPT) + 2:
            raise RuntimeError("the amateur has lost its weights")
        return torch.zeros(4)

    small, large = TableModel("small", fails, 4), table("large", [2.0, 1.9, 0.0, -9.0])
    request, plain = Request("r", sequence(), contrast=RequestContrast(Contrastive())), get_method("plain")
    with (
        pytest.raises(RuntimeError, match="lost its weights"),
        contrasted(request, pair(small, large), plain.parse({})) as models,
    ):
        async for _ in plain.run(request, models, plain.parse({})):
            pass
    assert len(request.sequence.answer) == 3
    large.release(request.sequence)
    assert small.busy().sequences == large.busy().sequences == 0
    assert request.stream_meter.models["small"].forwards == 4
    assert request.stream_meter.models["small"].prompt_tokens == len(PROMPT)


class Deciding(Cfg):
    """Asks which of two prompts its stream reads, and looks at the state of layer -1."""

    answers: list[str]

    async def decide(self, ask: Ask) -> Mapping[str, str]:
        self.answers = [*getattr(self, "answers", []), await ask("question", 2)]
        return {"negative": "other"}

    def reads(self) -> ReadSpec:
        return ReadSpec(draw=None, hidden=frozenset({-1}))

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        assert rows.hidden[-1].shape == (len(rows.contexts), 4)
        self.seen = [*getattr(self, "seen", []), *rows.hidden[-1].argmax(-1).tolist()]
        return super().combine(logits, rows)


class Counting(StateModel):
    """Token 1 after 0, ...; remembers the sequences that it was asked about."""

    def __init__(self) -> None:
        super().__init__("large", [1, 2, 3, 0])
        self.read_prompts: list[tuple[int, ...]] = []

    def _read(self, seq: Sequence, *args: Any) -> list[Readout]:
        self.read_prompts.append(tuple(seq.tokens[: seq.num_prompt_tokens]))
        return super()._read(seq, *args)


@pytest.mark.asyncio
async def test_what_is_decided_before_the_first_token() -> None:
    """Once a request, forks included, by the model that answers; streams read the prompt decided on."""
    model = Counting()
    prompts = {name: StreamPrompt(ids) for name, ids in (("negative", (3,)), ("question", (2, 2)), ("other", (1, 1)))}
    part, request = Deciding(), Request("r", sequence())
    request.contrast = RequestContrast(part, prompts)
    with contrasted(request, pair(model, model), get_method("plain").parse({})) as models:
        made = models.large
        assert isinstance(made, ContrastedModel)
        assert made.max_length == model.max_length
        twin = made.fork(request.sequence)
        await asyncio.gather(*(made.extend(each, want=ReadSpec(logits=True)) for each in (request.sequence, twin)))
        made.release(twin)
        made.release(request.sequence)
    assert part.answers == ["30"]
    assert part.seen == [0, 0]
    assert set(model.read_prompts) == {tuple(PROMPT), (2, 2), (1, 1)}
    meter = request.stream_meter.models["large"]
    assert (meter.generated_tokens, meter.prompt_tokens) == (0, 2 + 2 + 2)
    assert model.busy().sequences == 0


@pytest.mark.asyncio
async def test_streams_of_forks_are_forked_with_them() -> None:
    """Every hypothesis of a search feeds one token to each stream, and the prompts are fed once."""
    small, large = table("small", [0.0, 0.3, 0.1, 0.2]), table("large", [0.0, 0.1, 0.2, 0.1])
    request, info = Request("r", sequence(), contrast=RequestContrast(Contrastive())), get_method("search")
    params = info.parse({"width": 3})
    with contrasted(request, pair(small, large), params) as models:
        async for _ in info.run(request, models, params):
            pass
    large.release(request.sequence)
    assert small.fed_tokens == large.fed_tokens == len(PROMPT) + 3 * 5
    assert small.busy().sequences == large.busy().sequences == 0


def test_all_streams_share_the_memory_of_their_model() -> None:
    small, large = table("small", [0.0] * 4), table("large", [0.0] * 4)
    small.busy = lambda: Busy(0, 0, capacity=100, block_size=4)  # type: ignore[method-assign]
    large.busy = lambda: Busy(7, 0, capacity=300, block_size=4)  # type: ignore[method-assign]
    negative = RequestContrast(Cfg(), {"negative": StreamPrompt((0,))})
    assert ContrastedModel(large, pair(small, large), negative, sequence()).busy() == Busy(7, 0, 150, 4)
    assert ContrastedModel(large, pair(small, large), RequestContrast(Contrastive()), sequence()).busy().capacity == 100
