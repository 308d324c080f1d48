import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.fakes import TableModel, markov
from decoding.lengths.fixed import FixedLength
from decoding.sequence import Sequence
from turnout.types import FinishReason, SamplingParams, TokenKind

VERIFIERS = ["match", "rejection"]


@pytest.fixture
def models(make_model):
    return make_model("small", 1), make_model("large", 2, num_parameters=10)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    "penalties", [{}, {"repetition_penalty": 1.5, "frequency_penalty": 0.7}], ids=["", "penalties"]
)
async def test_greedy_output_is_plain_greedy(run, models, verifier, penalties):
    small, large = models
    accepted = 0
    for index in range(36):
        prompt = (index % 12, index // 12)
        plain = await run("plain", small, large, prompt=prompt, temperature=0, max_tokens=12, **penalties)
        drafted = await run(
            "speculative",
            small,
            large,
            {"verifier": verifier, "draft_length": 1 + index % 6},
            prompt=prompt,
            temperature=0,
            max_tokens=12,
            **penalties,
        )
        assert drafted.ids == plain.ids
        accepted += drafted.seq.meter.speculation.accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6, "top_k": 4}, {"top_p": 0.8, "presence_penalty": 1.0}, {"min_p": 0.1}]
)
async def test_match_equals_plain_decoding_with_the_same_seed(run, models, sampling):
    small, large = models
    for seed in range(21):
        plain = await run("plain", small, large, seed=seed, **sampling)
        drafted = await run("speculative", small, large, {"draft_length": 1 + seed % 7}, seed=seed, **sampling)
        assert drafted.ids == plain.ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("length", [1, 4])
async def test_drafting_with_the_target_itself_accepts_everything(run, make_model, verifier, temperature, length):
    params = {"verifier": verifier, "draft_length": length}
    small, large = make_model("small", 5), make_model("large", 5)
    done = await run("speculative", small, large, params, temperature=temperature, max_tokens=4 * (length + 1))
    meter = done.seq.meter
    assert meter.speculation.accepted_tokens == meter.speculation.draft_tokens == 4 * length
    assert meter.speculation.rounds == large.forwards == 4
    assert [len(segment.tokens) for segment in done.segments] == [length + 1] * 4
    assert [s.stopped_by for s in done.segments] == ["round"] * 3 + ["finish"]
    assert done.owners == ("S" * length + "L") * 4


async def test_rejection_draws_the_same_law_through_the_models(run):
    """1,000 whole runs: first two tokens against the exact law (the 100,000-run test is in test_verifiers)."""
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.4, 0.3]])
    draft = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.3, 0.1, 0.6]])
    small, large = TableModel("small", markov(draft), 3), TableModel("large", markov(target), 3)
    counts, runs = torch.zeros(3, 3), 1_000
    for seed in range(runs):
        done = await run("speculative", small, large, {"verifier": "rejection"}, prompt=(0,), seed=seed, max_tokens=3)
        counts[done.ids[0], done.ids[1]] += 1
    expected = target[0][:, None] * target * runs
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 26.1  # 0.999 quantile at 8 degrees of freedom


@pytest.mark.parametrize("verifier", VERIFIERS)
async def test_the_end_of_text_inside_a_draft_ends_the_answer(run, verifier):
    chain = torch.zeros(6, 6)
    chain[torch.arange(6), (torch.arange(6) + 1) % 6] = 1.0
    small, large = TableModel("small", markov(chain), 6), TableModel("large", markov(chain), 6)
    done = await run(
        "speculative", small, large, {"verifier": verifier, "draft_length": 5}, prompt=(0,), temperature=0, eos=(3,)
    )
    assert done.ids == [1, 2, 3]
    assert done.seq.finish_reason is FinishReason.STOP
    assert done.seq.meter.speculation.draft_tokens == 3  # and nothing is drafted behind it
    assert done.seq.meter.speculation.accepted_tokens == 3
    assert [t.kind for t in done.seq.generated] == [TokenKind.ACCEPTED] * 3


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
async def test_max_tokens_is_exact_and_never_overdrafted(run, make_model, verifier, max_tokens):
    small, large = make_model("small", 5), make_model("large", 5)
    done = await run("speculative", small, large, {"verifier": verifier, "draft_length": 9}, max_tokens=max_tokens)
    assert len(done.ids) == max_tokens
    assert done.seq.meter.speculation.draft_tokens == max_tokens - 1
    assert small.forwards == max_tokens - 1


async def test_an_always_wrong_drafter_costs_only_time(run):
    right, wrong = torch.zeros(4, 4), torch.zeros(4, 4)
    right[:, 1] = wrong[:, 2] = 1.0
    small, large = TableModel("small", markov(wrong), 4), TableModel("large", markov(right), 4)
    for verifier in VERIFIERS:
        params = {"drafter": "model_chain", "verifier": verifier}
        done = await run("speculative", small, large, params, prompt=(0,), max_tokens=10)
        assert done.ids == [1] * 10
        assert done.seq.meter.speculation.rounds == 10
        assert done.seq.meter.speculation.accepted_tokens == 0
        kinds = [token.kind for token in done.seq.generated]
        assert kinds == [TokenKind.RECOVERED] * 9 + [TokenKind.BONUS]


async def test_the_draft_model_reuses_what_it_has_read(run, make_model):
    small, large = make_model("small", 5), make_model("large", 5)
    done = await run("speculative", small, large, {"draft_length": 3}, max_tokens=12)
    mine, theirs = (done.seq.meter.models[name] for name in ("small", "large"))
    # Round 1 reads the prompt; each later round reads what the target added and its own last draft token.
    assert (mine.prompt_tokens, mine.draft_tokens) == (2, 3 * 2)
    assert mine.catchup_tokens + mine.decode_tokens == 2 * 2
    assert (theirs.prompt_tokens, theirs.decode_tokens, theirs.draft_tokens) == (2, 2, 9)
    assert theirs.catchup_tokens == 0


@pytest.mark.parametrize("verifier", VERIFIERS)
async def test_log_probabilities_are_the_targets(run, models, verifier):
    small, large = models
    done = await run("speculative", small, large, {"verifier": verifier}, logprobs=2)
    context = [1, 2]
    for token in done.seq.generated:
        logp = large.next_logits(context).log_softmax(-1)
        assert token.logprob == pytest.approx(logp[token.id].item(), abs=1e-5)
        assert [t for t, _ in token.top] == logp.topk(2).indices.tolist()
        context.append(token.id)


async def test_the_chain_keeps_proposals_only_where_they_are_needed(make_model):
    model, seq = make_model("m", 3), Sequence([1, 2], SamplingParams(top_k=3), 0)
    room, length = DraftBudget(3, 3), FixedLength()
    coupled = await model.propose(seq, ModelChainDrafter(), room, length)
    assert (len(coupled), coupled.proposals, coupled.is_chain, coupled.source) == (3, (), True, "m")
    sampled = await model.propose(seq, ModelChainDrafter(candidates=Candidates.DRAWN), room, length)
    for node, token in enumerate(sampled.tokens):
        proposal = sampled.proposal(node)
        assert proposal is not None
        assert (proposal > 0).sum() == 3  # taken after top-k
        assert proposal[token] > 0
        assert proposal.sum().item() == pytest.approx(1.0)
