"""What a routing policy is given, and what it must answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from decoding.model import ModelPool, Request, Row, Want
from decoding.parts import Part, PartChoice
from router.decision import Decision
from turnout.calls import DriftReading
from turnout.config import POLICIES_PACKAGE
from turnout.registry import MethodParams, load, validated
from turnout.types import NO_LIMITS, RouteLimits

PROMPT_WANT = Want(draw=None, entropy=True, top=2, hidden=frozenset({-1}))


@dataclass(slots=True)
class Asked:
    """A request that is to be routed. Made anew for each request; decisions about it share what was read.

    Attributes:
        request: its sequence holds the prompt and the caller's sampling parameters; nothing is generated yet.
        pool: name of the pool.
        tenant: whose request it is.
        session: what the caller groups requests by; "" without.
        prompt_text: the question as text: the prompt, or the last user message of a conversation.
        limits: what the caller set for cost, time and quality.
        row: what the small model says after the prompt; None until `read` was called.
        drift: what the learned policies asked so far have seen of live requests, where they have seen enough.
        heeded: names of the limits that the policies asked so far have looked at; one that nobody heeds is refused.
        arm: what a split says about its own choice (`arm`, `version`, `features`): it counts where that arm refuses.
    """

    request: Request
    pool: str
    tenant: str
    session: str
    prompt_text: str
    limits: RouteLimits = NO_LIMITS
    row: Row | None = None
    drift: list[DriftReading] = field(default_factory=list)
    heeded: set[str] = field(default_factory=set)
    arm: dict[str, Any] | None = None

    async def read(self, models: ModelPool) -> Row:
        """The small model's reading at the end of the prompt, computed once: see `PROMPT_WANT`.

        Its forward is the prompt's prefill: where the small model answers first, nothing is computed twice.
        """
        if self.row is None:
            [self.row] = await models.small.extend(self.request.sequence, want=PROMPT_WANT)
        return self.row


class RoutingPolicy(Part):
    """Base of every policy in `router.policies`. One instance serves a pool for as long as it is open.

    A policy is deterministic: the same request, artifacts and rules give the same decision.

    Attributes:
        where: field its parameters stand in, for refusals.
    """

    where: str = "policy.params"

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """Choose how a request is answered.

        Raises:
            TurnoutError: the request's limits cannot be kept; names the field.
        """
        raise NotImplementedError

    def keeps(self, decision: Decision) -> bool:
        """Whether a session may go on with what was decided for it earlier, by this policy or one inside it."""
        return True

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """The methods that it may choose, and the field that each stands in.

        Args:
            field: where its parameters stand.
        """
        return iter(())

    @classmethod
    def check_params(cls, params: Any, field: str) -> None:
        """Refuse what the types of the parameters cannot express: unknown methods, policies inside policies.

        Args:
            params: an instance of `Params`.
            field: where they stand.

        Raises:
            TurnoutError: naming the field.
        """

    @classmethod
    def parse_params(cls, values: dict[str, Any], field: str) -> MethodParams:
        """Parameters with everything about them checked that can be without models.

        Raises:
            TurnoutError: naming the field and what is allowed.
        """
        params = validated(cls.Params, values, field)
        cls.check_params(params, field)
        return params


def make_policy(choice: PartChoice, field: str) -> RoutingPolicy:
    """A policy by name, everything about its parameters checked.

    Args:
        choice: its name and parameters.
        field: where the choice stands, for refusals.

    Raises:
        TurnoutError: no such policy, or a parameter is wrong; names the field.
    """
    part = policy_class(choice.name, f"{field}.name")
    policy = part(part.parse_params(choice.params, f"{field}.params"))
    policy.where = f"{field}.params"
    return policy


def policy_class(name: str, field: str) -> type[RoutingPolicy]:
    """The class of a policy.

    Raises:
        TurnoutError: NOT_FOUND, listing what exists.
    """
    part: type[RoutingPolicy] = load(POLICIES_PACKAGE, name, field).PART
    return part
