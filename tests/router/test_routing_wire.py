"""Routing's fields on the wire: requests over gRPC and HTTP, answers, the client, the configuration, the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.grpc_messages import generate_call, usage_message
from deployments.openai_format import usage_object
from deployments.schemas import chat_job, completion_job
from tests.checkpoint_folders import write_checkpoint
from turnout.calls import Usage
from turnout.client_messages import generate_request
from turnout.config import check_resources, parse_config
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.errors import TurnoutError
from turnout.proto import generation_pb2 as pb
from turnout.registry import names
from turnout.types import NO_LIMITS, RouteLimits
from turnout.usage_messages import usage

ROUTE = {
    "method": "plain", "params": {"model": "small"}, "policy": "static/split", "version": "0/1",
    "features": {"prompt_tokens": 5.0}, "scores": {"gain": 0.25}, "limits": {"arm_to": 0.5}, "reason": "because",
    "sampling": {"temperature": 0.5}, "suffix": " Briefly.", "arm": "a", "kept_from": "r0",
}  # fmt: skip
COST = Cost(0.5, 1.0, 1.0)
USAGE = Usage(
    1, 1, 0, {}, SpeculationMeter(), 0, CostReport(COST, COST, 0.5), "plain", {}, 7, 0.1, 0.2, route=ROUTE
)  # fmt: skip


def test_what_the_client_asks_for_arrives() -> None:
    options: Any = {"session": "s", "explain": True, "limits": {"quality": 0.5, "max_cost": 2}, "method": "auto"}
    call = generate_call(generate_request("hi", None, options))
    assert (call.session, call.explain, call.method) == ("s", True, "auto")
    assert call.limits == RouteLimits(quality=0.5, max_cost=2)
    bare = generate_call(pb.GenerateRequest(prompt="hi"))
    assert (bare.session, bare.explain, bare.limits, bare.method) == ("", False, NO_LIMITS, None)


@pytest.mark.parametrize("translate", [completion_job, chat_job])
def test_http_bodies_say_the_same(translate: Any) -> None:
    decoding = {"session": "s", "explain": True, "limits": {"max_latency_s": 3}, "method": "auto"}
    prompt = {"prompt": "hi"} if translate is completion_job else {"messages": [{"role": "user", "content": "hi"}]}
    [call] = translate({**prompt, "decoding": decoding}).calls
    assert (call.session, call.explain, call.method) == ("s", True, "auto")
    assert call.limits == RouteLimits(max_latency_s=3)


@pytest.mark.parametrize(
    ("decoding", "field", "says"),
    [
        ({"limits": {"quality": 2}}, "limits.quality", "less than or equal to 1"),
        ({"limits": {"max_cost": 0}}, "limits.max_cost", "greater than 0"),
        ({"session": "s" * 257}, "session", "at most 256 characters"),
    ],
)
def test_bad_values_are_refused_by_field(decoding: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(TurnoutError, match=says) as over_http:
        completion_job({"prompt": "hi", "decoding": decoding})
    assert over_http.value.field == f"decoding.{field}"
    with pytest.raises(TurnoutError, match=says) as over_grpc:
        generate_call(pb.GenerateRequest(prompt="hi", **decoding))
    assert over_grpc.value.field == field


def test_an_unknown_limit_is_refused_with_those_there_are() -> None:
    with pytest.raises(TurnoutError, match="allowed here: max_cost, max_latency_s, quality"):
        completion_job({"prompt": "hi", "decoding": {"limits": {"price": 1}}})
    with pytest.raises(TurnoutError, match=r"^limits: "):
        generate_request("hi", None, {"limits": {"price": 1}})


def test_a_job_takes_the_id_of_its_answer() -> None:
    single = completion_job({"prompt": "hi"}).named("cmpl-1")
    several = completion_job({"prompt": ["hi", "you"]}).named("cmpl-2")
    assert [call.request_id for call in (*single.calls, *several.calls)] == ["cmpl-1", "cmpl-2.0", "cmpl-2.1"]


def test_a_decision_reaches_the_client_whole() -> None:
    assert usage(pb.Usage.FromString(usage_message(USAGE).SerializeToString())).route == ROUTE
    assert usage(usage_message(replace(USAGE, route=None))).route is None
    assert usage_object(USAGE)["turnout"]["route"] == ROUTE


def configured(tmp_path: Path, routing: dict[str, Any]) -> None:
    write_checkpoint(tmp_path)
    models = {name: {"path": str(tmp_path)} for name in ("s", "l")}
    pool = {"small": "s", "large": "l", "default": {"name": "plain"}, "routing": routing}
    check_resources(parse_config({"models": models, "pools": {"p": pool}}))


GOOD = {"name": "static", "params": {"default": {"method": "plain"}}}
BAD = {"name": "split", "params": {"arms": {"a": {"share": 0.5, "method": "plain"}}}}


@pytest.mark.parametrize(
    ("routing", "field", "says"),
    [
        ({"policy": {"name": "magic"}}, "policy.name", "'magic' is not known; available: "),
        ({"policy": BAD}, "policy.params", "shares must add up to 1"),
        ({"policy": GOOD, "shadow": {"share": 0.5, "policy": BAD}}, "shadow.policy.params", "shares must add up"),
        ({"policy": GOOD, "shadow": {"share": 2, "policy": GOOD}}, "shadow.share", "less than or equal to 1"),
        ({"policy": GOOD, "log": {"path": "x", "max_bytes": 1}}, "log.max_bytes", "4096"),
        ({"policy": GOOD, "sticky": {"seconds": 0}}, "sticky.seconds", "greater than 0"),
        ({}, "policy", "required"),
    ],
)
def test_a_bad_configuration_is_refused_by_field(
    tmp_path: Path, routing: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(TurnoutError) as caught:
        configured(tmp_path, routing)
    assert caught.value.field == f"pools.p.routing.{field}"
    assert says in caught.value.message


def test_a_good_configuration_is_accepted(tmp_path: Path) -> None:
    configured(tmp_path, {"policy": GOOD, "sticky": {}, "log": {"path": "x"}, "shadow": {"share": 0.5, "policy": GOOD}})
    assert (tmp_path / "config.json").is_file()
    assert not Path("x").exists()  # checking opens no log


def test_every_policy_stands_in_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)) == names("router.policies")
