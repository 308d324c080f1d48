"""What holds where a request names no sampling parameters: the pool's settings, then generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pool.local_pool import LocalPool
from pool.request_defaults import RequestDefaults, generation_sampling
from tests.near_pair import save_near_pair
from turnout.calls import Chunk, GenerateCall, Usage
from turnout.chat_template import TemplateOptions
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig, parse_config
from turnout.errors import TurnoutError
from turnout.pool_config import SamplingConfig
from turnout.types import SamplingParams

FROM_FILE = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.1}


def filled(defaults: RequestDefaults, **sampling: Any) -> SamplingParams:
    call = defaults.applied(GenerateCall("r", "p", SamplingParams(**sampling)))
    assert defaults.applied(call) == call  # as on a second replica
    return call.sampling


def test_a_request_overrides_the_pool_and_the_pool_the_file() -> None:
    pool = PoolConfig(large="a", sampling=SamplingConfig(top_k=3, min_p=0.1), max_answer_tokens=50)
    defaults = RequestDefaults.of(pool, FROM_FILE)
    used = filled(defaults, temperature=1.0, min_p=0.0)
    assert (used.temperature, used.min_p, used.top_k, used.repetition_penalty, used.max_tokens) == (1, 0, 3, 1.1, 50)
    assert filled(defaults, max_tokens=60).max_tokens == 60


def template(pool: PoolConfig, **options: Any) -> dict[str, Any]:
    defaults = RequestDefaults.of(pool, {})
    call = defaults.applied(GenerateCall("r", "p", SamplingParams(), template=TemplateOptions(**options)))
    assert defaults.applied(call) == call
    return call.template.kwargs


def test_variables_of_a_request_win_over_those_of_its_effort_and_these_over_the_pools() -> None:
    pool = PoolConfig(large="a", chat_template_kwargs={"enable_thinking": True, "style": "dry"})
    assert template(pool) == {"enable_thinking": True, "style": "dry"}
    off = {"enable_thinking": False, "thinking": False, "style": "dry"}
    assert template(pool, effort="none") == off
    assert template(pool, effort="none", kwargs={"style": "wet"}) == {**off, "style": "wet"}
    assert template(PoolConfig(large="a"), effort="high")["reasoning_effort"] == "high"
    own = pool.model_copy(update={"reasoning_effort": {"deep": {"depth": 9}}})
    assert template(own, effort="deep") == {"enable_thinking": True, "style": "dry", "depth": 9}
    with pytest.raises(TurnoutError, match=r"reasoning_effort: must be one of deep \(got 'high'\)"):
        template(own, effort="high")


def test_the_configuration_refuses_variables_that_are_the_servers() -> None:
    for place, value in (("chat_template_kwargs", {"tools": []}), ("reasoning_effort.low", {"tokenize": True})):
        name, _, effort = place.partition(".")
        pool = {"large": "a", name: {effort: value} if effort else value}
        with pytest.raises(TurnoutError) as refused:
            parse_config({"models": {"a": {"path": "demo:small"}}, "pools": {"p": pool}})
        assert refused.value.field == f"pools.p.{place}.{min(value)}"


def test_only_what_the_file_says_counts_and_what_no_request_may_have_is_left_out(tmp_path: Path) -> None:
    assert generation_sampling(tmp_path) == ({}, [])
    said = {**FROM_FILE, "top_p": 1.5, "top_k": -1, "min_p": None, "eos_token_id": 2, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    values, notes = generation_sampling(tmp_path)
    assert values == {**FROM_FILE, "top_k": 0}
    assert len(notes) == 1
    assert notes[0].startswith("generation_config.json: top_p = 1.5 is not used (")


@pytest.mark.parametrize(("name", "value"), [("temperature", 3.0), ("top_p", 0.0), ("repetition_penalty", -1.0)])
def test_the_configuration_refuses_what_no_request_may_have(name: str, value: float) -> None:
    values = {"models": {"a": {"path": "demo:small"}}, "pools": {"p": {"large": "a", "sampling": {name: value}}}}
    with pytest.raises(TurnoutError) as refused:
        parse_config(values)
    assert refused.value.field == f"pools.p.sampling.{name}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_near_pair(folder)
    file = folder / "large" / "generation_config.json"
    said = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**said, **FROM_FILE}))
    return folder


async def answered(folders: Path, sampling: SamplingParams, **pool: Any) -> tuple[list[int], Usage]:
    models = {role: ModelConfig(path=str(folders / role), dtype="float32") for role in ("small", "large")}
    config = TurnoutConfig(models=models, pools={"p": PoolConfig(small="small", large="large", **pool)})
    loaded = LocalPool.load("p", config)
    tokens: list[int] = []
    usage = None
    try:
        async for event in loaded.generate(GenerateCall("r", "p", sampling, prompt="abc", method="plain")):
            if isinstance(event, Chunk):
                tokens += [token.id for token in event.tokens]
            elif isinstance(event, Usage):
                usage = event
    finally:
        await loaded.close()
    assert usage is not None
    return tokens, usage


async def test_an_answer_is_written_with_them_and_its_usage_says_so(folders: Path) -> None:
    given = SamplingParams(seed=5, ignore_eos=True)
    tokens, usage = await answered(folders, given, max_answer_tokens=12)
    assert len(tokens) == 12
    assert {name: usage.sampling[name] for name in FROM_FILE} == FROM_FILE
    assert (usage.sampling["max_tokens"], usage.sampling["top_p"]) == (12, 1.0)
    explicit = given.model_copy(update={**FROM_FILE, "max_tokens": 12})
    assert (await answered(folders, explicit))[0] == tokens


async def test_without_a_limit_an_answer_may_fill_the_context(folders: Path) -> None:
    config = json.loads((folders / "large" / "config.json").read_text())
    tokens, usage = await answered(folders, SamplingParams(seed=5, ignore_eos=True, temperature=0.0))
    assert usage.prompt_tokens + len(tokens) == config["max_position_embeddings"]
