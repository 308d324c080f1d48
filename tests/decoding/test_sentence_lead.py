"""FoReaL-Decoding (seed 202): who pays for reading, who may end the answer, and where leading helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from decoding.fakes import ListText, TableModel
from decoding.model import ReadSpec
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence

# Token 0 ends a sentence, tokens 1 to 8 are words; 9 ends the answer.
END = 9
TEXTS = ListText([".", *(f" {letter}" for letter in "abcdefgh"), "</s>"])


def say(choose: Callable[[list[int]], int]) -> Callable[[list[int]], torch.Tensor]:
    """Logits of a model that says just this."""

    def logits(tokens: list[int]) -> torch.Tensor:
        scores = torch.zeros(len(TEXTS.texts))
        scores[choose(tokens)] = 9.0
        return scores

    return logits


def in_sentence(tokens: list[int]) -> int:
    """Words since the last full stop of what was generated after a prompt of one token."""
    written = tokens[1:][::-1]
    return written.index(0) if 0 in written else len(written)


def sentences(words: int) -> Callable[[list[int]], int]:
    """Words of rising number, then a full stop."""
    return lambda tokens: 0 if in_sentence(tokens) == words else 1 + in_sentence(tokens)


async def test_flops_count_the_leaders_reading_of_what_the_other_wrote(run: Any) -> None:
    """Sentences of 4 words and a full stop, the leader writes 2: each leader's turn reads the 3 tokens in between."""
    small = TableModel("small", say(sentences(4)), len(TEXTS.texts), num_parameters=3)
    large = TableModel("large", say(sentences(4)), len(TEXTS.texts), num_parameters=10)
    done = await run(
        "sentence_lead", small, large, {"lead_tokens": 2}, prompt=(1,), max_tokens=20, temperature=0, tokenizer=TEXTS
    )
    assert done.owners == "LLSSS" * 4
    led, followed = done.seq.meter.models["large"], done.seq.meter.models["small"]
    # A turn's first forward is a decode step for its last token, catch-up for the ones before.
    assert (led.generated_tokens, led.prompt_tokens, led.catchup_tokens) == (8, 1, 3 * 3)
    assert (followed.generated_tokens, followed.prompt_tokens, followed.catchup_tokens) == (12, 1, 1 + 3 * 2)
    assert led.flops == 2 * 10 * (led.prompt_tokens + led.decode_tokens + led.catchup_tokens)
    # Nearly every token of the text passed through the leader: 19 of 20 but for those it has not come to read.
    assert led.processed_tokens == 1 + 16
    assert led.flops > 2 * 10 * led.generated_tokens * 1.9


@pytest.mark.parametrize("ends", ["small", "large"])
async def test_an_end_by_either_model_ends_the_answer(run: Any, ends: str) -> None:
    def model(name: str) -> TableModel:
        def choose(tokens: list[int]) -> int:
            return END if name == ends and tokens.count(0) >= 2 else sentences(3)(tokens)

        return TableModel(name, say(choose), len(TEXTS.texts))

    done = await run(
        "sentence_lead", model("small"), model("large"), {"lead_tokens": 2},
        prompt=(1,), max_tokens=40, temperature=0, tokenizer=TEXTS, eos=(END,),
    )  # fmt: skip
    assert done.ids[-1] == END
    assert done.seq.generated[-1].source == ends
    assert done.ids.count(0) == 2
    assert done.seq.finish_reason == "stop"


async def test_a_leader_of_short_sentences_shortens_the_answer(run: Any) -> None:
    """The length effect: who opens a sentence decides how many there are; the follower only finishes them."""

    def opener(name: str, most: int) -> TableModel:
        def choose(tokens: list[int]) -> int:
            return END if tokens[-1] == 0 and tokens.count(0) >= most else sentences(3)(tokens)

        return TableModel(name, say(choose), len(TEXTS.texts))

    small, large = opener("small", 9), opener("large", 3)
    lengths = []
    for chance in (0.0, 1.0):
        done = await run(
            "sentence_lead", small, large, {"lead_tokens": 1, "lead_probability": chance},
            prompt=(1,), max_tokens=60, temperature=0, tokenizer=TEXTS, eos=(END,),
        )  # fmt: skip
        lengths.append(len(done.ids))
    assert lengths == [9 * 4 + 1, 3 * 4 + 1]


@dataclass
class Measured:
    share: float
    agreement: float


async def test_leading_beats_random_placement_at_the_same_share(run: Any) -> None:
    """The small model errs mostly in a sentence's first two words; the leader is worth most there."""
    table = torch.randn((10, 10, 10), generator=torch.Generator().manual_seed(3)) * 2
    noise = torch.randn((10, 10, 10), generator=torch.Generator().manual_seed(4)) * 3

    def place(tokens: list[int]) -> int:
        return in_sentence(tokens)

    def strong(tokens: list[int]) -> torch.Tensor:
        logits = table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]].clone()
        logits[END] = -30.0
        logits[0] = 30.0 if place(tokens) >= 5 else -30.0
        return logits

    def weak(tokens: list[int]) -> torch.Tensor:
        scale = 1.0 if place(tokens) < 2 else 0.05
        logits = strong(tokens) + scale * noise[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]
        logits[0] = strong(tokens)[0]
        return logits

    small, large = TableModel("small", weak, 10), TableModel("large", strong, 10)

    async def measure(method: str, params: dict[str, Any]) -> Measured:
        owned = agreed = total = 0
        for seed in range(30):
            done = await run(method, small, large, params, prompt=(1,), seed=seed, max_tokens=36, tokenizer=TEXTS)
            fresh = Sequence([1], done.seq.sampling, seed)
            for token in done.seq.generated:
                row = read(strong(fresh.tokens)[None], [RowContext(fresh)], [ReadSpec()])[0]
                agreed += row.token == token.id
                fresh.append(token)
            owned += done.owners.count("L")
            total += len(done.ids)
        return Measured(owned / total, agreed / total)

    led = await measure("sentence_lead", {"lead_tokens": 2})
    random = await measure("random_switch", {"share": led.share, "mean_run": 3.0, "min_stay": 1})
    assert led.share == pytest.approx(2 / 6, abs=0.01)
    assert random.share == pytest.approx(led.share, abs=0.05)
    assert led.agreement > random.agreement + 0.1
    assert led.agreement > 0.95


async def test_the_gate_is_a_coin_for_each_sentence_and_the_knob_is_continuous(run: Any) -> None:
    small = TableModel("small", say(sentences(3)), len(TEXTS.texts))
    large = TableModel("large", say(sentences(3)), len(TEXTS.texts))
    params: dict[str, Any] = {"lead_tokens": 2}
    shares = []
    for chance in (0.2, 0.5, 0.8):
        owners = ""
        for seed in range(12):
            done = await run(
                "sentence_lead", small, large, {**params, "lead_probability": chance},
                prompt=(1,), seed=seed, max_tokens=80, temperature=0, tokenizer=TEXTS,
            )  # fmt: skip
            owners += done.owners
        opened = [owners[start : start + 4] for start in range(0, len(owners), 4)]
        assert set(opened) == {"LLSS", "SSSS"}  # a sentence is led or not; nothing in between
        shares.append(opened.count("LLSS") / len(opened))
    assert shares == [pytest.approx(chance, abs=0.08) for chance in (0.2, 0.5, 0.8)]
