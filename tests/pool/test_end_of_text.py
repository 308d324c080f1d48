"""Answers end where Hugging Face `generate` ends: at the tokens that one of the checkpoint's files names."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pool.local_pool import LocalPool
from pool.text import TextTokenizer
from tests.engine.harness import answer, call_of, pair_config
from turnout.calls import EndToken
from turnout.types import FinishReason

PROMPT = [65, 66, 67]
LONGEST = 24
TOKENIZERS_OWN = 256  # <|end|>
OUTSIDE = 4096


@pytest.fixture
def folder(pair_folder: Path, tmp_path: Path) -> Path:
    """The pair's checkpoints, to be changed."""
    return copytree(pair_folder, tmp_path / "pair")


def declare(checkpoint: Path, generation: dict[str, Any] | None, config: dict[str, Any]) -> None:
    """Let a checkpoint's files say this and nothing else of the ends of texts; no generation: no such file."""
    file = checkpoint / "config.json"
    values = json.loads(file.read_text())
    values.pop("eos_token_id", None)
    file.write_text(json.dumps(values | config))
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (checkpoint / "generation_config.json").write_text(json.dumps(generation))


def generated(checkpoint: Path) -> list[int]:
    """The tokens of Hugging Face `generate`, the end included."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=LONGEST)
    return tokens[0, len(PROMPT) :].tolist()


def distinct(tokens: list[int]) -> list[int]:
    """Tokens in the order in which they come first."""
    return list(dict.fromkeys(tokens))


@pytest.mark.parametrize(
    ("generation", "config", "source"),
    [
        ({"eos_token_id": "late"}, {"eos_token_id": "early"}, "generation_config.json"),
        ({"eos_token_id": ["later", "late"]}, {"eos_token_id": TOKENIZERS_OWN}, "generation_config.json"),
        (None, {"eos_token_id": "late"}, "config.json"),
        (None, {"eos_token_id": ["later", "late"]}, "config.json"),
        (None, {"eos_token_id": [OUTSIDE, "late"]}, "config.json"),
    ],
)
async def test_a_pool_answers_as_generate_does(folder: Path, generation: Any, config: Any, source: str) -> None:
    large = folder / "large"
    declare(large, None, {})
    whole = generated(large)
    assert len(whole) == LONGEST
    named = dict(zip(("early", "late", "later"), distinct(whole)[1:], strict=False))

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        return [filled(each) for each in value] if isinstance(value, list) else named.get(value, value)

    declare(large, filled(generation), filled(config))
    expected = generated(large)
    assert expected == whole[: whole.index(named["late"]) + 1]
    pool = LocalPool.load("pair", pair_config(folder))
    got = await answer(pool, call_of(PROMPT, "plain", temperature=0.0, max_tokens=LONGEST))
    descriptions = pool.models()
    await pool.close()
    assert [token.id for token in got.answers[0]] == expected
    assert got.reasons == [FinishReason.STOP]
    for each in descriptions:
        assert named["late"] in [end.id for end in each.ends]
        assert OUTSIDE not in [end.id for end in each.ends]
        assert all(end.text == pool.tokenizer.name_of(end.id) for end in each.ends)
        assert each.ends_source == source


# What generation_config.json and config.json say, what holds, and what says so.
SOURCES = [
    ({"eos_token_id": 3}, {"eos_token_id": 7}, {3}, "generation_config.json"),
    ({"eos_token_id": [3, 4]}, {}, {3, 4}, "generation_config.json"),
    (None, {"eos_token_id": 7}, {7}, "config.json"),
    (None, {"eos_token_id": [7, 8]}, {7, 8}, "config.json"),
    ({"eos_token_id": [3, OUTSIDE, -1]}, {}, {3}, "generation_config.json"),
]
# Where `generate` runs to its limit: the next source that names a token of the model.
ENDLESS = [
    ({}, {"eos_token_id": 7}, {7}, "config.json"),
    ({"eos_token_id": None}, {"eos_token_id": 7}, {7}, "config.json"),
    ({"eos_token_id": []}, {"eos_token_id": 7}, {7}, "config.json"),
    ({"eos_token_id": OUTSIDE}, {"eos_token_id": 7}, {7}, "config.json"),
    ({"bos_token_id": 1}, {}, {TOKENIZERS_OWN}, "tokenizer"),
    (None, {}, {TOKENIZERS_OWN}, "tokenizer"),  # not the 2 that a LlamaConfig has by default
    (None, {"eos_token_id": None}, {TOKENIZERS_OWN}, "tokenizer"),
    (None, {"eos_token_id": -1}, {TOKENIZERS_OWN}, "tokenizer"),
]


@pytest.mark.parametrize(("generation", "config", "ids", "source"), SOURCES + ENDLESS)
def test_one_source_names_the_ends(folder: Path, generation: Any, config: Any, ids: set[int], source: str) -> None:
    checkpoint = folder / "small"
    declare(checkpoint, generation, config)
    tokenizer = TextTokenizer(checkpoint)
    assert (tokenizer.eos_ids, tokenizer.ends.source) == (ids, source)
    declared = AutoModelForCausalLM.from_pretrained(checkpoint).generation_config.eos_token_id
    met = {each for each in (declared if isinstance(declared, list) else [declared]) if each in range(261)}
    assert met == (ids if (generation, config, ids, source) in SOURCES else set())


def test_ends_of_a_nested_configuration_are_found(folder: Path) -> None:
    declare(folder / "small", None, {"text_config": {"eos_token_id": 9}})
    ends = TextTokenizer(folder / "small").ends
    assert (ends.ids, ends.source) == ({9}, "config.json")


def test_an_end_that_only_the_text_side_of_a_wrapper_has_counts(folder: Path) -> None:
    declare(folder / "small", {"eos_token_id": 300}, {"text_config": {"vocab_size": 320}})
    assert TextTokenizer(folder / "small").eos_ids == {300}


def test_where_nothing_names_an_end_there_is_none(folder: Path) -> None:
    checkpoint = folder / "small"
    declare(checkpoint, None, {})
    file = checkpoint / "tokenizer_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in values.items() if key != "eos_token"}))
    ends = TextTokenizer(checkpoint).ends
    assert (ends.ids, ends.source, ends.described(str)) == (frozenset(), "", {"ends": (), "ends_source": ""})


async def test_the_large_model_decides_for_its_pool_and_the_operator_reads_it(folder: Path) -> None:
    declare(folder / "large", None, {"eos_token_id": 70})
    declare(folder / "small", {"eos_token_id": [80, 81]}, {})
    pool = LocalPool.load("pair", pair_config(folder))
    descriptions, notes = pool.models(), pool.notes
    await pool.close()
    assert [each.ends for each in descriptions] == [(EndToken(70, pool.tokenizer.name_of(70)),)] * 3
    (note,) = [note for note in notes if "ends texts" in note]
    assert note == (
        "small ends texts with tokens [80, 81] (generation_config.json), large with [70] (config.json),"
        " which hold for both"
    )
