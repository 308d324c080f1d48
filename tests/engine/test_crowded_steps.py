"""Steps while more prompts wait than requests decode."""

from __future__ import annotations

import pytest

from engine.scheduler.limits import Limits
from engine.scheduler.policy import plan_step
from tests.engine.step_times import LinearTime
from tests.engine.test_policy import Item, decode, seconds


def crowded(running: int, prompts: int, tenant: str = "a") -> list[Item]:
    """Requests that decode, and prompts that wait."""
    queue = [decode(order=i, tenant=tenant) for i in range(running)]
    return queue + [Item(50, order=100 + i, tenant=tenant) for i in range(prompts)]


@pytest.mark.parametrize(
    ("running", "prompts", "tokens"),
    # Decodes take as many seconds as there are; half of that for each prompt that waits for one of them.
    [(4, 1, 2), (4, 4, 2), (4, 8, 4), (4, 12, 6), (2, 12, 6), (2, 16, 8), (2, 40, 8)],
)
def test_prompts_stretch_a_step_by_how_many_of_them_wait_for_each_running_request(
    running: int, prompts: int, tokens: int
) -> None:
    shares = plan_step(crowded(running, prompts), Limits(512, 64, 1.5), LinearTime(per_token=1.0))
    assert sum(share.tokens for share in shares) == running + tokens


def test_one_tenants_crowd_does_not_stretch_anothers_steps() -> None:
    def fed(*queues: list[Item]) -> int:
        queue = [item for each in queues for item in each]
        return sum(share.tokens for share in plan_step(queue, Limits(512, 64, 1.5), LinearTime(per_token=1.0)))

    assert fed(crowded(4, 24)) == 4 + 12
    assert fed(crowded(3, 24), crowded(1, 0, "b")) == 4 + 2
    assert fed(crowded(3, 24), crowded(1, 1, "b")) == 4 + 2
    assert fed(crowded(2, 8), crowded(2, 12, "b")) == 4 + 4 * 2
    assert fed(crowded(4, 24), crowded(0, 1, "b")) == 4 + 12


def test_a_crowd_ends_sooner_in_fuller_steps() -> None:
    # Answers of 30 tokens to prompts of 150; a step costs as much as 8 tokens, and one more for each that it feeds.
    def spent(slowdown: float) -> float:
        times, total = LinearTime(base=8.0, per_token=1.0), 0.0
        queue = [Item(150, order=i) for i in range(20)]
        while queue:
            shares = plan_step(queue, Limits(512, 64, slowdown), times)
            total += seconds(times, queue, shares)
            for place, tokens in shares:
                item = queue[place]
                item.cached, item.remaining, item.started = item.cached + tokens, item.remaining - tokens, True
                if not item.remaining:
                    item.remaining, item.running = 1, True
            queue = [item for item in queue if item.cached < 150 + 30]
        return total

    assert spent(1.75) < 1.4 * spent(1e9)
