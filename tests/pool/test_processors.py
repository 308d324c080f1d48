"""Logits processors of requests: refused by name before work starts, and in force in a pool's answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.sampling_heads import SamplingHeads
from deployments.schemas import chat_job
from pool.local_pool import LocalPool
from tests.decoding.head_models import save_head
from tests.engine.harness import answer, call_of, pair_config
from tests.pool.resuming import part, rest
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("processors", "field", "said"),
    [
        (["eta_cutof"], "processors.0", "eta_cutoff"),
        (["xtc", {"name": "top_p", "p": 1.5}], "processors.1.p", "less than or equal to 1"),
        ([{"name": "logit_bias", "bias": {"-1": 1.0}}], "processors.0", "token id -1; allowed: 0 to"),
        ([{"name": "logit_bias", "bias": {"99999999": 1.0}}], "processors.0", "token id 99999999; allowed"),
        ([{"name": "top_p", "q": 0.5}], "processors.0.q", "allowed here: p"),
        (["fsd"], "processors.0", "needs temperature 0 (got 0.9)"),
        (["fsd_vector"], "processors.0", "needs temperature 0 (got 0.9)"),
        ([{"name": "mirostat", "tau": -1}], "processors.0.tau", "greater than or equal to 0"),
        ([{"name": "mirostat", "eta": float("nan")}], "processors.0.eta", "finite"),
        ([{"name": "dynamic_focus", "layers": [0]}], "processors.0.layers.0", "greater than or equal to 1"),
        ([{"name": "dynamic_focus", "sigma": 1e30}], "processors.0.sigma", "less than or equal to"),
        ([{"name": "dynamic_temperature", "low": 2.0}], "processors.0.low", "at most high"),
    ],
)
async def test_refusals_name_the_processor(pool: LocalPool, processors: list[Any], field: str, said: str) -> None:
    chosen = tuple(map(PartChoice.model_validate, processors))
    with pytest.raises(TurnoutError) as caught:
        await answer(pool, call_of("hi", "plain", temperature=0.9, max_tokens=4, processors=chosen))
    assert caught.value.field == field
    assert said in caught.value.message


async def test_processors_hold_in_answers_and_texts_become_ids(pool: LocalPool) -> None:
    prepared = pool.intake().prepare(call_of("a:b", "plain", processors=(PartChoice.of("dry", breakers=[":"]),)))
    [choice] = prepared.call.sampling.processors
    assert {pool.tokenizer.encode(":")[-1]} <= set(choice.params["breaker_ids"])
    never_twice = (PartChoice.of("no_repeat_ngram", n=1),)
    sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    free = await answer(pool, call_of("aaaa", "plain", **sampling))
    held = await answer(pool, call_of("aaaa", "plain", **sampling, processors=never_twice))
    assert len(set(free.ids)) < len(free.ids)
    assert len(set(held.ids)) == len(held.ids) == 40


async def test_a_body_lists_them_below_decoding() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    listed = [{"name": "xtc", "chance": 0.2}, "top_n_sigma"]
    job = chat_job({**body, "decoding": {"processors": listed}})
    assert job.calls[0].sampling.processors == (PartChoice.of("xtc", chance=0.2), PartChoice.of("top_n_sigma"))
    with pytest.raises(TurnoutError) as caught:
        chat_job({**body, "decoding": {"processors": ["xtc"] * 17}})
    assert caught.value.field == "decoding.processors"
    with pytest.raises(TurnoutError, match="unknown"):
        chat_job({**body, "processors": ["xtc"]})


@pytest.mark.parametrize("method", ["speculative", "pearl", "step_speculation"])
async def test_what_depends_on_more_than_tokens_is_refused_next_to_drafts(pool: LocalPool, method: str) -> None:
    call = call_of("hi", method, temperature=0.9, max_tokens=4, processors=(PartChoice.of("mirostat"),))
    with pytest.raises(TurnoutError, match=r"'mirostat' depends on each token before.*drafts.*plain") as caught:
        await answer(pool, call)
    assert caught.value.field == "processors.0"


@pytest.mark.parametrize("method", ["smc", "monitor_guided"])
@pytest.mark.parametrize("name", ["mirostat", "dynamic_focus", "autodeco"])
async def test_what_reads_more_than_logits_is_refused_where_a_method_draws_from_these(
    pool: LocalPool, method: str, name: str
) -> None:
    chosen = (PartChoice.of("top_n_sigma"), PartChoice.of(name))
    call = call_of("hi", method, temperature=0.9, max_tokens=4, processors=chosen)
    with pytest.raises(TurnoutError, match=f"'{name}' reads more than logits, and '{method}' draws") as caught:
        await answer(pool, call)
    assert caught.value.field == "processors.1"


@pytest.mark.parametrize(
    ("method", "params", "left"),
    [
        ("plain", {}, None),
        ("plain", {"model": "small"}, "small"),
        ("speculative", {"length": "fixed"}, None),
        ("entropy_adaptive", {}, "small"),
    ],
)
async def test_a_note_says_whose_tokens_heads_of_another_model_leave(
    pair_folder: Path, tmp_path: Path, method: str, params: dict[str, Any], left: str | None
) -> None:
    config = pair_config(pair_folder, block_size=8, token_budget=48)
    pools = {"pair": config.pools["pair"].model_copy(update={"artifacts": str(tmp_path)})}
    pool = LocalPool.load("pair", config.model_copy(update={"pools": pools}))
    large = pool.engines["large"]
    save_head(tmp_path, "autodeco", SamplingHeads(large.embed([0]).shape[-1], 8), large.digest)
    call = call_of("hi", method, params, temperature=0.9, max_tokens=4, processors=(PartChoice.of("autodeco"),))
    reply = await answer(pool, call)
    await pool.close()
    notes = [note for note in reply.usage.notes if "autodeco" in note and "processors" in note]
    assert notes == ([f"processors.0: autodeco leaves tokens of {left} as they are"] if left else [])


async def test_hidden_states_are_refused_where_rows_are_combined(pool: LocalPool) -> None:
    call = call_of(
        "hi", "plain", max_tokens=4, processors=(PartChoice.of("top_n_sigma"), PartChoice.of("dynamic_focus"))
    )
    with pytest.raises(TurnoutError, match="reads hidden states: not allowed with contrast") as caught:
        await answer(pool, replace(call, contrast=PartChoice.of("pmi")))
    assert caught.value.field == "processors.1"


async def test_an_answer_under_mirostat_is_made_again_with_the_surprises_it_had(pool: LocalPool) -> None:
    """What a client has holds no surprises: gone on with from its tokens, the bound would be another."""
    chosen = (PartChoice.of("mirostat", tau=1.5, eta=0.9),)
    call = call_of("hello", "plain", temperature=1.0, max_tokens=30, seed=3, ignore_eos=True, processors=chosen)
    whole = await answer(pool, call)
    client = await part(pool, call, 4)
    assert 0 < len(client.ids[0]) < 30
    await rest(pool, call, client)
    assert client.ids[0] == whole.ids
    assert client.usage is not None
    assert any("made again" in note for note in client.usage.notes)
