"""What holds where a request names no sampling parameters: the pool's settings, then generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pool.local_pool import LocalPool
from pool.sampling_defaults import SamplingDefaults, generation_sampling
from tests.near_pair import save_near_pair
from turnout.calls import Chunk, GenerateCall, Usage
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig, parse_config
from turnout.errors import TurnoutError
from turnout.pool_config import SamplingConfig
from turnout.types import SamplingParams

FROM_FILE = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.1}


def test_a_request_overrides_the_pool_and_the_pool_the_file() -> None:
    pool = PoolConfig(large="a", sampling=SamplingConfig(top_k=3, min_p=0.1), max_answer_tokens=50)
    defaults = SamplingDefaults.of(pool, FROM_FILE)
    used = defaults.applied(SamplingParams(temperature=1.0, min_p=0.0))
    assert (used.temperature, used.min_p, used.top_k, used.repetition_penalty, used.max_tokens) == (1, 0, 3, 1.1, 50)
    assert defaults.applied(used) == used  # as on a second replica
    assert defaults.applied(SamplingParams(max_tokens=60)).max_tokens == 60


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
