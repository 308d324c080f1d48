"""What was at work when a process died runs alone, and only what ends two processes in a row is found poisoned."""

from __future__ import annotations

import random

from actors.quarantine import Quarantine, poison_request_error
from turnout.errors import Code


def test_everybody_may_work_until_a_process_dies():
    quarantine = Quarantine[str]()
    assert quarantine.admits("a", ["b", "c"])
    assert quarantine.died(["a", "b"], "p1") == {}
    assert "a" in quarantine
    assert not quarantine.admits("c", []), "who was not there waits until the quarantined are done"
    assert quarantine.admits("a", [])
    assert not quarantine.admits("b", ["a"]), "one at a time"
    quarantine.done("a")
    assert quarantine.admits("b", [])
    quarantine.done("b")
    assert quarantine.admits("c", ["a", "b"])


def test_who_was_alone_twice_is_poisoned_with_both_places():
    quarantine = Quarantine[str]()
    assert quarantine.died(["a"], "p1") == {}, "once may be anybody's fault"
    assert quarantine.died(["a"], "p2") == {"a": ("p1", "p2")}
    assert len(quarantine) == 0


def test_a_process_that_dies_with_nothing_at_work_blames_nobody():
    quarantine = Quarantine[str]()
    quarantine.died(["a", "b"], "p1")
    assert quarantine.died([], "p2") == {}
    assert len(quarantine) == 2


def test_the_message_names_the_request_and_both_processes():
    error = poison_request_error("r7", ("10.0.0.1 pid 5", "10.0.0.2 pid 6"))
    assert error.code is Code.INTERNAL
    assert all(part in error.message for part in ("'r7'", "10.0.0.1 pid 5", "10.0.0.2 pid 6"))


def test_one_death_alone_proves_nothing_of_work_that_a_sound_process_did_not_die_of():
    quarantine = Quarantine[str]()
    quarantine.died(["a", "b"], "p1")
    assert quarantine.died(["a"], "p2") == {}, "the process had completed nothing: it may be at fault"
    assert [quarantine.tried(work) for work in "ab"] == [True, False]
    quarantine.done("b")
    quarantine.completed()
    assert quarantine.died(["a"], "p3") == {"a": ("p1", "p2", "p3")}
    assert not quarantine.tried("a")
    quarantine.died(["c", "d"], "p4")
    quarantine.completed()
    assert quarantine.died(["c"], "p5") == {"c": ("p4", "p5")}, "the process was sound, and so is who killed it known"


def test_exactly_the_deadly_ones_are_found_whatever_the_order():
    """A process dies whenever a deadly work runs, and sometimes from outside as its first work begins."""
    for seed in range(300):
        rng = random.Random(seed)
        works = [f"w{i}" for i in range(rng.randint(1, 8))]
        deadly = set(rng.sample(works, rng.randint(0, min(3, len(works)))))
        outside, spared = rng.randint(0, 3), set[str]()
        quarantine, waiting, completed, guilty, deaths, sound = Quarantine[str](), works[:], [], [], 0, False
        while waiting:
            at_work: list[str] = []
            for work in sorted(waiting, key=quarantine.tried):
                if quarantine.admits(work, at_work):
                    at_work.append(work)
            assert at_work, "somebody may always work"
            hit = outside > 0 and not sound and not (len(at_work) == 1 and spared & set(at_work))
            if deadly & set(at_work) or hit:
                if hit:  # nobody twice while it is alone: that cannot be told from its own doing
                    outside -= 1
                if len(at_work) == 1:
                    spared |= set(at_work)
                deaths += 1
                found = quarantine.died(at_work, "p")
                sound = False
                guilty += found
                waiting = [work for work in waiting if work not in found]
            else:
                work = rng.choice(at_work)
                quarantine.done(work)
                quarantine.completed()
                sound = True
                completed.append(work)
                waiting.remove(work)
        assert set(guilty) == deadly
        assert set(completed) == set(works) - deadly
        assert deaths <= 3 * len(deadly) + 3
