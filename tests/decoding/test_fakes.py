import pytest
import torch

from decoding.fakes import ListText, TableModel, markov, pair
from decoding.model import Model, ReadSpec, StopCondition
from decoding.sequence import Sequence
from turnout.types import SamplingParams, Token

CHAIN = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])


@pytest.fixture
def model() -> TableModel:
    return TableModel("m", markov(CHAIN), 3, num_parameters=5)


@pytest.fixture
def seq() -> Sequence:
    return Sequence([0, 1], SamplingParams(temperature=0), 0)


async def test_extend_reads_one_row_or_all(model: Model, seq: Sequence):
    assert [row.token for row in await model.extend(seq, (2, 0))] == [1]
    every = await model.extend(seq, (2, 0), ReadSpec(probs=True, logprob=True), every=True)
    assert [row.token for row in every] == [0, 2, 1]
    assert every[0].logprob == pytest.approx(CHAIN[1, 0].log().item())
    assert seq.tokens == [0, 1]


async def test_only_what_is_missing_is_fed(model: TableModel, seq: Sequence):
    await model.extend(seq, (2,))
    assert (model.forwards, model.fed_tokens) == (1, 3)
    await model.extend(seq, (2, 2))
    assert (model.forwards, model.fed_tokens) == (2, 4)
    await model.extend(seq, (0,))  # another path: the last two are dropped
    assert (model.forwards, model.fed_tokens) == (3, 5)
    seq.append(Token(0, "other"))
    seq.append(Token(2, "other"))
    await model.extend(seq)
    assert model.fed_tokens == 6  # the first was already there, as a guess
    meter = seq.meter.models["m"]
    assert (meter.prompt_tokens, meter.draft_tokens, meter.decode_tokens, meter.catchup_tokens) == (2, 3, 1, 0)


async def test_absorb_leaves_the_last_token(model: TableModel, seq: Sequence):
    seq.append(Token(0, "other"))
    await model.prefill_ahead(seq)
    assert model.cached[seq] == [0, 1]
    await model.prefill_ahead(seq)
    assert model.forwards == 1


async def test_score(model: Model, seq: Sequence):
    one, two = await model.score(seq, [(0, 1), (2,)])
    assert one.token_logprobs == pytest.approx([CHAIN[1, 0].log().item(), CHAIN[0, 1].log().item()])
    assert one.greedy == (True, True)
    assert one.total == pytest.approx(sum(one.token_logprobs))
    assert two.greedy == (False,)


async def test_fork_and_release(model: TableModel, seq: Sequence):
    await model.decode(seq, StopCondition(max_tokens=4))
    twin = model.fork(seq, seed=4)
    assert model.cached[twin] == model.cached[seq]
    assert twin.seed == 4
    model.release(seq)
    assert list(model.cached) == [twin]


def test_pair(model: TableModel):
    pool = pair(model, TableModel("n", markov(CHAIN), 3, num_parameters=9))
    assert (pool.small.name, pool.large.name) == ("m", "n")
    assert pool.sizes == {"m": 5, "n": 9}
    assert pool.tokenizer.decode([2, 1]) == "21"
    assert pair(model, model, ListText(["x"])).tokenizer.token_bytes(0) == b"x"
