"""Every logits processor: off it changes nothing, rows do not depend on their batch, drafts change nothing."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch

from decoding import few_left, processor_chain
from decoding import logits as logits_module
from decoding.model import ModelPool, Request
from decoding.processor_chain import chain_of, open_networks, reads_of
from decoding.processors.base import LogitsProcessor, Stage
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.step_states import LAST, StepStates
from tests.conformance.parts import ALL_PROCESSORS, LAYERS, SHAPE, VOCAB, WIDTH, drafter_choice
from tests.conformance.test_identity import pool as pool
from tests.conformance.test_identity import prompts
from tests.conformance.test_structures import LONGEST, STRUCTURE, assert_fits
from tests.constrained import END, char_compiler
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams, Token

PROCESSORS: dict[str, type[LogitsProcessor]] = ALL_PROCESSORS
# With which each has something to do; {}: its defaults are such.
ACTIVE: dict[str, dict[str, Any]] = {name: dict(part.Params.example) for name, part in PROCESSORS.items()}  # fmt: skip
# Trees, and layers of the large model that run before the others.
STATE_DRAFTERS = ("model_tree", "swift", "del")
ROWS = 12
MODEL = "of these tests"


@cache
def networks_of(name: str) -> dict[int, torch.nn.Module]:
    """What a processor asks, untrained."""
    network: Any = PROCESSORS[name].example(SHAPE).head
    if network is None:
        return {}
    for each in network.parameters():
        torch.nn.init.normal_(each, std=0.4, generator=torch.Generator().manual_seed(each.numel()))
    network.model = MODEL
    return {0: network}


def rows_of(name: str, params: dict[str, Any], greedy: bool = False) -> list[RowContext]:
    """Rows of different texts, which repeat themselves; every third is a hypothetical one."""
    made = []
    for place in range(ROWS):
        draw = torch.Generator().manual_seed(place)
        words = torch.randint(2, 12, (20 + place,), generator=draw).tolist()
        choice = PartChoice(name=name, params=params)
        sampling = SamplingParams(max_tokens=99, temperature=0.0 if greedy else 1.0, processors=(choice,))
        seq = Sequence(words[:6], sampling, seed=place)
        path = tuple(words[-3:]) if place % 3 == 0 else ()
        seq.networks = networks_of(name)
        for token in words[6 : len(words) - len(path)]:
            seq.append(Token(token, "m"))
        made.append(RowContext(seq, path))
    return made


def state_of(tokens: list[int], layer: int) -> torch.Tensor:
    """A hidden state as a function of the tokens up to its own: small integers, so that sums of them are exact."""
    seed = hash((layer, tuple(tokens[-4:])))
    return torch.randint(-2, 3, (WIDTH,), generator=torch.Generator().manual_seed(seed)).float()


def states_of(rows: list[RowContext], vocab: int) -> StepStates:
    """What a forward of a model with these states hands to processors, and keeps of what is written."""
    reads = [reads_of(row.seq, LAYERS) for row in rows]
    head = torch.randint(-1, 2, (WIDTH, vocab), generator=torch.Generator().manual_seed(9)).float() / 4
    for row, read in zip(rows, reads, strict=True):
        past, tokens = chain_of(row.seq).past, row.seq.tokens
        for layer in read.before:
            start = past.known(MODEL, layer)
            if start < len(tokens):
                new = [state_of(tokens[: place + 1], layer) for place in range(start, len(tokens))]
                past.put(MODEL, layer, start, torch.stack(new))
    layers = frozenset().union(*(each.hidden for each in reads))
    kept = [tokens for row in rows for tokens in _paths(row)]
    fed = {LAST: torch.stack([state_of(tokens, LAST) for tokens in kept])} if kept else {}
    ends = iter(range(len(kept)))
    return StepStates(
        MODEL,
        LAYERS,
        {layer: torch.stack([state_of(row.tokens, layer) for row in rows]) for layer in layers},
        lambda states, normed: (states * 2 if normed else states) @ head,
        fed,
        tuple(tuple(next(ends) for _ in row.path) for row in rows),
    )


def _paths(row: RowContext) -> list[list[int]]:
    return [[*row.seq.tokens, *row.path[: size + 1]] for size in range(len(row.path))]


def choice_scores(raw: torch.Tensor, rows: list[RowContext]) -> torch.Tensor:
    return logits_module.choice_scores(raw, rows, states_of(rows, raw.shape[1]))


def logits(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    made = torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3
    made[:, 2:4] = made[:, 3:4]  # two tokens exactly alike
    return made


@pytest.mark.parametrize("name", PROCESSORS)
def test_off_is_the_identity(name: str) -> None:
    raw, part = logits(), PROCESSORS[name]
    assert torch.equal(choice_scores(raw, rows_of(name, dict(part.off))), raw)
    rows = rows_of(name, ACTIVE[name], part.greedy_only)
    assert not torch.equal(
        choice_scores(raw, rows), choice_scores(raw, rows_of(name, dict(part.off), part.greedy_only))
    )


@pytest.mark.parametrize("name", PROCESSORS)
def test_rows_are_what_they_are_alone(name: str) -> None:
    raw, greedy = logits(), PROCESSORS[name].greedy_only
    before = raw.clone()
    rows = rows_of(name, ACTIVE[name], greedy)
    made = choice_scores(raw, rows)
    assert torch.equal(raw, before)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).tolist()
    others = rows_of("top_k", {"k": 5})
    for place, row in enumerate(rows_of(name, ACTIVE[name], greedy)):
        assert torch.equal(choice_scores(raw[place : place + 1], [row])[0], made[place])
    shuffled = choice_scores(raw[order], [rows_of(name, ACTIVE[name], greedy)[place] for place in order])
    assert torch.equal(shuffled, made[order])
    mixed = [row for pair in zip(rows_of(name, ACTIVE[name], greedy), others, strict=True) for row in pair]
    among = choice_scores(torch.cat([raw, raw]), mixed)  # every second row is another request's
    alone = choice_scores(torch.cat([raw, raw])[::2], rows_of(name, ACTIVE[name], greedy))
    assert torch.equal(among[::2], alone)


@pytest.mark.parametrize("name", PROCESSORS)
def test_long_rows_are_what_they_are_alone_with_threads(name: str) -> None:
    """A vocabulary as large as a real one: torch adds up a lone row in parts, one for each thread."""
    raw = torch.randn((2, 40_000), generator=torch.Generator().manual_seed(1)).mul(3).bfloat16().float()
    greedy, threads = PROCESSORS[name].greedy_only, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = choice_scores(raw, rows_of(name, ACTIVE[name], greedy)[:2])
        for place, row in enumerate(rows_of(name, ACTIVE[name], greedy)[:2]):
            assert torch.equal(choice_scores(raw[place : place + 1], [row])[0], made[place])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", PROCESSORS)
def test_hypothetical_tokens_count_as_written_ones(name: str) -> None:
    """One sequence asked at every place of a path, then at the same places as they are written, then with new parts."""
    raw, greedy = logits(), PROCESSORS[name].greedy_only
    [row, *_] = rows_of(name, ACTIVE[name], greedy)
    words = [5, 3, 5, 3, 7, 5, 3]
    paths = [tuple(words[:size]) for size in range(len(words) + 1)]
    drafted = choice_scores(raw[: len(paths)], [RowContext(row.seq, path) for path in paths])
    for place in range(len(paths)):
        assert torch.equal(choice_scores(raw[place : place + 1], [RowContext(row.seq)])[0], drafted[place])
        assert torch.equal(choice_scores(raw[place : place + 1], [RowContext(row.seq.fork())])[0], drafted[place])
        if place < len(words):
            row.seq.append(Token(words[place], "m"))


@pytest.mark.parametrize("name", PROCESSORS)
def test_something_is_left_and_the_best_stays_where_promised(name: str) -> None:
    part = PROCESSORS[name]
    for seed in range(5):
        raw = logits(seed)
        raw[:4] = raw[:4] * 0.01  # nearly flat rows
        raw[4:6, ::2] = float("-inf")  # some of it excluded before
        made = choice_scores(raw, rows_of(name, ACTIVE[name], part.greedy_only))
        probs = made.softmax(-1)
        assert torch.allclose(probs.sum(-1), torch.ones(ROWS))
        assert bool((made[4:6, ::2] == float("-inf")).all()) or part.greedy_only
        if part.stage < Stage.TEMPERATURE:
            assert torch.equal(made.isfinite(), raw.isfinite())
        if part.keeps_best:
            kept = made.gather(-1, raw.argmax(-1, keepdim=True))
            assert torch.equal(kept, made.amax(-1, keepdim=True))


@pytest.mark.parametrize("name", [name for name, part in PROCESSORS.items() if part.stage >= Stage.TRUNCATE])
def test_what_few_tokens_are_left_for_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a truncation, on rows shortened to what it left: as on whole rows, and alone as among others."""
    raw = torch.randn((ROWS, 2000), generator=torch.Generator().manual_seed(2))
    raw *= torch.arange(1, ROWS + 1)[:, None] / 3  # from nearly flat to peaked
    raw[:, 7:9] = raw.amax(-1, keepdim=True) - 0.5  # alike, and left by most

    def rows() -> list[RowContext]:
        made = rows_of(name, ACTIVE[name], PROCESSORS[name].greedy_only)
        for place, row in enumerate(made):
            cut = PartChoice.of("top_p", p=0.7) if place % 4 else PartChoice.of("top_k", k=3)
            processors = (cut, *row.seq.sampling.processors)
            row.seq.sampling = row.seq.sampling.model_copy(update={"temperature": 1.0, "processors": processors})
            row.seq.chain = None
        return made

    monkeypatch.setattr(few_left, "SIZES", ())
    whole = choice_scores(raw, rows())
    sizes, seen = (4, 16, 64, 250), set[int]()
    monkeypatch.setattr(few_left, "SIZES", sizes)
    found = few_left.shortened

    def watched(logits: torch.Tensor, places: list[int]) -> Any:
        for few in found(logits, places):
            seen.add(few.values.shape[1])
            yield few

    monkeypatch.setattr(processor_chain, "shortened", watched)
    made = choice_scores(raw, rows())
    assert torch.equal(made.isfinite(), whole.isfinite())
    assert torch.allclose(made, whole, atol=1e-5)
    assert seen == (set(sizes) if PROCESSORS[name].reads_values else set())
    for place, row in enumerate(rows()):
        assert torch.equal(choice_scores(raw[place : place + 1], [row])[0], made[place])


async def answered(
    pool: ModelPool, method: str, params: dict[str, Any], sampling: dict[str, Any], structured: bool
) -> list[Sequence]:
    async def one(place: int) -> Sequence:
        info = get_method(method)
        seq = Sequence(prompts(place + 1)[place], SamplingParams(max_tokens=LONGEST, **sampling), place, (END,))
        seq.networks = open_networks(seq.sampling, pool)
        if structured:
            seq.constraint = char_compiler().compile(STRUCTURE)
        async for _ in info.run(Request(f"r{place}", seq), pool, info.parse(params)):
            pass
        for model in pool.models.values():
            model.release(seq)
        return seq

    return list(await asyncio.gather(*(one(place) for place in range(2))))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("structured", [False, True])
async def test_drafts_change_nothing(pool: ModelPool, structured: bool) -> None:
    """Speculation with the match verifier writes what plain decoding writes, under all of them in one batch."""
    jobs, compared = [], 0
    for name, part in PROCESSORS.items():
        if not part.prefix_pure:  # no draft can be judged by it: refused by pools
            continue
        sampling = {
            "temperature": 0.0 if part.greedy_only else 0.9,
            "processors": (PartChoice(name=name, params=ACTIVE[name]), PartChoice.of("top_k", k=20)),
        }
        reads = part(part.Params(**ACTIVE[name])).reads(LAYERS)
        drafters = ("model_chain", *(STATE_DRAFTERS if reads.hidden else ()))
        jobs += [(name, "plain", {}, sampling, structured)]
        for drafter in drafters:
            drafted = {"drafter": drafter_choice(drafter), "verifier": "match", "length": "fixed"}
            jobs += [(name, "speculative", drafted, sampling, structured)]
    made = await asyncio.gather(*(answered(pool, *job) for _, *job in jobs))
    for (name, method, params, *_), answers in zip(jobs, made, strict=True):
        if method == "plain":
            plain = answers
        assert [seq.tokens for seq in plain] == [seq.tokens for seq in answers], (name, params)
        compared += sum(seq.meter.speculation.accepted_tokens for seq in answers)
        for seq in plain if structured else ():
            assert_fits(seq)
    assert compared > 0
