"""A draft model that spans processes: its grouped layers add up once for a group, and draft what the whole one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.easyspec import EasySpecDrafter, EasySpecParams, grouped
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.parallel.sharding import SummedLinear
from tests.engine.architectures import config_of
from tests.engine.harness import engine_model, random_prompts
from tests.engine.split import RankProcess, split
from training.random_models import random_model
from turnout.types import SamplingParams

LAYERS, DRAFTED = 8, 5
SPREAD = 0.15
PARAMS = EasySpecParams(group=3)  # layers 1 to 3, 4 to 6; 0 and 7 are by themselves
NAMES = ["llama", "llama_biased", "gemma2"]


@pytest.fixture(scope="module")
def rank() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


@pytest.mark.parametrize("name", NAMES)
async def test_a_split_draft_adds_its_attentions_up_once_for_a_group(
    name: str, tmp_path: Path, rank: RankProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(name, num_hidden_layers=LAYERS)
    random_model(config, seed=3, spread=SPREAD).save_pretrained(tmp_path)
    whole = engine_model(random_model(config, seed=3, spread=SPREAD), block_size=4)
    sums = 0
    add_up = SummedLinear.sum

    def counted(linear: SummedLinear, partial: torch.Tensor) -> torch.Tensor:
        nonlocal sums
        sums += 1
        return add_up(linear, partial)

    monkeypatch.setattr(SummedLinear, "sum", counted)
    prompt = random_prompts(1, 12, seed=1, vocab_size=97)[0]
    expected = await drafted(whole, prompt)
    await whole.close()
    with split(rank, tmp_path, block_size=4) as model:
        sums = 0  # loading has measured a few forwards
        got = await drafted(model, prompt)
        await model.close()
    assert rank.outcome() == {"error": None}
    assert got[0] == expected[0]
    for mine, theirs in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    assert grouped(LAYERS, PARAMS) == ((1, 4), (4, 7))
    # The prompt is read exactly and gives the first token of the draft; the others come from grouped layers. Every
    # layer's MLP adds up by itself, as its attention does outside a group.
    assert sums == 2 * LAYERS + (DRAFTED - 1) * (LAYERS + 2 + 2)


async def drafted(model: EngineModel, prompt: list[int]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """A draft's tokens, and what each was drawn from."""
    seq = Sequence(prompt, SamplingParams(max_tokens=40), 5)
    tree = await model.propose(
        seq, EasySpecDrafter(PARAMS, Candidates.DRAWN), DraftBudget(DRAFTED, DRAFTED), FixedLength()
    )
    model.release(seq)
    return tuple(tree.tokens), list(tree.proposals)
