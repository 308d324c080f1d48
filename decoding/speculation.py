"""Rounds of speculation: choose who drafts, draft, verify in one forward of the target, learn."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from decoding.drafters.base import Drafter, Room
from decoding.lengths.base import LengthPolicy, Round
from decoding.model import Model, ModelPool, Request, Want
from decoding.selectors.base import Gain, Selector
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import Verdict, Verifier
from turnout.types import Segment


@dataclass(slots=True)
class Arm:
    """A drafter with the policy that says how deep it drafts, and its most nodes (None: as many as it is deep)."""

    drafter: Drafter
    length: LengthPolicy
    nodes: int | None = None

    @property
    def name(self) -> str:
        """Which drafter and policy, with all their parameters: equal for arms that do the same."""
        parts = (self.drafter, self.length)
        return " ".join([*(f"{part.name}{part.params.model_dump_json()}" for part in parts), str(self.nodes)])


@dataclass(slots=True)
class Draft:
    """What a round verifies: the tree, the arm that drafted it (asked first, where none did), and how long it took."""

    tree: DraftTree
    arm: int
    depth: int
    seconds: float


class Speculation:
    """Drafts and verifies until a sequence ends; the target's law is kept where the verifier keeps it.

    Every drafter learns from every round, whoever drafted it, so that none is stale when its turn comes.

    Args:
        request: what to answer.
        models: `large` verifies; drafters run beside whom they ask for.
        arms: who may draft.
        selector: who drafts in a round.
        verifier: which draft tokens stay.
    """

    def __init__(
        self, request: Request, models: ModelPool, arms: list[Arm], selector: Selector, verifier: Verifier
    ) -> None:
        self._seq = request.sequence
        self._sizes = models.sizes
        self._models = models
        self._target = models.large
        self._arms = arms
        self._selector = selector
        self._verifier = verifier
        selector.begin(self._seq, [arm.name for arm in arms], self._target.stores)

    async def run(self) -> AsyncIterator[Segment]:
        """Segments, one per round."""
        seq = self._seq
        while not seq.finished:
            draft = await self._draft(seq)
            started = time.perf_counter()
            want = Want(draw=None)
            for arm in self._arms:
                want = want | arm.drafter.want
            verdict = await self._target.verify(seq, draft.tree, self._verifier, want)
            emitted = seq.extend(verdict.tokens, self._sizes)
            verify_s = time.perf_counter() - started
            seq.meter.speculation.add_round(
                depths=draft.tree.depths(),
                num_accepted=min(verdict.num_accepted_tokens, len(emitted)),
                num_emitted=len(emitted),
                draft_s=draft.seconds,
                verify_s=verify_s,
            )
            self._learn(seq, draft, verdict, draft.seconds + verify_s)
            yield Segment(emitted, "finish" if seq.finished else "round")

    async def _draft(self, seq: Sequence) -> Draft:
        started = time.perf_counter()
        order = self._selector.order(seq, len(self._arms))
        for index in order:
            arm = self._arms[index]
            beside = self._beside(arm)
            free = arm.drafter.beside == "any"
            wanted = arm.length.before_round(Round(seq, beside, self._target, free, arm.drafter.name))
            # One place is the target's own token's.
            depth = min(wanted, seq.num_remaining - 1)
            if depth > 0:
                nodes = arm.nodes or arm.drafter.nodes or depth
                tree = await beside.propose(seq, arm.drafter, Room(depth, nodes), arm.length)
                tree = tree.within(self._target.vocab_size)
                if len(tree) or tree.extra is not None:
                    return Draft(tree, index, depth, time.perf_counter() - started)
        return Draft(DraftTree.empty(self._target.name), order[0], 0, time.perf_counter() - started)

    def _learn(self, seq: Sequence, draft: Draft, verdict: Verdict, seconds: float) -> None:
        for arm in self._arms:
            self._beside(arm).teach(seq, arm.drafter, draft.tree, verdict)
        self._arms[draft.arm].length.observe(draft.tree, verdict, seconds)
        self._selector.observe(draft.arm, Gain(len(verdict.tokens), draft.depth + 1, seconds))

    def _beside(self, arm: Arm) -> Model:
        return self._models.role("small" if arm.drafter.beside == "small" else "large")
