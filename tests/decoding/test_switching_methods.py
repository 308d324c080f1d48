import asyncio
import itertools
from contextlib import aclosing
from typing import Any

import pytest
import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.model import ReadSpec, Request, StopCondition
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.switching.base import BackgroundReader
from decoding.switching.mean_entropy import MeanEntropySwitch
from turnout.cost import Meter, paper_cost, report
from turnout.registry import get_method
from turnout.types import SamplingParams, Segment

# Parameters under which each method really switches on the test models.
SWITCHING: list[tuple[str, dict[str, Any]]] = [
    ("entropy_adaptive", {"threshold": 1.5, "window": 2, "min_stay": 2}),
    ("entropy_adaptive", {"threshold": 1.5, "window": 2, "min_stay": 2, "effect": "current"}),
    ("entropy_adaptive", {"threshold": 1.6, "threshold_down": 1.3, "window": 2, "min_stay": 1, "start": "large"}),
    ("sentence_lead", {"lead_tokens": 2, "lead_probability": 0.7}),
    ("random_switch", {"share": 0.4, "mean_run": 4, "min_stay": 2}),
]
IDS = [f"{name}-{index}" for index, (name, _) in enumerate(SWITCHING)]
TEXTS = ListText([".", " a", " b", " c", "!", " d", " e", "3", "\n", " f", " g", " h"])


@pytest.fixture
def models(make_model):
    return make_model("small", 1), make_model("large", 2, num_parameters=10)


def changes(owners: str) -> int:
    return sum(a != b for a, b in itertools.pairwise(owners))


@pytest.mark.parametrize(("method", "params"), SWITCHING, ids=IDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_same_weights_in_both_roles_give_plain_output(run, make_model, method, params, temperature):
    switches = 0
    for seed in range(12):
        small, large = make_model("small", 4), make_model("large", 4)
        options = {"prompt": (seed % 12, 3), "seed": seed, "temperature": temperature, "tokenizer": TEXTS}
        plain = await run("plain", small, large, **options)
        done = await run(method, small, large, params, **options)
        assert done.ids == plain.ids
        assert done.seq.meter.switches == changes(done.owners)
        switches += done.seq.meter.switches
    assert switches > 12


@pytest.mark.parametrize(("method", "params"), SWITCHING, ids=IDS)
async def test_replay_every_token_is_its_owners_choice(run, models, method, params):
    small, large = models
    for seed in range(10):
        done = await run(method, small, large, params, seed=seed, tokenizer=TEXTS, temperature=seed % 2)
        fresh = Sequence([1, 2], done.seq.sampling, seed)
        for token in done.seq.generated:
            owner = {"small": small, "large": large}[token.source]
            row = read(owner.next_logits(fresh.tokens)[None], [RowContext(fresh)], [ReadSpec()])[0]
            assert row.token == token.id
            fresh.append(token)
        stays = [len(list(group)) for _, group in itertools.groupby(done.owners)]
        assert all(length >= params.get("min_stay", 1) for length in stays[:-1])


async def test_thresholds_at_the_extremes(run, models):
    small, large = models
    plain = await run("plain", small, large, {"model": "small"})
    never = await run("entropy_adaptive", small, large, {"threshold": 64})
    assert never.ids == plain.ids
    assert never.owners == "S" * 24
    assert large.forwards == 0
    always = await run("entropy_adaptive", small, large, {"threshold": -1, "min_stay": 7})
    assert always.owners == "S" * 7 + "L" * 17
    assert always.seq.meter.switches == 1


async def test_the_first_token_leaves_at_once_though_the_small_models_was_dropped(run, models):
    small, large = models
    params = {"threshold": -1, "window": 1, "min_stay": 24, "min_stay_small": 0, "effect": "current"}
    done = await run("entropy_adaptive", small, large, params)
    assert done.owners == "L" * 24
    assert done.seq.meter.models["small"].discarded_tokens == 1
    assert [len(segment.tokens) for segment in done.segments[:4]] == [1, 2, 4, 8]


@pytest.mark.parametrize(("method", "params"), SWITCHING, ids=IDS)
async def test_catch_up_changes_the_work_and_not_the_tokens(run, make_model, method, params):
    done = {}
    for mode in ("lazy", "eager", "shadow"):
        small, large = make_model("small", 1), make_model("large", 2)
        done[mode] = await run(
            method, small, large, {**params, "catch_up": mode}, seed=3, tokenizer=TEXTS, max_tokens=64
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}
    lazy, eager, shadow = done["lazy"], done["eager"], done["shadow"]
    assert changes(lazy.owners) > 3
    assert lazy.seq.generated == eager.seq.generated == shadow.seq.generated
    for outcome in done.values():
        for meter in outcome.seq.meter.models.values():
            assert meter.prompt_tokens == 2
            assert meter.catchup_tokens > 0


async def test_catch_up_is_one_forward_and_counted_apart(run, models):
    small, large = models
    done = await run("entropy_adaptive", small, large, {"threshold": -1, "min_stay": 6}, max_tokens=10)
    mine, theirs = (done.seq.meter.models[name] for name in ("small", "large"))
    assert (mine.prompt_tokens, mine.decode_tokens, mine.catchup_tokens, mine.forwards) == (2, 5, 0, 6)
    # The switch: one forward over prompt and six tokens, five of them catch-up, the last one the decode step.
    assert (theirs.prompt_tokens, theirs.catchup_tokens, theirs.decode_tokens, theirs.forwards) == (2, 5, 4, 4)
    assert large.cached[done.seq] == done.seq.tokens[:-1]


async def test_shadow_keeps_the_idle_model_close(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    done = await run("entropy_adaptive", small, large, {"threshold": 64, "catch_up": "shadow"}, max_tokens=40)
    assert done.owners == "S" * 40
    gap = len(done.seq) - len(large.cached[done.seq])
    assert gap <= 17  # at most two stretches behind
    eager = make_model("large", 2)
    done = await run("entropy_adaptive", small, eager, {"threshold": 64, "catch_up": "eager"}, max_tokens=40)
    assert len(eager.cached[done.seq]) <= 3  # the prompt, and hardly anything later


async def test_a_dropped_token_is_charged_once_per_switch(run, models):
    small, large = models
    done = await run("entropy_adaptive", small, large, SWITCHING[1][1], max_tokens=60)
    meters = done.seq.meter.models.values()
    assert done.seq.meter.switches > 2
    assert sum(meter.discarded_tokens for meter in meters) == done.seq.meter.switches
    assert sum(meter.generated_tokens for meter in meters) == 60
    assert small.forwards + large.forwards == 60 + done.seq.meter.switches


class NeverDone(TableModel):
    """Its batch never has room for background work."""

    reading = cancelled = 0

    async def prefill_ahead(self, seq: Sequence) -> None:
        self.reading += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.reading -= 1
            self.cancelled += 1

    async def decode(self, seq: Sequence, until: StopCondition = StopCondition()) -> Segment:
        assert not self.reading, "it reads in the background what it is about to read anyway"
        return await super().decode(seq, until)


@pytest.mark.parametrize("mode", ["eager", "shadow"])
async def test_a_switch_does_not_wait_for_background_work(run, models, mode):
    small, large = models
    stuck = NeverDone("large", large.next_logits, 12)
    lazy = await run("entropy_adaptive", small, large, {"threshold": -1})
    done = await run("entropy_adaptive", small, stuck, {"threshold": -1, "catch_up": mode})
    assert done.ids == lazy.ids
    assert stuck.cancelled >= 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_early_leaves_nothing_running(models):
    small, large = models
    stuck = NeverDone("large", large.next_logits, 12)
    info = get_method("entropy_adaptive")
    seq = Sequence([1, 2], SamplingParams(max_tokens=50), 0)
    run = info.run(Request("r", seq), pair(small, stuck), info.parse({"catch_up": "shadow", "threshold": 64}))
    async with aclosing(run) as segments:
        async for _ in segments:
            if len(seq.generated) > 5:
                break
    assert stuck.cancelled == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failing_background_reading_is_not_hidden(models):
    class Broken(TableModel):
        async def prefill_ahead(self, seq: Sequence) -> None:
            raise RuntimeError("no memory")

    reader, seq = BackgroundReader(), Sequence([1, 2], SamplingParams(), 0)
    broken = Broken("large", models[1].next_logits, 12)
    reader.start(broken, seq)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="no memory"):
        reader.start(broken, seq)
    with pytest.raises(RuntimeError, match="no memory"):
        await reader.stop()
    await reader.stop()


@pytest.mark.parametrize("method", ["plain", "entropy_adaptive", "sentence_lead", "random_switch"])
async def test_the_first_token_leaves_at_once_and_the_rest_in_small_stretches(run, models, method):
    done = await run(method, *models, max_tokens=60, tokenizer=TEXTS)
    sizes = [len(segment.tokens) for segment in done.segments]
    assert sizes[0] == 1
    assert max(sizes) <= 8
    assert sum(sizes) == 60


async def test_stretches_do_not_change_the_outcome(run, models):
    """The program in short stretches against the same rule driven in stretches as long as the rule allows."""
    small, large = models
    done = await run("entropy_adaptive", small, large, SWITCHING[0][1], max_tokens=60, seed=2)
    rule = MeanEntropySwitch(window=2, min_stay=2, threshold=1.5)
    seq = Sequence([1, 2], SamplingParams(max_tokens=60), 2)
    while not seq.finished:
        await {"small": small, "large": large}[rule.active].decode(seq, StopCondition((rule,)))
    assert seq.generated == done.seq.generated


async def scripted(run, params: dict[str, Any], *texts: str) -> str:
    """Owners when both models say exactly this."""
    vocabulary = list(dict.fromkeys(texts))

    def say(tokens: list[int]) -> torch.Tensor:
        logits = torch.zeros(len(vocabulary))
        logits[vocabulary.index(texts[len(tokens) - 1])] = 1.0
        return logits

    small, large = (TableModel(name, say, len(vocabulary)) for name in ("small", "large"))
    done = await run(
        "sentence_lead", small, large, params, prompt=(0,), temperature=0, max_tokens=len(texts),
        tokenizer=ListText(vocabulary),
    )  # fmt: skip
    return done.owners


async def test_sentence_lead_on_a_scripted_stream(run):
    stream = ("aa", ".", " bb", " cc", ".", " d")
    assert await scripted(run, {"lead_tokens": 1}, *stream) == "LSLSSL"
    assert await scripted(run, {"lead_tokens": 1_000_000}, *stream) == "LLLLLL"
    assert await scripted(run, {"lead_probability": 0}, *stream) == "SSSSSS"
    numbers = ("x", " is", " ", "3", ".", "14", ".", " Then", " go", "\n", "1", ".", " z")
    assert await scripted(run, {"lead_tokens": 1}, *numbers) == "LSSSSSSLSSLSS"


async def test_the_leaders_share_grows_with_both_knobs(run, models):
    async def share(**params: Any) -> float:
        owned = ""
        for seed in range(12):
            owned += (await run("sentence_lead", *models, params, seed=seed, max_tokens=80, tokenizer=TEXTS)).owners
        return owned.count("L") / len(owned)

    by_length = [await share(lead_tokens=n) for n in (1, 3, 9)]
    by_chance = [await share(lead_tokens=3, lead_probability=p) for p in (0.0, 0.3, 0.6, 1.0)]
    assert by_length == sorted(by_length)
    assert by_chance == sorted(by_chance)
    assert by_chance[0] == 0.0
    assert by_length[-1] > by_length[0] + 0.2


async def test_quality_falls_as_the_threshold_rises_and_beats_random(run, make_model):
    """The small model is the large one behind noise, so it errs where the distribution is flat."""
    large = make_model("large", 2)
    noise = torch.randn((12, 12, 12), generator=torch.Generator().manual_seed(99))
    small = TableModel("small", lambda tokens: large.next_logits(tokens) + 0.8 * noise[tokens[-2], tokens[-1]], 12)

    async def measure(method: str, params: dict[str, Any]) -> tuple[float, float]:
        """Share of tokens by the large model, and of tokens that are what it would have said there."""
        by_large = right = total = 0
        for index in range(20):
            done = await run(method, small, large, params, prompt=(index % 12, index // 12), seed=index, max_tokens=40)
            context = [index % 12, index // 12]
            sequence = Sequence(context, done.seq.sampling, index)
            for token in done.seq.generated:
                row = read(large.next_logits(sequence.tokens)[None], [RowContext(sequence)], [ReadSpec()])[0]
                right += row.token == token.id
                sequence.append(token)
            by_large += done.owners.count("L")
            total += len(done.ids)
        return by_large / total, right / total

    sweep = [
        await measure("entropy_adaptive", {"threshold": tau, "window": 1, "min_stay": 1, "effect": "current"})
        for tau in (-1.0, 1.0, 1.8, 2.5, 64.0)
    ]
    shares, quality = [s for s, _ in sweep], [q for _, q in sweep]
    assert shares == sorted(shares, reverse=True)
    assert quality == sorted(quality, reverse=True)
    assert (shares[0], shares[-1]) == (pytest.approx(1.0, abs=0.03), 0.0)
    _, at_random = await measure("random_switch", {"share": round(shares[2], 3), "mean_run": 3, "min_stay": 1})
    assert quality[2] > at_random


def test_paper_cost_reproduces_the_published_rows():
    assert paper_cost(0.43, 3, 11) == pytest.approx(0.5855, abs=5e-5)
    assert paper_cost(0.25, 3, 28) == pytest.approx(0.3304, abs=5e-5)
    meter = Meter()
    meter.of("small", 3).generated_tokens = 57
    meter.of("large", 11).generated_tokens = 43
    assert report(meter, "large", 11, 10, 1.0, 0.0).spent.paper == pytest.approx(0.5855, abs=5e-5)


async def test_a_band_switches_less_often_than_one_threshold(run, models):
    """Between the two thresholds whoever writes goes on: the lower one is what the large model waits for."""
    small, large = models
    switches, waits = {}, {}
    for down in (1.5, 0.9, 0.0):
        params = {"threshold": 1.5, "threshold_down": down, "window": 1, "min_stay": 1}
        done = [await run("entropy_adaptive", small, large, params, seed=seed, max_tokens=60) for seed in range(12)]
        switches[down] = sum(outcome.seq.meter.switches for outcome in done)
        waits[down] = sum(outcome.owners.count("L") for outcome in done)
        for outcome in done:
            for before, after in itertools.pairwise(outcome.seq.generated):
                assert before.entropy_bits is not None
                if before.source == "small":
                    assert (after.source == "large") == (before.entropy_bits > 1.5)
                else:
                    assert (after.source == "small") == (before.entropy_bits <= down)
    assert switches[1.5] > switches[0.9] > switches[0.0]
    assert waits[1.5] < waits[0.9] < waits[0.0]


async def test_the_share_of_large_tokens_has_those_that_a_switch_dropped(run, models):
    """Counted by the models' own forwards: each of them wrote one token, kept or dropped."""
    small, large = models
    params = {"threshold": 1.5, "window": 1, "min_stay": 1, "effect": "current"}
    done = await run("entropy_adaptive", small, large, params, max_tokens=64)
    kept, meters = done.owners.count("L"), done.seq.meter.models
    assert meters["large"].discarded_tokens > 0
    assert meters["large"].written_tokens == meters["large"].forwards > kept
    found = report(done.seq.meter, "large", large.num_parameters, 2, 1.0, 1.0)
    assert found.large_share == large.forwards / 64
    assert found.large_kept_share == kept / 64


@pytest.mark.parametrize("start", ["small", "large"])
async def test_random_and_entropy_switching_start_alike(run, models, start):
    small, large = models
    for seed in range(8):
        entropy = await run("entropy_adaptive", small, large, {"threshold": 1.5, "start": start}, seed=seed)
        random = await run("random_switch", small, large, {"share": 0.4, "start": start}, seed=seed)
        assert entropy.owners[0] == random.owners[0] == start[0].upper()
    # Their defaults are the same too.
    assert {get_method(name).parse({}).start for name in ("entropy_adaptive", "random_switch")} == {"small"}
    drawn = {(await run("random_switch", small, large, {"start": "drawn"}, seed=n)).owners[0] for n in range(20)}
    assert drawn == {"S", "L"}
