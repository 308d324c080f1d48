"""Operations as values: whatever wraps a model forwards those it does not know, and none changes what it was given."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from decoding.drafter_state import Stores
from decoding.drafters.vocab_trim import TrimmedModel
from decoding.fakes import TableModel, markov, pair
from decoding.model import Model, ReadSpec, StopCondition, WrappedModel
from decoding.operations import Decode, Extend, Operation
from decoding.sequence import Sequence
from decoding.state import ConstantDict, settle, twin
from decoding.switching.mean_entropy import MeanEntropySwitch
from decoding.vocabulary import SubVocabulary
from engine.tracing import spanned
from router.base import Reading
from router.first_token_cache import PrimedModel
from router.shadows import Gate, deferring
from turnout.types import SamplingParams

VOCAB = 6


@dataclass(frozen=True, slots=True)
class Distance(Operation[int]):
    """An operation that no model and no wrapper has heard of: made of another one."""

    name: ClassVar[str] = "distance"
    to: int

    async def run(self, model: Any, seq: Sequence) -> int:
        [row] = await model.extend(seq)
        return abs(int(row.token) - self.to)


def table() -> TableModel:
    rows = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) + 0.1
    return TableModel("m", markov(rows / rows.sum(-1, keepdim=True)), VOCAB)


def sequence() -> Sequence:
    return Sequence([1, 2], SamplingParams(temperature=1.0, max_tokens=40), 5)


def wrapped(model: Model) -> dict[str, Model]:
    gate = Gate(0)
    pool = pair(model, model)
    return {
        "wrapped": WrappedModel(model),
        "traced": spanned(pool).models["m"],
        "deferred": deferring(pool, gate).models["m"],
        "trimmed": TrimmedModel(model, Stores(), SubVocabulary(torch.arange(VOCAB))),
        "primed": PrimedModel(model, sequence(), Reading),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("way", wrapped(table()))
async def test_wrappers_forward_operations_they_do_not_know(way: str) -> None:
    model = table()
    expected = await model.do(sequence(), Distance(9))
    assert await wrapped(model)[way].do(sequence(), Distance(9)) == expected > 0


async def test_an_operation_that_a_model_has_no_way_to_do_is_refused_by_name() -> None:
    class Unknown(Operation[None]):
        name = "fly"

    with pytest.raises(NotImplementedError, match="TableModel cannot fly"):
        await table().do(sequence(), Unknown())


def operations() -> list[type[Operation[Any]]]:
    import engine.kv_operations

    modules = ("decoding.operations", engine.kv_operations.__name__)
    return [each for each in Operation.__subclasses__() if each.__module__ in modules]


def test_operations_are_frozen_values_with_names_of_their_own() -> None:
    # A class with slots is made twice; the first one is garbage that may still be there.
    named = {each.name: each for each in operations()}
    assert {"extend", "decode", "choose", "verify", "export_kv"} <= named.keys()
    for kind in named.values():
        assert dataclasses.is_dataclass(kind)
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError, AttributeError)):
            kind.__setattr__(object.__new__(kind), "name", "other")
    assert Extend((1,)) == Extend((1,)) != Extend((2,))
    assert pickle.loads(pickle.dumps(Extend((1,), ReadSpec(top=2)))) == Extend((1,), ReadSpec(top=2))


def rule() -> MeanEntropySwitch:
    return MeanEntropySwitch(window=4, min_stay=2, threshold=0.1, threshold_down=0.05)


@pytest.mark.parametrize("way", ["itself", *wrapped(table())])
async def test_a_rule_stays_as_it_was_and_its_new_state_is_in_the_result(way: str) -> None:
    model = table()
    by_sugar = rule()
    expected = await model.decode(mine := sequence(), StopCondition((by_sugar,), max_tokens=7))
    asked, fresh = rule(), vars(rule())
    asker = {"itself": model, **wrapped(model)}[way]
    op = Decode(StopCondition((asked,), max_tokens=7))
    for _ in range(2):  # it can be carried out again: for another sequence, or after a fault
        decoded = await asker.do(again := sequence(), op)
        assert vars(asked) == fresh
        assert decoded.segment == expected
        assert again.tokens == mine.tokens
        assert [vars(each) for each in decoded.rules] == [vars(by_sugar)] != [fresh]
    held = asked.entropies
    op.settle(decoded)
    assert vars(asked) == vars(by_sugar)
    assert asked.entropies is held, "whoever holds what a rule is made of sees it go on"


class Thing:
    def __init__(self) -> None:
        self.plain, self.items, self.pairs = 1, [1, [2, 3]], {"a": [4], "b": 5}
        self.last: deque[int] = deque([1, 2], maxlen=2)
        self.inner = Slotted([6])
        self.others: list[Any] = [{1, 2}, Counter("aab"), OrderedDict(a=[1]), defaultdict(list, {"k": [1]})]
        self.shared = (torch.ones(2), ConstantDict({1: b"x"}), torch.nn.Linear(1, 1), frozenset({3}))
        self.constant, self.want, self.state = self.shared[1], ReadSpec(top=2), self.shared[0]


class Slotted:
    __slots__ = ("values",)

    def __init__(self, values: list[int]) -> None:
        self.values = values


def grown(thing: Any) -> None:
    thing.plain += 1
    thing.items[1].append(9)
    thing.pairs["a"].append(9)
    thing.last.append(9)
    thing.inner.values.append(9)
    for each, key in zip(thing.others[2:], ("a", "k"), strict=True):
        each[key].append(9)
    thing.others[0].add(9)
    thing.others[1]["c"] += 1


def said(thing: Any) -> Any:
    others = [{key: list(value) for key, value in each.items()} for each in thing.others[2:]]
    first = (set(thing.others[0]), dict(thing.others[1]))
    return thing.plain, str(thing.items), str(thing.pairs), list(thing.last), thing.inner.values[:], first, others


def test_a_twin_goes_on_by_itself_and_its_state_can_be_taken_over() -> None:
    thing, before = Thing(), said(Thing())
    other = twin(thing)
    assert said(other) == before
    assert (other.shared, other.constant, other.want, other.state) == (
        thing.shared, thing.constant, thing.want, thing.state
    )  # fmt: skip
    assert other.state is thing.state
    assert other.constant is thing.constant
    assert other.last.maxlen == 2
    grown(other)
    assert said(thing) == before
    after = Thing()
    grown(after)
    held = [thing.items, thing.pairs, thing.inner, thing.last]
    settle(thing, other)
    assert said(thing) == said(other) == said(after) != before
    now = [thing.items, thing.pairs, thing.inner, thing.last]
    assert all(mine is each for mine, each in zip(now, held, strict=True))
