"""SIFT (paper #218): a scripted model writes stickers and predictions, stage by stage until they agree."""

from __future__ import annotations

import pytest
import torch

from decoding.aggregators import sift
from decoding.aggregators.base import AnswerSet, Candidate, make_aggregator
from decoding.fakes import ListText, TableModel, pair
from decoding.sequence import Sequence
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams

QUESTION, END = 0, 1
STICKERS, ANSWERS = ["s0", "s1", "s2", "s3"], ["a", "b", "z"]
TASKS = {name: getattr(sift, name) for name in ("EXTRACT", "PREDICT", "ALONE", "REVISE", "INVERT")}
TEXTS = ["?", "", *TASKS, *STICKERS, *ANSWERS]


class Script(ListText):
    """Takes what is asked for one token of the task, and one of the text in it."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        for name, asked in TASKS.items():
            before, place, after = asked.partition("{")
            after = after.partition("}")[2] if place else ""
            held = text.removeprefix(before).removesuffix(after)
            if text == before + held + after and held in ("", *STICKERS, *ANSWERS):
                return [TEXTS.index(name), *([TEXTS.index(held)] if held else [])]
        return []


def scripted(**said: str) -> TableModel:
    """Says `said[TASK_TEXT]` for a task with a text in it; z where nothing is said of it."""

    def logits(tokens: list[int]) -> torch.Tensor:
        last = [TEXTS[token] for token in tokens[-2:]]
        row = torch.full((len(TEXTS),), -50.0)
        if last[-1] == "EXTRACT":
            answer = "s0"
        elif last[0] in TASKS and last[0] != "EXTRACT":
            answer = said.get("_".join(last), "z" if last[0] in ("PREDICT", "ALONE") else last[-1])
        else:
            answer = ""
        row[TEXTS.index(answer)] = 0.0
        return row

    return TableModel("large", logits, len(TEXTS), max_length=64)


async def chosen(model: TableModel, *finals: str, **params: str) -> tuple[str, int, int]:
    """What is shown, in which stage it was decided, and how many texts were written."""
    models = pair(model, model, Script(TEXTS))
    part = make_aggregator(PartChoice.of("sift", **params))
    part.check(models)
    seq = Sequence([QUESTION], SamplingParams(max_tokens=4), 3, (END,))
    answers = [Candidate(each, each, each, (0,), (-1.0 - place,)) for place, each in enumerate(finals)]
    group = AnswerSet(answers, 3, seq, model, models)
    place = await part.choose(group)
    assert set(model.cached) <= {seq}
    written = int(group.measures["sift_generations"])
    assert seq.meter.models["large"].discarded_tokens == 2 * written
    return finals[place] + str(place), int(group.measures["sift_stage"]), written


async def test_it_ends_with_the_first_stage_that_agrees() -> None:
    """Next to an answer that was drawn, agreement at once takes two texts: three generations in all."""
    assert await chosen(scripted(PREDICT_s0="b"), "a", "a", "b") == ("b2", 1, 2)
    assert await chosen(scripted(REVISE_s0="s1", PREDICT_s1="b"), "a", "a", "b", "b") == ("b2", 2, 4)
    inverse = {"REVISE_s0": "s1", "INVERT_z": "s2", "REVISE_s2": "s3", "PREDICT_s3": "b"}
    assert await chosen(scripted(**inverse), "a", "b", "a") == ("b1", 3, 7)


async def test_without_agreement_it_is_the_majority_after_a_fixed_number_of_texts() -> None:
    for finals in (("b", "a", "a"), ("a", "b")):
        shown, stage, written = await chosen(scripted(), *finals)
        assert (shown[0], stage, written) == ("a", 0, 7)
    assert (await chosen(scripted(), "z", "a", "a"))[:2] == ("z0", 1)


async def test_the_sticker_alone_may_have_to_agree() -> None:
    said = {"PREDICT_s0": "b", "ALONE_s0": "b"}
    assert await chosen(scripted(**said), "a", "a", "b", view="sticker") == ("b2", 1, 3)
    said |= {"ALONE_s0": "a", "REVISE_s0": "s1", "PREDICT_s1": "a", "ALONE_s1": "a"}
    assert await chosen(scripted(**said), "a", "a", "b", view="sticker") == ("a0", 2, 6)


async def test_what_is_drawn_adapts_and_one_answer_costs_nothing() -> None:
    """A routing policy sets `k` (paper #45), and with 1 there is nothing to choose."""
    method = get_method("best_of")
    assert method.parse({"k": 1, "rerank": {"name": "sift", "view": "sticker"}})
    with pytest.raises(TurnoutError, match=r"method\.params\.rerank\.view: "):
        method.parse({"rerank": {"name": "sift", "view": "both"}})
    model = scripted()
    part = make_aggregator(PartChoice.of("sift"))
    with pytest.raises(TurnoutError, match="needs a tokenizer that turns text into tokens"):
        part.check(pair(model, model, ListText(TEXTS)))
