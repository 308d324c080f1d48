"""Goodput by measured times: what rounds take beyond the forwards that are predicted for them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel
from decoding.lengths.base import Round
from decoding.lengths.smartspec import FARTHEST, Acceptance, SmartSpecLength, SmartSpecParams
from decoding.model import Busy
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from turnout.types import SamplingParams, Token, TokenKind

TARGET_S, DRAFT_S, NODE_S = 10.0, 1.0, 0.1


class Model(TableModel):
    """One whose forwards take a known time, and some more for each token."""

    def __init__(self, name: str, step_s: float) -> None:
        super().__init__(name, lambda _: torch.zeros(4), 4)
        self.step_s = step_s

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        return self.step_s + NODE_S * fed

    def busy(self) -> Busy:
        return Busy(1, 10)


class Server:
    """Answers of one tenant, whose drafts are all accepted; rounds take as long as told beyond their forwards."""

    def __init__(self, free: bool = True, **params: Any) -> None:
        self.free, self.params = free, {"acceptance": 0.9, "most": 4, "allowance": 1.0, **params}
        self.small, self.large = Model("small", DRAFT_S), Model("large", TARGET_S)

    def policy(self) -> SmartSpecLength:
        """Of the next answer."""
        return SmartSpecLength(SmartSpecParams(**self.params))

    def asked(self, policy: SmartSpecLength) -> int:
        seq = Sequence([0] * 10, SamplingParams(max_tokens=100), 0, tenant="t")
        return policy.before_round(Round(seq, self.small, self.large, self.free, "d"))

    def round(self, policy: SmartSpecLength, extra_s: float, plain_extra_s: float = 0.0) -> int:
        """One round, and how deep it was to draft."""
        depth = self.asked(policy)
        kinds = [TokenKind.ACCEPTED] * depth + [TokenKind.BONUS]
        verdict = VerifyResult(tuple(range(depth)), tuple(Token(0, "large", kind) for kind in kinds))
        tree = DraftTree.chain([0] * depth, "small")
        forwards = self.large.forward_seconds(1 + depth, 0, 1)
        if depth and not self.free:
            forwards += depth * self.small.forward_seconds(1, 0, 1)
        policy.observe(tree, verdict, forwards + (extra_s if depth else plain_extra_s))
        return depth

    @property
    def known(self) -> Acceptance:
        found: Acceptance = self.large.stores.open("smartspec/d//small/0.9", "t", lambda: pytest.fail("nothing kept"))
        return found


@pytest.mark.parametrize("free", [True, False])
def test_a_drafter_that_is_slow_beside_its_forwards_is_given_up(free: bool) -> None:
    """Five tokens for a forward and 60 s of arithmetic on the host: alone the target writes seven in that time."""
    server = Server(free)
    policy = server.policy()
    depths = [server.round(policy, 60.0) for _ in range(100)]
    assert depths[0] == 4
    assert sum(depth > 0 for depth in depths) < 15  # those at first, and probes
    fast = Server(free)
    policy = fast.policy()
    assert {fast.round(policy, 0.5) for _ in range(100)} == {4}


def test_one_that_has_become_fast_is_found_out_by_probes() -> None:
    server = Server(probe=4)
    policy = server.policy()
    for _ in range(60):
        server.round(policy, 60.0)
    assert server.known.drafting.seconds > 30.0
    depths = [server.round(policy, 0.0) for _ in range(400)]
    assert depths[-1] == 4


def test_rounds_that_read_a_prompt_say_nothing() -> None:
    """The first round of an answer reads the target's, its first draft the draft model's."""
    server = Server(free=False)
    policy = server.policy()
    server.round(policy, 1e6)
    assert (server.known.drafting.seconds, server.known.drafting.count) == (0.0, 0)
    server.round(policy, 2.0)
    assert server.known.drafting.seconds == pytest.approx(2.0)


def test_a_round_that_waited_for_another_request_moves_little() -> None:
    server = Server()
    policy = server.policy()
    for _ in range(20):
        server.round(policy, 1.0)
    assert server.known.drafting.seconds == pytest.approx(1.0)
    server.round(policy, 1e6)
    expected_s = server.large.forward_seconds(5, 0, 1)
    assert server.known.drafting.seconds == pytest.approx(1.0 + 0.15 * FARTHEST * expected_s)


def test_a_machine_that_is_slow_for_all_rounds_changes_nothing() -> None:
    """Where plain steps take 50 s longer, too, drafts are worth more, not less."""
    server = Server(probe=4)
    policy = server.policy()
    for _ in range(60):
        server.round(policy, 50.0, 50.0)
    depths = [server.round(policy, 50.0, 50.0) for _ in range(40)]
    assert sum(depth > 0 for depth in depths) > 30


def test_steps_beside_drafts_are_no_measure_of_plain_decoding() -> None:
    server = Server()
    plain, drafting = server.policy(), server.policy()
    server.round(plain, 0.0)
    server.known.drafting.seconds = 1e3  # nothing is worth it
    for policy in (plain, plain):
        server.round(policy, 0.0, 3.0)
    assert server.known.plain.seconds == pytest.approx(3.0)
    # While one answer waits for its token, another begins to draft, or comes to its end with that.
    assert server.asked(plain) == 0
    known, before = server.known, server.known.plain.seconds
    known.idle = 1e3
    assert server.asked(drafting) == 1
    plain.observe(DraftTree.empty("large"), VerifyResult((), (Token(0, "large"),)), 500.0)
    assert known.plain.seconds == before
    drafting.observe(DraftTree.chain([0], "small"), VerifyResult((0,), (Token(0, "large", TokenKind.BONUS),)), 10.2)
    server.round(drafting, 0.0)
    assert known.plain.seconds <= before


def test_a_policy_travels_with_its_drafter() -> None:
    server = Server()
    policy = server.policy()
    server.round(policy, 1.0)
    again = pickle.loads(pickle.dumps(policy))
    assert again._times == policy._times
