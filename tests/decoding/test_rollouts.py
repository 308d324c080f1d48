"""Looking ahead, whatever the method: what is left of it when its request is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.model import Request
from decoding.sequence import Sequence
from turnout.registry import get_method
from turnout.types import SamplingParams

TEXTS = ["<end>", "a", "b", " c", ".", "d;", "e"]
END, VOCAB = 0, 7
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("adadec", {"threshold": -1.0, "look_ahead": 3}),
    ("adadec", {"threshold": -1.0, "look_ahead": 3, "roller": "small"}),
    ("cntp", {"trials": 4, "high": 0.5}),
    ("look_back", {"alpha": 1000.0, "candidates": 3}),
    ("phi_decoding", {"beams": 2, "samples": 2, "separators": [";"]}),
    ("phi_decoding", {"beams": 2, "samples": 2, "separators": [";"], "roller": "small"}),
]


@pytest.mark.parametrize("at", [3, 9, 30])
@pytest.mark.parametrize(("method", "params"), METHODS)
async def test_a_cancelled_request_leaves_nothing_and_is_charged_what_it_took(
    method: str, params: dict[str, Any], at: int
) -> None:
    info = get_method(method)
    table = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(at))
    calls = 0

    def logits(tokens: list[int]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            running.cancel()
        return table[tokens[-1]]

    large, small = TableModel("large", logits, VOCAB), TableModel("small", logits, VOCAB)
    seq = Sequence([1, 2], SamplingParams(max_tokens=40, ignore_eos=True), 5, (END,))

    async def run() -> None:
        async for _ in info.run(Request("r", seq), pair(small, large, ListText(TEXTS)), info.parse(params)):
            pass

    running = asyncio.ensure_future(run())
    with pytest.raises(asyncio.CancelledError):
        await running
    for model in (large, small):
        assert list(model.cached) in ([], [seq])
        assert seq.meter.of(model.name, 1).forwards == model.forwards
    written = sum(meter.generated_tokens for meter in seq.meter.models.values())
    assert written == len(seq.generated)
