"""Doubt and what is measured of answers, through a pool: in the usage, as an abstention, and for several answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.calibration import RAN
from decoding.model import MEASURES
from deployments.fan_out import combine
from deployments.grpc_messages import generate_call, usage_message
from deployments.openai_format import usage_object
from deployments.schemas import chat_job
from pool.local_pool import LocalPool
from pool.usage import with_answer
from router.decision import Decision
from tests.engine.harness import answer, ask, call_of, pair_config
from turnout.calls import GenerateCall, Usage
from turnout.client_messages import generate_request
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.pool_config import SandboxConfig
from turnout.structure import Structure
from turnout.types import FinishReason

PROMPT = [65, 66, 67, 68, 69]
SNNE = {"name": "snne", "samples": 3}
CHOICE = PartChoice.of("snne", samples=3)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_measures_of_several_answers_are_their_mean() -> None:
    extra: dict[str, Any] = {}
    for left in ({MEASURES: {"snne": 1.0}}, {}, {MEASURES: {"snne": 2.0, "abstained": 1.0}}):
        extra = with_answer(extra, {RAN: {"share": 0.5}, **left})
    assert extra == {RAN: {"share": 0.5}, MEASURES: {"snne": (1.0, 2.0), "abstained": (1.0,)}}
    nothing = Cost(0.0, 0.0, 0.0)
    report = CostReport(nothing, nothing, 0.0)
    usages = [
        Usage(1, 1, 0, {}, SpeculationMeter(), 0, report, "abstain", {}, 0, 0.0, 0.0, measures=measures)
        for measures in ({"snne": 1.0}, {}, {"snne": 2.0, "abstained": 1.0})
    ]
    assert combine(usages).measures == {"snne": 1.5, "abstained": 1.0}


async def test_doubt_is_reported_and_acted_on(pair_folder: Path) -> None:
    config = pair_config(pair_folder)
    sandbox = config.pools["pair"].model_copy(update={"sandbox": SandboxConfig(walls=())})
    pool = LocalPool.load("pair", config.model_copy(update={"pools": {"pair": sandbox}}))
    try:
        plain = await ask(pool, PROMPT, "plain")
        told = await ask(pool, PROMPT, "abstain", {"uncertainty": SNNE})
        assert told.texts == plain.texts
        value = told.usage.measures["snne"]
        assert usage_object(told.usage)["turnout"]["measures"] == {"snne": value}
        assert usage_message(told.usage).measures["snne"] == value
        assert told.usage.models["large"].discarded_tokens > 0
        held = await ask(pool, PROMPT, "abstain", {"uncertainty": SNNE, "abstain_above": value - 0.1})
        assert held.texts == ["I am not sure."]
        assert held.reasons == [FinishReason.STOP]
        assert held.usage.measures["abstained"] == 1.0
        silent = {"uncertainty": SNNE, "abstain_above": value - 0.1, "text": ""}
        two = await ask(pool, PROMPT, "abstain", silent, n=2)
        assert two.texts == ["", ""]
        assert two.usage.measures["abstained"] == 1.0
        assert two.reasons == [FinishReason.STOP] * 2
        inner = {"name": "best_of", "k": 2, "rerank": "self_certainty"}
        both = await ask(pool, PROMPT, "abstain", {"uncertainty": SNNE, "inner": inner}, temperature=1.0)
        assert set(both.usage.measures) == {"snne", "self_certainty"}
        programs = {"name": "functional_clusters", "samples": 2, "generated": 1}
        run = await ask(pool, PROMPT, "abstain", {"uncertainty": programs}, max_tokens=4)
        assert run.usage.measures.keys() == {"functional_clusters", "programs", "program_clusters"}
        with pytest.raises(TurnoutError, match="not known"):
            await ask(pool, PROMPT, "abstain", {"uncertainty": "semantic_entropy_probe"})
        stats = pool.stats()
        assert (stats.sequences, stats.used_blocks) == (0, 0)
    finally:
        await pool.close()


# The fields of a request.


def doubted(
    method: str | None = "plain", above: float | None = None, prompt: Any = PROMPT, **call: Any
) -> GenerateCall:
    uncertainty = call.pop("uncertainty", CHOICE)
    contrast, params = call.pop("contrast", None), call.pop("params", {})
    made = call_of(prompt, method, params, **call)
    return replace(made, uncertainty=uncertainty, abstain_above=above, contrast=contrast)


@pytest.mark.parametrize(
    "call",
    [
        {"method": "plain"},
        {"method": "plain", "temperature": 1.0, "n": 2},
        {"method": "speculative", "params": {"drafter": "input_copy"}},
        {"method": None, "model": "small"},
    ],
)
async def test_any_method_answers_unless_its_doubt_is_too_high(pool: LocalPool, call: dict[str, Any]) -> None:
    alone = await answer(pool, replace(doubted(**call), uncertainty=None))
    told, given = await answer(pool, doubted(**call)), await answer(pool, doubted(above=1e6, **call))
    assert told.texts == given.texts == alone.texts
    value = told.usage.measures["snne"]
    assert (told.usage.measures, given.usage.measures) == ({"snne": value}, {"snne": value, "abstained": 0.0})
    assert given.usage.method == "abstain"
    held = await answer(pool, doubted(above=-1e6, **call))
    assert set(held.texts) == {"I am not sure."}
    assert set(held.reasons) == {FinishReason.STOP}
    assert held.usage.measures == {"snne": value, "abstained": 1.0}
    assert sum("abstained: snne is " in note for note in held.usage.notes) in (1, call.get("n", 1))
    drawn = {name: meter.discarded_tokens for name, meter in held.usage.models.items() if meter.discarded_tokens}
    assert drawn.keys() == {call.get("model", "large")}
    assert pool.stats().sequences == 0


async def test_nothing_stands_where_the_answer_has_a_structure(pool: LocalPool) -> None:
    call = doubted(above=-1e6, structure=Structure(kind="regex", value="[ab]{3}"))
    held = await answer(pool, call)
    assert (held.texts, held.usage.measures["abstained"]) == ([""], 1.0)
    assert len((await answer(pool, replace(call, abstain_above=None))).text) == 3


async def test_the_fields_are_parameters_of_abstain(pool: LocalPool) -> None:
    by_fields = await answer(pool, doubted("abstain", -1e6, params={"text": "?"}))
    by_params = await ask(pool, PROMPT, "abstain", {"text": "?", "uncertainty": SNNE, "abstain_above": -1e6})
    assert by_fields.texts == by_params.texts == ["?"]
    assert by_fields.usage.params == by_params.usage.params


async def test_a_routers_method_is_doubted_too(pool: LocalPool) -> None:
    intake = replace(pool.intake(), routed=True)
    prepared = intake.prepare(doubted(None, 0.5))
    assert prepared.plan is None
    plan = intake.follow(prepared, Decision("speculative", {"draft_length": 2}, "p", "0")).plan
    assert plan is not None
    shown = plan.params.model_dump(mode="json", exclude_unset=True)
    assert shown["inner"] == {"name": "speculative", "draft_length": 2}
    assert (plan.method.name, shown["uncertainty"], shown["abstain_above"]) == ("abstain", SNNE, 0.5)


@pytest.mark.parametrize(
    ("call", "field", "said"),
    [
        (doubted(above=1.0, uncertainty=None), "abstain_above", "needs uncertainty"),
        (doubted(above=float("nan")), "abstain_above", "must be from -1e+06 to 1e+06"),
        (doubted(above=2e6), "abstain_above", "must be from"),
        (doubted(uncertainty=PartChoice.of("none")), "uncertainty", "'none' is not known; available: "),
        (doubted(uncertainty=PartChoice.of("snne", tau=0)), "uncertainty.tau", "greater than"),
        (doubted("abstain", params={"uncertainty": SNNE}), "uncertainty", "'abstain', too: give one of them"),
        (doubted("search"), "uncertainty", "'search' writes all answers of a request together"),
        (doubted(uncertainty=PartChoice.of("functional_clusters")), "method.params.uncertainty", "has no sandbox"),
        (doubted(prompt="ab", contrast=PartChoice.of("cfg")), "uncertainty", "not allowed with contrast"),
    ],
)
async def test_refusals_name_the_field(pool: LocalPool, call: GenerateCall, field: str, said: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        await answer(pool, call)
    assert (caught.value.field, said in caught.value.message) == (field, True), caught.value.message


async def test_the_fields_of_each_interface() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    job = chat_job({**body, "decoding": {"uncertainty": SNNE, "abstain_above": 0.5}})
    assert (job.calls[0].uncertainty, job.calls[0].abstain_above) == (CHOICE, 0.5)
    assert job.spelling["method.params.uncertainty"] == "decoding.uncertainty"
    for wrong, field in (({"uncertainty": {}}, "uncertainty.name"), ({"abstain_above": "x"}, "abstain_above")):
        with pytest.raises(TurnoutError) as caught:
            chat_job({**body, "decoding": wrong})
        assert caught.value.field == f"decoding.{field}"
    call = generate_call(generate_request("x", None, {"uncertainty": SNNE, "abstain_above": 0.0}))
    assert (call.uncertainty, call.abstain_above) == (CHOICE, 0.0)
    none = generate_call(generate_request("x", None, {}))
    assert (none.uncertainty, none.abstain_above) == (None, None)
