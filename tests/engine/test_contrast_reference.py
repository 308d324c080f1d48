"""Contrasts on the engine against transformers, token by token."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from decoding.contrast.base import Contrast, RequestContrast, StreamPrompt
from decoding.contrast.cfg import Cfg
from decoding.contrast.dola import Dola
from decoding.contrasted_model import contrasted
from decoding.fakes import pair
from decoding.model import Request
from decoding.sequence import Sequence
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from tests.conformance.parts import VOCAB
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.registry import get_method
from turnout.types import SamplingParams

PROMPT, NEGATIVE = [5, 9, 7, 30, 12, 5], [8, 8, 21, 3]
TOKENS = 16


def made() -> Any:
    config = llama_config(VOCAB, hidden_size=32, num_hidden_layers=5, pad_token_id=0, eos_token_id=1)
    return random_model(deepcopy(config), 4, spread=0.3)


async def engine_tokens(part: Contrast) -> list[int]:
    engine = EngineConfig(block_size=8, max_batch=8)
    settings = ModelConfig(path="-", kv_memory_bytes=4 << 20)
    model = EngineModel("large", prepare(made(), "auto"), settings, engine, Device("cpu"))
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    contrast = RequestContrast(part, {"negative": StreamPrompt(tuple(NEGATIVE))})
    request, plain = Request("r", Sequence(PROMPT, sampling, seed=0), contrast=contrast), get_method("plain")
    try:
        with contrasted(request, pair(model, model), plain.parse({})) as models:
            async for _ in plain.run(request, models, plain.parse({})):
                pass
        model.release(request.sequence)
    finally:
        await model.close()
    return request.sequence.answer


@torch.inference_mode()
def guided(scale: float) -> list[int]:
    reference, tokens = made(), torch.tensor([PROMPT])
    guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(scale, reference, torch.tensor([NEGATIVE]))
    for _ in range(TOKENS):
        scores = guide(tokens, reference(tokens).logits[:, -1])
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], -1)
    answer: list[int] = tokens[0, len(PROMPT) :].tolist()
    return answer


@pytest.mark.asyncio
@pytest.mark.parametrize("scale", [0.0, 1.7, 3.0])
async def test_classifier_free_guidance(scale: float) -> None:
    assert await engine_tokens(Cfg(Cfg.Params(scale=scale))) == guided(scale)


@torch.inference_mode()
def by_definition() -> tuple[list[int], set[int]]:
    """Early laws through the head alone, the layer that is farthest, tokens near the best; and the layers chosen."""
    reference, tokens, chosen = made(), torch.tensor([PROMPT]), set()
    for _ in range(TOKENS):
        out = reference(tokens, output_hidden_states=True)
        last = out.logits[0, -1].log_softmax(-1)
        early = [reference.lm_head(out.hidden_states[layer][0, -1]).log_softmax(-1) for layer in (1, 2, 3)]
        apart = []
        for law in early:
            mean = (last.exp() + law.exp()) / 2
            apart.append(float(sum(torch.nn.functional.kl_div(each, mean, reduction="sum") for each in (last, law))))
        layer = max(range(3), key=apart.__getitem__)
        chosen.add(layer)
        near = last >= last.max() + torch.tensor(0.1).log()
        best = (last - early[layer]).masked_fill(~near, float("-inf")).argmax()
        tokens = torch.cat([tokens, best.view(1, 1)], -1)
    return tokens[0, len(PROMPT) :].tolist(), chosen


@pytest.mark.asyncio
async def test_dola() -> None:
    answer, chosen = by_definition()
    assert len(chosen) > 1
    assert await engine_tokens(Dola(Dola.Params(layers=(1, 2, 3)))) == answer
