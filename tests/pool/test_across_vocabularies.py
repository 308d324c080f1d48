"""A small model with another vocabulary: it drafts, the answer is the large model's, and nothing else may ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from decoding.search.fusion import FusionSearch
from decoding.translated_sequence import TranslatedSequence
from pool.components import open_parts
from pool.local_pool import LocalPool
from tests.engine.harness import answer, ask, ask_all, call_of, pair_config, random_prompts, shrink, until
from tests.foreign_pair import save_foreign_pair
from training.random_models import BYTE_VOCAB
from turnout.calls import ChatMessage, Chunk, ScoreCall
from turnout.config import PoolConfig, TurnoutConfig
from turnout.errors import TurnoutError
from turnout.structure import Structure

DRAFTERS = ("text_chain", "shared_vocabulary")
TEXTS = ["The sea, the shore: here they rest.", "naïve café", "日本の首都", "Привет, мир", "मौसम कैसा है", "مرحبا"]
SPEC = {"drafter": "text_chain", "length": "fixed", "draft_length": 4}


def config_of(folder: Path, default: dict[str, Any] | None = None, **engine: int) -> TurnoutConfig:
    config = pair_config(folder, **{"block_size": 8, "token_budget": 48, **engine})
    chosen = default or {"name": "speculative", "params": SPEC}
    pools = {"pair": PoolConfig.model_validate({"small": "small", "large": "large", "default": chosen})}
    return config.model_copy(update={"pools": pools})


@pytest.fixture(scope="session")
def foreign(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_foreign_pair(pair_folder, tmp_path_factory.mktemp("foreign"))


@pytest.fixture
async def mixed(foreign: Path) -> AsyncIterator[LocalPool]:
    loaded = LocalPool.load("pair", config_of(foreign))
    yield loaded
    assert loaded.stats().sequences == 0
    await until(lambda: loaded.stats().used_blocks == 0)
    for model in loaded.engines.values():
        model.pool.check_integrity()
    await loaded.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_answer_is_the_large_models(mixed: LocalPool, temperature: float) -> None:
    """Texts in six scripts and prompts of any tokens, all in one batch with plain decoding."""
    prompts = [*TEXTS, *random_prompts(2, 60)]
    sampling = {"temperature": temperature, "max_tokens": 16}
    plain = await ask_all(mixed, [call_of(each, seed=n, **sampling) for n, each in enumerate(prompts)])
    others = [call_of(each, seed=n, **sampling) for n, each in enumerate(prompts[:3])]
    calls = [
        call_of(each, "speculative", {"drafter": drafter, "length": "fixed", "draft_length": 4}, seed=n, **sampling)
        for drafter in DRAFTERS
        for n, each in enumerate(prompts)
    ]
    replies = await ask_all(mixed, [*calls, *others])
    assert [each.ids for each in replies] == [each.ids for each in [*plain, *plain, *plain[:3]]]
    for own in (replies[: len(prompts)], replies[len(prompts) : len(calls)]):
        accepted = sum(each.usage.speculation.accepted_tokens for each in own)
        assert accepted > 0.1 * sum(each.usage.speculation.draft_tokens for each in own)


async def test_a_verifier_of_drawn_candidates(mixed: LocalPool) -> None:
    spec = {"drafter": "shared_vocabulary", "length": "fixed", "verifier": "rejection"}
    greedy = await ask(mixed, TEXTS[0])
    assert (await ask(mixed, TEXTS[0], "speculative", spec)).ids == greedy.ids
    drawn = await ask(mixed, TEXTS[0], "speculative", spec, temperature=0.7, seed=3)
    assert drawn.usage.speculation.accepted_tokens > 0


async def test_stop_strings_structures_and_penalties(mixed: LocalPool) -> None:
    long = await ask(mixed, TEXTS[0], max_tokens=24)
    stop = long.text[14:16]
    number = Structure.model_validate({"regex": "[0-9]{4,6}"})
    options: list[dict[str, Any]] = [
        {"stop": (stop,)},
        {"structure": number},
        {"repetition_penalty": 1.4, "logit_bias": {101: -5.0}},
        {"stop": ("</s>",), "temperature": 0.7, "seed": 5},
    ]
    for option in options:
        plain = await ask(mixed, TEXTS[0], max_tokens=24, **option)
        for drafter in DRAFTERS:
            reply = await ask(
                mixed, TEXTS[0], "speculative", {"drafter": drafter, "length": "fixed"}, max_tokens=24, **option
            )
            assert (reply.ids, reply.text, reply.reasons) == (plain.ids, plain.text, plain.reasons), option


async def test_a_conversation_is_read_in_the_small_models_own_template(mixed: LocalPool) -> None:
    """And in the pool's, as text, where it has none; the large model's answer either way."""
    seen: list[list[int]] = []
    kept = TranslatedSequence.follow

    def noted(self: TranslatedSequence, seq: Any) -> Any:
        seen.append(list(self.tokens))
        return kept(self, seq)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TranslatedSequence, "follow", noted)
        turns = [("user", "where"), ("assistant", "there"), ("user", "<|end|></s>?")]
        messages = tuple(ChatMessage(*turn) for turn in turns)
        plain = await answer(mixed, call_of(None, messages=messages, max_tokens=20))
        reply = await answer(mixed, call_of(None, "speculative", messages=messages, max_tokens=20))
    assert reply.ids == plain.ids
    own = mixed.foreign["small"]
    assert own.decode(seen[0], special=True) == "[user]where[assistant]there[user]<|end|></s>?[assistant]"
    assert own.eos_ids.isdisjoint(seen[0])


async def test_special_tokens_of_a_prompt_never_become_text(mixed: LocalPool) -> None:
    ids = [256, *mixed.tokenizer.encode("here"), 258, 256]
    seq_tokens: list[int] = []
    kept = TranslatedSequence.follow

    def noted(self: TranslatedSequence, seq: Any) -> Any:
        tail = kept(self, seq)
        seq_tokens[:] = seq_tokens or [*self.tokens, *(tail or ())]
        return tail

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TranslatedSequence, "follow", noted)
        await ask(mixed, ids, "speculative", SPEC, max_tokens=4)
    # The end as its own end, "he" and "re", nothing for a token it has no counterpart of, the end.
    assert seq_tokens == [1, BYTE_VOCAB, BYTE_VOCAB + 1, 1]


async def test_no_room_in_memory_and_cancellation_leave_nothing(foreign: Path) -> None:
    loaded = LocalPool.load("pair", config_of(foreign, block_size=4, token_budget=16))
    for model in loaded.engines.values():
        shrink(model, 15)
        model.max_length = 60  # as it is where so much memory is there from the start
    prompts = random_prompts(6, 30, seed=3)
    plain = [(await answer(loaded, call_of(each, max_tokens=12))).ids for each in prompts]
    kinds = [DRAFTERS[n % 2] for n in range(len(prompts))]
    calls = [
        call_of(each, "speculative", {"drafter": drafter, "length": "fixed", "draft_length": 3}, max_tokens=12)
        for each, drafter in zip(prompts, kinds, strict=True)
    ]
    assert [each.ids for each in await ask_all(loaded, calls)] == plain

    async def give_up(call: Any, after: int) -> None:
        events = loaded.generate(call)
        async for event in events:
            after -= isinstance(event, Chunk)
            if after <= 0:
                break
        await events.aclose()  # type: ignore[attr-defined]

    await asyncio.gather(*(give_up(call, 1 + n % 4) for n, call in enumerate(calls)))
    assert loaded.stats().sequences == 0
    await until(lambda: loaded.stats().used_blocks == 0)
    for model in loaded.engines.values():
        model.pool.check_integrity()
    await loaded.close()


async def test_a_shorter_context_ends_the_drafts_and_not_the_answer(foreign: Path) -> None:
    config = config_of(foreign)
    large = LocalPool.load("pair", config)
    small = large.engines["small"]
    small.max_length = 36
    assert large.max_length == large.engines["large"].max_length > 40
    for drafter in DRAFTERS:
        plain = await ask(large, TEXTS[0], max_tokens=60)
        reply = await ask(large, TEXTS[0], "speculative", {"drafter": drafter, "length": "fixed"}, max_tokens=60)
        assert reply.ids == plain.ids
        assert 0 < reply.usage.speculation.drafted_at[0] <= 10  # rounds with a draft
    await large.close()


async def test_what_needs_one_vocabulary_is_refused_by_name(mixed: LocalPool) -> None:
    asked: list[tuple[str, dict[str, Any], str, str]] = [
        ("entropy_adaptive", {}, "method", "'entropy_adaptive' needs one vocabulary, and that of 'small' (small)"),
        ("cascade", {}, "method", "'cascade' needs one vocabulary"),
        ("pearl", {}, "method", "'pearl' needs one vocabulary"),
        ("plain", {"model": "small"}, "method.params.model", "'plain' needs one vocabulary"),
        ("search", {"model": "small"}, "method.params.model", "'search' needs one vocabulary"),
        ("speculative", {"drafter": "model_chain"}, "method.params.drafter", "'model_chain' needs one vocabulary"),
        ("speculative", {"drafter": "vocab_trim"}, "method.params.drafter", "use shared_vocabulary, text_chain, or"),
        ("speculative", {"drafter": ["copyspec", "model_tree"]}, "method.params.drafter.1", "'model_tree' needs one"),
    ]
    for method, params, field, says in asked:
        with pytest.raises(TurnoutError) as caught:
            await ask(mixed, "here", method, params)
        assert (caught.value.field, says in caught.value.message) == (field, True), caught.value.message
    with pytest.raises(TurnoutError, match="'small' has another vocabulary than 'pair'"):
        await answer(mixed, call_of("here", None, model="small"))
    with pytest.raises(TurnoutError, match="'small' has another vocabulary than the pool"):
        await mixed.score(ScoreCall("r", "small", "a", ("b",)))
    # What does not ask the small model runs as ever.
    assert (await ask(mixed, "here", "speculative", {"drafter": "copyspec"})).ids == (await ask(mixed, "here")).ids
    automatic = await answer(mixed, call_of("here", "speculative", {}))
    assert automatic.ids == (await ask(mixed, "here")).ids


async def test_a_second_model_rescores_a_beam_by_bytes(mixed: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the conversation in its own template, and writes nothing; at weight 0 it is not asked."""
    prompts: list[Any] = []
    root = FusionSearch._root

    def seen(self: FusionSearch, *given: Any) -> Any:
        prompts.append(root(self, *given))
        return prompts[-1]

    monkeypatch.setattr(FusionSearch, "_root", seen)
    options: dict[str, Any] = {"n": 2, "max_tokens": 10, "ignore_eos": True}
    options["logit_bias"] = dict.fromkeys(mixed.tokenizer.encode("he")[-2:], 6.0)
    beam = await ask(mixed, TEXTS[0], "search", {"width": 3}, **options)
    off = await ask(mixed, TEXTS[0], "search", {"width": 3, "search": {"name": "fusion", "weight": 0.0}}, **options)
    assert off.texts == beam.texts
    assert "small" not in off.usage.models
    messages = (ChatMessage("user", "where the sea"),)
    call = call_of(
        None, "search", {"width": 3, "search": {"name": "fusion", "weight": 0.9}}, messages=messages, **options
    )
    fused = await answer(mixed, call)
    own, meter = mixed.foreign["small"], fused.usage.models["small"]
    [prompt] = prompts
    assert own.decode(prompt.tokens, special=True) == "[user]where the sea[assistant]"
    assert (meter.prompt_tokens, meter.generated_tokens) == (len(prompt.tokens), 0)


async def test_models_say_so(mixed: LocalPool) -> None:
    said = {each.name: (each.other_vocabulary, each.vocab_size, each.ends) for each in mixed.models()}
    assert {name: each[0] for name, each in said.items()} == {"pair": False, "small": True, "large": False}
    assert (said["small"][1], said["pair"][1]) == (269, 261)
    assert [(end.id, end.text) for end in said["small"][2]] == [(1, "</s>")]
    assert any("do not share one vocabulary" in note for note in mixed.notes)


@pytest.mark.parametrize(
    ("default", "says"),
    [
        ({"name": "entropy_adaptive"}, r"pools\.pair\.default: 'entropy_adaptive' needs one vocabulary"),
        ({"name": "plain", "params": {"model": "small"}}, r"pools\.pair\.default\.params\.model: 'plain' needs one"),
        ({"name": "speculative", "params": {"drafter": "model_chain"}}, "'model_chain' needs one vocabulary"),
    ],
)
def test_a_default_that_needs_one_vocabulary_is_refused_at_the_start(
    foreign: Path, default: dict[str, Any], says: str
) -> None:
    with pytest.raises(TurnoutError, match=says):
        LocalPool.load("pair", config_of(foreign, default))


def test_routing_by_the_small_model_is_refused(foreign: Path) -> None:
    config = config_of(foreign)
    pool = {**config.pools["pair"].model_dump(exclude_unset=True), "routing": {"policy": {"name": "static"}}}
    config = config.model_copy(update={"pools": {"pair": PoolConfig.model_validate(pool)}})
    with pytest.raises(TurnoutError, match=r"pools\.pair\.routing: needs one vocabulary"):
        LocalPool.load("pair", config)


def test_a_tokenizer_without_bytes_of_its_tokens_is_refused(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.text.TextTokenizer.drafting_vocabulary", None)
    with pytest.raises(TurnoutError, match=r"'small' and 'large' do not share one vocabulary .* no fast tokenizer"):
        open_parts("pair", config_of(foreign))
