"""What the chaos run would say of answers, latencies and leftovers that are not as they must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chaos.report import Outcome, Strike, page, strike_of
from benchmarks.chaos.requests import Answer, Asked, CheckingClient, Done, mixed
from experiments.load.clients import Refused
from experiments.load.generator import drive

RIGHT = Answer("ab", "length", (1, 2))
GOOD = Outcome(
    seconds=600.0,
    offered_per_s=1.0,
    usual_s=1.0,
    median_s=0.5,
    answered={"plain over grpc": 3},
    wrong=[],
    lost=[],
    strikes=[Strike("draft", 1.0, 2.0, 3.0, {}, 4.0, 2)],
    left=[],
    least_each=1,
    parts=("draft",),
)


class Front:
    """Gives answers, or refusals, in turn."""

    name = "fake"

    def __init__(self, *answers: Answer | str) -> None:
        self._answers = list(answers)

    async def ask(self, asked: Asked, output: Callable[[], None]) -> Answer:
        answer = self._answers.pop(0)
        if isinstance(answer, str):
            raise Refused(answer)
        output()
        return answer

    async def close(self) -> None:
        pass


async def done_by(*answers: Answer | str) -> Done:
    client = CheckingClient(Front(*answers), mixed(2)[:1], [RIGHT])  # type: ignore[arg-type]
    await drive(client, [0.0], ["0"], drain_s=5)
    [done] = client.done
    assert client.running == {}
    return done


@pytest.mark.parametrize(
    ("got", "told"),
    [
        (Answer("ab", "length", (1, 3)), "token 1 of 2"),
        (Answer("ab", "length", (1,)), "token 1 of 2 (got 1)"),
        (Answer("ab", "length", (1, 2, 3)), "token 2 of 2 (got 3)"),
        (Answer("ac", "length"), "text 'ac'"),
        (Answer("abab", "length"), "text 'abab'"),
        (Answer("ab", "stop", (1, 2)), "ended by stop"),
    ],
)
async def test_a_planted_wrong_answer_is_caught(got: Answer, told: str) -> None:
    done = await done_by(got)
    assert done.wrong is not None
    assert told in done.wrong


async def test_the_right_answer_is_right_with_and_without_tokens() -> None:
    assert (await done_by(RIGHT)).wrong is None
    assert (await done_by(replace(RIGHT, ids=None))).wrong is None


async def test_what_breaks_is_asked_again_and_remembered() -> None:
    done = await done_by("UNAVAILABLE", "ReadError", RIGHT)
    assert (done.codes, done.error, done.wrong) == (["UNAVAILABLE", "ReadError"], None, None)
    assert done.begun <= done.refusals[0][0] <= done.refusals[1][0] <= done.ended


async def test_what_cannot_be_answered_is_lost() -> None:
    done = await done_by("INVALID_ARGUMENT")
    assert (done.error, done.wrong) == ("INVALID_ARGUMENT", None)


def test_requests_are_mixed_and_each_has_a_seed_of_its_own() -> None:
    requests = mixed(8)
    assert {asked.method for asked in requests} == {"plain", "speculative", "entropy_adaptive", "pearl"}
    assert {asked.sampling["temperature"] for asked in requests} == {0.0, 0.8}
    assert len({asked.sampling["seed"] for asked in requests}) == len(requests)


def done(begun: float, seconds: float, **more: Any) -> Done:
    return Done(0, "grpc", "plain", begun, begun + seconds, **more)


def test_a_strike_is_over_with_the_first_usual_answer_to_a_request_begun_after_it() -> None:
    requests = [
        done(9.0, 6.0),  # begun before: not counted for recovery, but the slowest
        done(11.0, 4.0),  # slow
        done(12.0, 0.5, refusals=((12.1, "UNAVAILABLE"),)),  # asked again
        done(16.0, 0.5),
        done(29.0, 9.0, refusals=((30.5, "INTERNAL"),)),  # the next strike broke it
        done(31.0, 9.0),  # after the next strike
    ]
    strike = strike_of("draft", 10.0, 30.0, requests, usual_s=1.0, start=4.0)
    assert strike == Strike("draft", 6.0, 6.5, 28.0, {"UNAVAILABLE": 1}, 9.0, 1)


def test_a_strike_nobody_came_back_from_says_so() -> None:
    assert strike_of("draft", 10.0, 30.0, [done(11.0, 4.0)], usual_s=1.0, start=0.0).back is None


def test_a_good_report_passes() -> None:
    assert GOOD.failures == []
    assert "| verdict | passed |" in page(GOOD).markdown()


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"wrong": ["request 3"]}, "1 wrong answers"),
        ({"lost": ["request 3"]}, "1 lost requests"),
        ({"left": ["2 sequences are still held"]}, "still held"),
        ({"least_each": 2}, "was hit 1 times only"),
        ({"strikes": [Strike("draft", 1.0, None, 3.0, {}, 4.0, 2)]}, "not back"),
        ({"strikes": [Strike("draft", 1.0, 2.0, 3.0, {"UNAVAILABLE": 1}, 4.0, 2)]}, "clients had to ask again"),
        ({"strikes": [Strike("draft", 1.0, 2.0, 3.0, {}, 4.0, 0)]}, "nothing ran"),
    ],
)
def test_a_bad_report_fails(bad: dict[str, Any], told: str) -> None:
    [failure] = replace(GOOD, **bad).failures
    assert told in failure


def test_a_broken_connection_is_no_failure_of_a_killed_proxy() -> None:
    strike = Strike("proxy", 1.0, 2.0, 3.0, {"UNAVAILABLE": 1}, 4.0, 2)
    assert replace(GOOD, strikes=[strike], parts=("proxy",)).failures == []
