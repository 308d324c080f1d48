"""Best-of-k: what each answer is, which is shown, what it costs."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.candidates import final_answer
from decoding.fakes import ListText, TableModel, markov, pair
from decoding.model import Request
from decoding.noise import derive_seed
from decoding.sequence import Sequence
from decoding.step_heads import StateHead
from tests.decoding.head_models import StateModel
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

TEXTS = ["", "Answer: 4\n", "Answer: 5\n", "so ", "well ", "<end>"]
EOS = 5


def opinions(weights: dict[int, float], name: str = "large") -> TableModel:
    """After the prompt (0) a word, then one of two answers with these weights, then the end."""
    table = torch.full((6, 6), 1e-9)
    table[0, 3], table[0, 4] = 0.5, 0.5
    for token, weight in weights.items():
        table[3, token] = table[4, token] = weight
    table[1, EOS] = table[2, EOS] = table[EOS, EOS] = 1.0
    return TableModel(name, markov(table / table.sum(-1, keepdim=True)), 6, num_parameters=10)


async def answer(model: TableModel, seed: int, method: str = "best_of", **params) -> tuple[Sequence, list[str]]:
    info = get_method(method)
    seq = Sequence([0], SamplingParams(max_tokens=8), seed, (EOS,))
    request = Request("r", seq)
    async for _ in info.run(request, pair(model, model, ListText(TEXTS)), info.parse(params)):
        pass
    return seq, request.notes


async def test_with_one_sample_it_is_plain_decoding(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    for seed in range(5):
        alone = await run("plain", small, large, seed=seed)
        assert (await run("best_of", small, large, {"k": 1}, seed=seed)).ids == alone.ids


async def test_the_answers_are_those_of_the_derived_seeds_and_the_likeliest_is_shown(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    for seed in range(5):
        each = [await run("plain", small, large, seed=derive_seed(seed, index), logprobs=0) for index in range(4)]
        means = [sum(token.logprob for token in one.seq.generated) / len(one.ids) for one in each]
        best = await run("best_of", small, large, {"k": 4, "rerank": "logprob"}, seed=seed)
        assert best.ids == each[means.index(max(means))].ids


@pytest.mark.parametrize(
    ("text", "mark", "found"),
    [
        ("3+4=7\nAnswer: 7", "Answer:", "7"),
        ("Answer: 1\nno, Answer:  Oslo  City \nrest", "Answer:", "oslo city"),
        ("no mark\n last line \n", "Answer:", "last line"),
        ("Answer:\n\n12\n", "Answer:", "12"),
        ("Answer:", "Answer:", ""),
        ("a\nb", "", "b"),
        ("", "Answer:", ""),
    ],
)
def test_final_answers(text: str, mark: str, found: str):
    assert final_answer(text, mark) == found


async def test_the_majority_is_shown_whatever_word_came_before():
    """Of 5 answers that say 4 with a chance of 0.7, the most say 4 with a chance of 0.837."""
    model = opinions({1: 0.7, 2: 0.3})
    shown = Counter([(await answer(model, seed, k=5))[0].tokens[2] for seed in range(300)])
    assert shown[1] / 300 == pytest.approx(0.837, abs=0.05)
    alone = Counter([(await answer(model, seed, k=1))[0].tokens[2] for seed in range(600)])
    assert alone[1] / 600 == pytest.approx(0.7, abs=0.06)


async def test_the_prompt_is_fed_once_and_every_answer_is_paid_for(make_model):
    large = make_model("large", 2)
    prompt = tuple(range(10))
    seq = Sequence(prompt, SamplingParams(max_tokens=12), 0)
    info = get_method("best_of")
    segments = [each async for each in info.run(Request("r", seq), pair(large, large), info.parse({"k": 4}))]
    meter = seq.meter.models["large"]
    assert [len(each.tokens) for each in segments] == [12]
    assert (meter.generated_tokens, meter.discarded_tokens) == (12, 36)
    # The prompt, its last place again for each fork, and each fork's tokens but the last.
    assert meter.prompt_tokens == 10 + 4
    assert meter.decode_tokens == 4 * 11
    assert meter.flops == 2.0 * large.num_parameters * (14 + 44)
    assert list(large.cached) == [seq]


async def test_at_temperature_0_one_answer_is_enough():
    info = get_method("best_of")
    model = opinions({1: 0.7, 2: 0.3})
    request = Request("r", Sequence([0], SamplingParams(max_tokens=8, temperature=0.0), 0, (EOS,)))
    async for _ in info.run(request, pair(model, model, ListText(TEXTS)), info.parse({"k": 8})):
        pass
    assert request.notes == ["one answer instead of 8: at temperature 0 they would all be the same"]
    assert request.sequence.meter.models["large"].discarded_tokens == 0


async def test_cancelling_frees_every_fork(make_model):
    large = make_model("large", 2)
    seq = Sequence((1, 2), SamplingParams(max_tokens=10_000), 0)
    info = get_method("best_of")

    async def go() -> None:
        async for _ in info.run(Request("r", seq), pair(large, large), info.parse({"k": 3})):
            pass

    task = asyncio.create_task(go())
    while len(large.cached) < 4:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(large.cached) == [seq]


async def test_a_stop_string_cuts_each_answer_on_its_own(run, make_model):
    """Forks have watchers of their own: whichever is shown, its text ends where plain decoding's would."""

    class UntilToken:
        watches = True

        def __init__(self) -> None:
            self.fed: list[int] = []

        def feed(self, token_id: int) -> bool:
            self.fed.append(token_id)
            return token_id == 3

        def clone(self) -> UntilToken:
            twin = UntilToken()
            twin.fed = list(self.fed)
            return twin

    large = make_model("large", 2)
    info = get_method("best_of")
    stop = UntilToken()
    seq = Sequence((1, 2), SamplingParams(max_tokens=24), 4, stop=stop)
    async for _ in info.run(Request("r", seq), pair(large, large), info.parse({"k": 4})):
        pass
    ids = [token.id for token in seq.generated]
    assert stop.fed == ids
    assert 3 not in ids[:-1]


class Judge(StateModel):
    """`StateModel` that draws evenly, so that answers differ; the state is still what `after` says."""

    def __init__(self, size: int) -> None:
        super().__init__("large", [0] * size)
        self.next_logits = lambda tokens: torch.zeros(size)

    def _read(self, seq, paths, want):
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                row.hidden[-1] = self.one_hot[(seq.tokens + list(path))[-1]]
        return rows


async def test_a_reward_model_picks_the_answer_it_finds_best(tmp_path: Path):
    """Its head likes answers whose last token is a high number."""
    model = Judge(8)
    head = StateHead(8 + 3)  # the state, and three numbers about the answer's tokens
    head.last.weight.data[:] = torch.cat([torch.arange(8.0), torch.zeros(3)])
    head.last.bias.data[:] = 0.0
    Artifact("reward_model", "test", {"head": head.settings}, {"large": model.digest}, head.state_dict()).save(
        tmp_path / "mine.safetensors"
    )
    models = pair(model, model)
    models.artifacts = Artifacts(tmp_path)
    info = get_method("best_of")
    for seed in range(10):
        each = []
        for index in range(4):
            seq = Sequence([1], SamplingParams(max_tokens=5), derive_seed(seed, index))
            await model.decode(seq)
            each.append(seq.tokens)
        shown = Sequence([1], SamplingParams(max_tokens=5), seed)
        params = info.parse({"k": 4, "rerank": "reward", "artifact": "mine"})
        async for _ in info.run(Request("r", shown), models, params):
            pass
        assert shown.tokens == max(each, key=lambda tokens: tokens[-1])
    missing = info.run(Request("r", shown), models, info.parse({"rerank": "reward", "artifact": "other"}))
    with pytest.raises(TurnoutError, match="'other' is not known; available: mine"):
        await anext(missing)
