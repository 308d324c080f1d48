"""Trees drafted by a real cache: what is read while they grow, and the target's answer over them."""

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.dyspec import DySpecDrafter
from decoding.drafters.rsd_s import RsdSDrafter
from decoding.drafters.sequoia import SequoiaDrafter
from decoding.drafters.staged import StagedDrafter
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from decoding.tree import ROOT
from pool.local_pool import LocalPool
from tests.engine.harness import ask, twins
from training.random_models import llama_config
from turnout.types import SamplingParams, Token

PROMPT = [72, 101, 108, 108, 111]
SHARP = 0.1  # so that trees of a random model get deep
EVERY = ["rsd_c", "rsd_s", "sequoia", "dyspec", "staged", "model_tree", "model_sequences", "vocab_trim"]


@pytest.mark.parametrize("drafter", EVERY)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_match_answers_are_those_of_plain_decoding(pool: LocalPool, drafter: str, temperature: float):
    options = {"temperature": temperature, "max_tokens": 40}
    plain = await ask(pool, PROMPT, "plain", **options)
    drafted = await ask(pool, PROMPT, "speculative", {"drafter": drafter, "length": "fixed"}, **options)
    assert drafted.ids == plain.ids
    assert drafted.usage.speculation.accepted_tokens > 0


@pytest.mark.parametrize("part", [RsdSDrafter, SequoiaDrafter, DySpecDrafter, StagedDrafter])
async def test_what_is_drawn_from_is_what_a_full_forward_gives(part: type[Drafter]):
    model, plain = twins(llama_config(40, hidden_size=32, pad_token_id=0, eos_token_id=1), seed=4, block_size=4)
    drafter = part(candidates=Candidates.DRAWN)
    seq = Sequence([5, 6, 7], SamplingParams(max_tokens=64, temperature=SHARP), 3)
    compared = 0
    for _ in range(6):
        tree = await model.propose(seq, drafter, DraftBudget(5, 16), FixedLength())
        for parent in range(ROOT, len(tree)):
            children = tree.children(parent)
            if children:
                path = [tree.tokens[node] for node in tree.path(parent)]
                expected = plain.logits([*seq.tokens, *path])[-1].div(SHARP).softmax(-1)
                proposal = tree.proposal(children[0])
                assert proposal is not None
                assert torch.allclose(proposal, expected, atol=1e-4)
                compared += 1
        seq.extend([Token(tree.tokens[0], "m"), Token(9, "m")], {"m": 0})
    assert compared > 20
    model.release(seq)
