"""The law of answers drafted behind early exits, on the real engine: rejection keeps the target's own."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from decoding.artifacts import Artifacts
from decoding.exit_heads import ExitHead
from decoding.logits import process
from decoding.model import ModelPool, Request
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from tests.decoding.head_models import save_head
from tests.engine.harness import Reference, engine_model
from training.random_models import llama_config, random_model
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB, RUNS, AT_ONCE, PROMPT = 6, 12_000, 60, [2, 3]
TINY = llama_config(VOCAB, hidden_size=32, num_hidden_layers=4, pad_token_id=None, eos_token_id=None)
SAMPLING = SamplingParams(max_tokens=4, temperature=0.9, top_p=0.95, presence_penalty=0.3)


def law_of(plain: Reference) -> torch.Tensor:
    """Of the second and the third token together: float64 [vocab, vocab]."""

    def after(*tokens: int) -> torch.Tensor:
        raw = plain.logits([*PROMPT, *tokens])[-1:]
        return process(raw, [RowContext(Sequence(PROMPT, SAMPLING, 0), tokens)]).softmax(-1)[0].double()

    joint = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for one, p_one in enumerate(after()):
        for two, p_two in enumerate(after(one)):
            joint[two] += p_one * p_two * after(one, two)
    return joint


@pytest.mark.exactness
@pytest.mark.parametrize("drafter", ["kangaroo", "eesd", "del"])
async def test_rejection_keeps_the_law(tmp_path: Path, drafter: str) -> None:
    plain, taken = (random_model(deepcopy(TINY), 8, 0.25) for _ in range(2))
    model = engine_model(taken, block_size=4)
    for kind, inner in (("kangaroo", 0), ("eesd", 24)):
        torch.manual_seed(1)
        head = ExitHead(32, 4, 2, 8, inner)
        torch.nn.init.normal_(head.attended.weight, std=0.2)
        save_head(tmp_path, kind, head, model.digest, exit_layer=2)
    models = ModelPool({"m": model}, {"small": "m", "large": "m"}, None, Artifacts(tmp_path))  # type: ignore[arg-type]
    method = get_method("speculative")
    chosen: dict[str, Any] = {"drafter": drafter, "verifier": "rejection"}
    params = method.parse(chosen)
    drafted = accepted = 0
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)

    async def answer(seed: int) -> None:
        nonlocal drafted, accepted
        seq = Sequence(PROMPT, SAMPLING, seed)
        async for _ in method.run(Request(f"r{seed}", seq), models, params):
            pass
        model.release(seq)
        counts[seq.tokens[3], seq.tokens[4]] += 1
        drafted += seq.meter.speculation.draft_tokens
        accepted += seq.meter.speculation.accepted_tokens

    for start in range(0, RUNS, AT_ONCE):
        await asyncio.gather(*(answer(seed) for seed in range(start, start + AT_ONCE)))
    law = law_of(Reference(plain))
    possible = law * RUNS > 1e-6
    assert not counts[~possible].any()
    assert drafted > RUNS / 4
    assert 0 < accepted < drafted
    expected = law[possible] / law[possible].sum() * RUNS
    assert float(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue) > 1e-4
    await model.close()
