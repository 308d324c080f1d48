"""Candidates and doubts through a pool: asked for in the call, numbered by answer, the same over HTTP and gRPC."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from deployments.fan_out import combine
from deployments.grpc_messages import usage_message
from deployments.openai_format import usage_object
from deployments.openapi.document import document
from pool.local_pool import LocalPool
from tests.engine.harness import Reply, answer, call_of
from turnout.usage_messages import usage

PROMPT = list(range(65, 65 + 9))
SNNE = {"name": "snne", "samples": 3}


@cache
def usage_schema() -> Any:
    schema = {"$ref": "#/components/schemas/UsageObject", "components": document(batches=False)["components"]}
    return jsonschema.Draft202012Validator(schema)


async def asked(pool: LocalPool, method: str, params: dict[str, Any], candidates: bool = True, **options: Any) -> Reply:
    call = replace(call_of(PROMPT, method, params, max_tokens=6, **options), candidates=candidates)
    reply = await answer(pool, call)
    shown = usage_object(reply.usage)
    usage_schema().validate(json.loads(json.dumps(shown, allow_nan=False)))
    again = usage(usage_message(reply.usage))
    assert (again.candidates, again.doubts) == (reply.usage.candidates, reply.usage.doubts)
    return reply


async def test_each_answer_has_the_candidates_it_was_chosen_from(pool: LocalPool) -> None:
    reply = await asked(pool, "best_of", {"k": 3, "rerank": "logprob"}, temperature=1.0, n=2)
    assert [each.answers for each in reply.usage.candidates] == [(0,), (1,)]
    for index, found in enumerate(reply.usage.candidates):
        [taken] = [each for each in found.candidates if each.answers]
        assert (taken.answers, taken.text) == ((index,), reply.texts[index])
        assert taken.score == max(each.score for each in found.candidates if each.score is not None)
    silent = await asked(pool, "best_of", {"k": 3, "rerank": "logprob"}, False, temperature=1.0, n=2)
    assert (silent.texts, silent.usage.candidates) == (reply.texts, ())


async def test_hypotheses_are_those_that_answers_are_taken_from(pool: LocalPool) -> None:
    reply = await asked(pool, "search", {"width": 4}, n=3)
    [found] = reply.usage.candidates
    assert found.answers == (0, 1, 2)
    assert [each.answers for each in found.candidates][:3] == [(0,), (1,), (2,)]
    assert [each.text for each in found.candidates][:3] == reply.texts
    assert found.graph is not None
    for each, tokens in zip(found.candidates, reply.answers, strict=False):
        assert [found.graph.nodes[place].id for place in each.path] == [token.id for token in tokens]


async def test_doubt_says_what_it_is_and_what_became_of_the_answer(pool: LocalPool) -> None:
    reported = await asked(pool, "abstain", {"uncertainty": SNNE}, False)
    [doubt] = reported.usage.doubts
    assert (doubt.part, doubt.unit, doubt.outcome, doubt.limit) == ("snne", "nats", "reported", None)
    assert doubt.value == reported.usage.measures["snne"]
    assert doubt.least is not None
    assert doubt.greatest is not None
    assert doubt.least - 1e-6 <= doubt.value <= doubt.greatest + 1e-6
    held = await asked(pool, "abstain", {"uncertainty": SNNE, "abstain_above": doubt.value - 0.1}, n=2)
    assert [(each.answer, each.outcome) for each in held.usage.doubts] == [(0, "abstained"), (1, "abstained")]
    assert [(each.slot, each.answers, len(each.candidates)) for each in held.usage.candidates] == [
        ("uncertainty", (0,), 3),
        ("uncertainty", (1,), 3),
    ]
    kept = await asked(pool, "abstain", {"uncertainty": SNNE, "abstain_above": doubt.value + 0.1})
    assert [(each.limit, each.outcome) for each in kept.usage.doubts] == [(doubt.value + 0.1, "kept")]
    for threshold, outcome in ((-1000.0, "kept"), (1000.0, "deferred")):
        params = {"uncertainty": SNNE, "threshold": threshold, "keep_cut": True}
        [of_small] = (await asked(pool, "cascade", params, False)).usage.doubts
        assert (of_small.limit, of_small.outcome) == (-threshold, outcome)


async def test_candidates_of_several_prompts_stand_together(pool: LocalPool) -> None:
    one = (await asked(pool, "best_of", {"k": 2}, temperature=1.0)).usage
    two = replace(one, candidates=tuple(each.numbered(1) for each in one.candidates))
    assert [each.answers for each in combine([two, one]).candidates] == [(0,), (1,)]


@pytest.mark.parametrize("method", ["plain", "speculative"])
async def test_a_method_that_chooses_among_nothing_reports_nothing(pool: LocalPool, method: str) -> None:
    reply = await asked(pool, method, {})
    assert (reply.usage.candidates, reply.usage.doubts) == ((), ())
