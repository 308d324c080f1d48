"""Components at a remote model: sent in full once, then their state where it changed, into the same objects."""

from __future__ import annotations

import gc
import pickle
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from actors.remote_objects import Constants, ObjectNumbers, Receiver, Sender
from decoding.model import Readout, ReadSpec
from decoding.state import Stateful, attributes, load_state, settle
from decoding.switching.base import SwitchRule
from decoding.switching.mean_entropy import MeanEntropySwitch
from decoding.switching.sentence import SentenceMarks, SentenceSwitch


class Tally:
    """What a caller reads while a rule writes into it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)


class Part(Stateful):
    """With everything a component may have; `memory` is its own, next to the model."""

    changing = ("count", "window", "table", "tally", "limit")

    def __init__(self) -> None:
        self.count = 0
        self.window: deque[int] = deque(maxlen=3)
        self.table: dict[str, list[int]] = {"a": [1]}
        self.tally = Tally()
        self.limit: Any = None
        self.memory: list[int] = []
        self.want = ReadSpec(top=2)


class Slotted:
    """Nobody can be told when it is gone."""

    __slots__ = ("count", "tally")

    def __init__(self) -> None:
        self.count = 0
        self.tally = Tally()


@dataclass(slots=True, weakref_slot=True)
class Mixed:
    """Slots that can be watched."""

    count: int = 0
    seen: set[int] = field(default_factory=set)


class Ends:
    """A coordinator and the incarnations of an actor."""

    def __init__(self, numbers: ObjectNumbers | None = None) -> None:
        self.numbers = numbers or ObjectNumbers(Constants())
        self.constants_sent: list[int] = []
        self.open()

    def open(self) -> None:
        """Begin an incarnation."""
        self.receiver = Receiver()
        receiver = self.receiver

        def send(number: int, blob: bytes) -> None:
            self.constants_sent.append(number)
            receiver.add_constant(number, blob)

        self.sender = Sender(self.numbers, send)

    def call(self, part: Any, work: Any) -> tuple[int, int]:
        """Send a component, work with it there, and take over its state; returns bytes there and back."""
        packed = pickle.dumps(self.sender.pack(part))
        there = self.receiver.unpack(pickle.loads(packed))
        work(there.part)
        state = there.changed()
        if state is not None:
            load_state(part, self.sender.receive(part, state))
        return len(packed), len(state or b"")


def busy(part: Any) -> None:
    part.count += 1
    part.window.append(part.count)
    part.table["b"] = [part.count]
    part.tally.add(0.5)


def test_changes_come_back_into_the_same_objects() -> None:
    part, ends = Part(), Ends()
    tally, values, window, table = part.tally, part.tally.values, part.window, part.table
    for _ in range(5):
        ends.call(part, busy)
    assert part.count == 5
    assert part.tally is tally
    assert tally.values is values
    assert values == [0.5] * 5
    assert part.window is window
    assert list(window) == [3, 4, 5]
    assert part.table is table
    assert table == {"a": [1], "b": [5]}


def test_what_the_caller_changes_between_calls_goes_there() -> None:
    part, ends = Part(), Ends()
    ends.call(part, busy)
    part.count = 10
    part.tally.values.clear()
    seen: list[Any] = []
    ends.call(part, lambda there: seen.append((there.count, list(there.tally.values))))
    assert seen == [(10, [])]
    ends.call(part, busy)
    assert part.count == 11


def test_what_is_as_it_was_does_not_travel() -> None:
    part, ends = Part(), Ends()
    whole, _ = ends.call(part, lambda there: None)
    there, back = ends.call(part, lambda there: None)
    assert back < 10
    assert there < 20 < whole


@pytest.mark.parametrize("make", [Slotted, Mixed])
def test_slots_travel(make: Any) -> None:
    part, ends = make(), Ends()

    def work(there: Any) -> None:
        there.count += 1
        if isinstance(there, Mixed):
            there.seen.add(there.count)

    for _ in range(3):
        ends.call(part, work)
    assert part.count == 3
    assert set(attributes(part)) >= {"count"}
    if isinstance(part, Mixed):
        assert part.seen == {1, 2, 3}
    assert len(ends.receiver) == (make is Mixed)


def test_a_part_is_forgotten_with_its_original() -> None:
    part, ends = Part(), Ends()
    ends.call(part, busy)
    assert len(ends.receiver) == 1
    del part
    gc.collect()
    ends.receiver.forget(ends.sender.take_collected())
    assert len(ends.receiver) == 0


def test_the_state_is_with_the_next_life() -> None:
    part, ends = Part(), Ends()
    for _ in range(3):
        ends.call(part, busy)
    ends.open()
    seen: list[Any] = []
    ends.call(part, lambda there: seen.append((there.count, list(there.window), list(there.tally.values))))
    assert seen == [(3, [1, 2, 3], [0.5] * 3)]


def test_working_memory_stays_there_and_a_new_life_begins_without_it() -> None:
    part, ends = Part(), Ends()
    part.count = 7

    def learn(there: Part) -> None:
        there.count += 1
        there.memory.extend(range(1000))

    _, back = ends.call(part, learn)
    assert part.count == 8
    assert part.memory == []
    assert back < 250
    seen: list[Any] = []
    ends.call(part, lambda there: seen.append((there.count, len(there.memory))))
    ends.open()
    ends.call(part, lambda there: seen.append((there.count, len(there.memory))))
    assert seen == [(8, 1000), (8, 0)]


def test_networks_are_sent_once_to_each_life() -> None:
    head, ends = torch.nn.Linear(64, 64), Ends()
    parts = [Part() for _ in range(3)]
    seen: list[torch.nn.Module] = []
    for part in parts:
        part.head = head  # type: ignore[attr-defined]
        whole, back = ends.call(part, lambda there: seen.append(there.head))
        assert whole < 2048
        assert back < 50
    assert len(ends.constants_sent) == 1
    assert seen[0] is seen[1] is seen[2]
    assert all(part.head is head for part in parts)  # type: ignore[attr-defined]
    ends.open()
    ends.call(parts[0], lambda there: seen.append(there.head))
    assert len(ends.constants_sent) == 2
    assert torch.equal(seen[-1].weight, head.weight)  # type: ignore[arg-type]


def test_a_switching_rule_keeps_its_tally() -> None:
    tally, ends = Tally(), Ends()
    rule = MeanEntropySwitch(window=2, min_stay=1, threshold=1.0, tally=tally)
    for entropy in (0.5, 0.7, 3.0):
        ends.call(rule, lambda there, entropy=entropy: there.observe(1, Readout(1, entropy)))
    assert rule.tally is tally
    assert len(tally.values) == 3
    assert rule.active == "large"


SENTENCES = SentenceMarks({token: b"." if token % 7 == 0 else b" " for token in range(0, 1000, 2)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: MeanEntropySwitch(window=1024, min_stay=1, threshold=4.0, clear=False),
        lambda: SentenceSwitch(lead_tokens=3, lead_probability=0.7, marks=SENTENCES, seed=3, position=0),
    ],
)
def test_a_rule_that_works_at_two_models_in_turn_is_one_rule(make: Any) -> None:
    alone: SwitchRule = make()
    rule: SwitchRule = make()
    large = Ends()
    ends = {"large": large, "small": Ends(large.numbers)}
    switches = 0
    for token in range(600):
        row, before = Readout(token, 9.0 * (token // 100 % 2)), rule.active
        decided: list[Any] = []
        ends[before].call(rule, lambda there, t=token, r=row, d=decided: d.append(there.observe(t, r)))
        assert decided == [alone.observe(token, row)], token
        assert rule.active == alone.active
        switches += rule.active != before
    assert switches > 4
    assert len(large.constants_sent) <= 2  # what ReadSpec is, and what ends sentences


@pytest.mark.parametrize(
    ("old", "new"), [([1], [2, 3]), ({1}, {2}), (deque([1], 2), deque([5, 6], 2)), ({"a": 1}, {"b": 2})]
)
def test_containers_stay_the_same_objects(old: Any, new: Any) -> None:
    assert settle(old, new) is old
    assert old == new


def test_what_becomes_of_a_part_and_is_not_told_is_undone() -> None:
    """As in an operation that was cancelled. Planted: where the sender does not know of it, its changes stay."""
    for invalidates in (True, False):
        part, ends, seen = Part(), Ends(), []
        ends.call(part, busy)
        there = ends.receiver.unpack(ends.sender.pack(part))
        busy(there.part)
        if invalidates:
            ends.sender.invalidate(part)
        ends.call(part, lambda there, seen=seen: seen.append(there.count))
        assert seen == [1 if invalidates else 2]
        del part, there
        gc.collect()
        ends.receiver.forget(ends.sender.take_collected())
        assert len(ends.receiver) == 0


def test_a_change_that_cannot_be_pickled_fails_until_it_is_gone() -> None:
    part, ends = Part(), Ends()
    ends.call(part, busy)
    part.limit = lambda: None
    for _ in range(2):
        with pytest.raises(Exception, match="pickle"):
            ends.sender.pack(part)
    part.limit = None
    ends.call(part, busy)
    assert part.count == 2
