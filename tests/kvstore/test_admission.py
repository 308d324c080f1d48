from __future__ import annotations

from kvstore.keys import Link
from kvstore.lookup.admission import Doorkeeper
from turnout.types import Namespace

ALICE = Namespace("private", "alice")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def link(name: bytes, namespace: Namespace = ALICE) -> Link:
    return Link(0, namespace, name)


def test_what_is_computed_a_second_time_is_wanted() -> None:
    door = Doorkeeper("second", 60.0, clock=Clock())
    assert not door.wants(link(b"a"))
    assert not door.wants(link(b"b"))
    assert door.wants(link(b"a"))
    assert door.wants(link(b"a"))


def test_a_prompt_and_its_computation_are_one_sighting() -> None:
    door = Doorkeeper("second", 60.0, clock=Clock())
    door.sight([link(b"a")])
    assert not door.expects(link(b"a"))
    assert not door.wants(link(b"a"))
    door.sight([link(b"a")])
    assert door.expects(link(b"a"))
    assert door.wants(link(b"a"))


def test_two_prompts_at_the_same_time_are_two_sightings() -> None:
    door = Doorkeeper("second", 60.0, clock=Clock())
    door.sight([link(b"a")])
    door.sight([link(b"a")])
    assert door.wants(link(b"a"))


def test_sightings_are_forgotten_after_the_window() -> None:
    clock = Clock()
    door = Doorkeeper("second", 60.0, clock=clock)
    assert not door.wants(link(b"a"))
    clock.now = 59.0
    assert door.wants(link(b"a"))
    clock.now = 59.0 + 61.0
    assert not door.wants(link(b"a"))


def test_public_chunks_and_everything_under_always_are_wanted_at_once() -> None:
    assert Doorkeeper("second", 60.0, clock=Clock()).wants(link(b"a", Namespace("public", "registered")))
    door = Doorkeeper("always", 60.0, clock=Clock())
    assert door.expects(link(b"a"))
    assert door.wants(link(b"a"))


def test_what_was_in_an_earlier_prompt_is_known_under_either_admission() -> None:
    for admission in ("second", "always"):
        door = Doorkeeper(admission, 60.0, clock=Clock())
        door.sight([link(b"a")])
        assert not door.knows(link(b"a"))
        door.sight([link(b"a")])
        assert door.knows(link(b"a"))


def test_memory_is_bounded_and_the_latest_are_remembered() -> None:
    clock = Clock()
    door = Doorkeeper("second", 60.0, capacity=100, clock=clock)
    for count in range(1000):
        door.wants(link(count.to_bytes(4, "little")))
        assert len(door) <= 201
    assert door.wants(link((999).to_bytes(4, "little")))
    assert not door.wants(link((5).to_bytes(4, "little")))
