"""What methods report of their answers is in usage, as front ends show it."""

from __future__ import annotations

from typing import Any

from deployments.grpc_messages import usage_message
from deployments.openai_format import usage_object
from pool.local_pool import LocalPool
from tests.engine.harness import answer, call_of
from tests.engine.pools import pair_folder as pair_folder
from tests.engine.pools import pool as pool
from turnout.calls import GenerateCall
from turnout.registry import get_method
from turnout.structure import Structure

PROMPT = [*b"ab ab. ab ab."]


async def test_smc_reports_what_fits(pool: LocalPool) -> None:
    structure = Structure(kind="regex", value="[ab]{1,3}")
    call = call_of(PROMPT, "smc", {"particles": 2}, temperature=1.0, seed=5, max_tokens=6, structure=structure)
    usage = (await answer(pool, call)).usage
    assert usage.measures["smc_log_fits"] < 0.0
    assert usage_object(usage)["turnout"]["measures"] == usage.measures
    assert usage_message(usage).measures["smc_log_fits"] == usage.measures["smc_log_fits"]


async def test_the_usage_of_monitor_guided_repeats_its_answer(pool: LocalPool) -> None:
    """The end of the prompt is a dot, after which one name is known, and none when the answer is repeated."""
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
    params = {"provider": {"name": "listed", "names": {"ab": ["abba"]}}}

    def asked(params: dict[str, Any]) -> GenerateCall:
        return call_of("ab ab.", "monitor_guided", params, **sampling)

    found = await answer(pool, asked(params))
    assert found.text.startswith("abba"[: len(found.text)])
    assert found.usage.params["recorded"]["5"][0]["names"] == ["abba"]
    get_method("monitor_guided").parse(found.usage.params)
    blind = {"provider": "listed", "recorded": found.usage.params["recorded"]}
    again = await answer(pool, asked(blind))
    assert again.text == found.text
    assert (
        await answer(pool, call_of(PROMPT, "monitor_guided", {"provider": "listed"}, **sampling))
    ).text != found.text
