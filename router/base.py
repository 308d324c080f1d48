"""What a routing policy is given, and what it must answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.decode_loop import reported
from decoding.model import ModelPool, Readout, ReadSpec, Request, StopCondition
from decoding.parts import Part
from router.decision import Decision
from turnout.calls import DriftReading
from turnout.config import POLICIES_PACKAGE
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, load, validated
from turnout.types import NO_LIMITS, RouteLimits, SamplingParams

# The probe has learned from prompts without a structure: it reads what the model says before one.
PROMPT_WANT = ReadSpec(draw=None, entropy=True, unmasked=True, top=2, hidden=frozenset({-1}))


@dataclass(frozen=True, slots=True)
class Reading:
    """What the small model said after the prompt.

    Attributes:
        row: what was read.
        want: what was to be read: `PROMPT_WANT`, and what the answer's first token needs unless a rule looks at it.
        sampling: how the row's token was drawn.
    """

    row: Readout
    want: ReadSpec
    sampling: SamplingParams

    def covers(self, want: ReadSpec) -> bool:
        """Whether all that is wanted was read; an unmasked entropy is not that of an answer held to a structure."""
        if want.entropy and self.sampling.structure is not None and want.unmasked is not self.want.unmasked:
            return False
        wanted = replace(want, unmasked=self.want.unmasked)
        return want.draw is self.want.draw and self.want | wanted == self.want

    def only(self, want: ReadSpec) -> Readout:
        """What is wanted of it, the other fields at their defaults."""
        row = self.row
        return Readout(
            token=row.token,
            entropy_bits=row.entropy_bits if want.entropy else None,
            logprob=row.logprob if want.logprob else None,
            top=row.top[: want.top],
            hidden={layer: row.hidden[layer] for layer in want.hidden},
            forced=row.forced and want.entropy,
            allowed_logprob=row.allowed_logprob if want.entropy else None,
        )


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
        reading: what the small model says after the prompt; None until `read` was called.
        drift: what the learned policies asked so far have seen of live requests, where they have seen enough.
        read_limits: names of the limits that the policies asked so far have read; an unread one is refused.
        arm: what a split says about its own choice (`arm`, `version`, `features`): it counts where that arm refuses.
    """

    request: Request
    pool: str
    tenant: str
    session: str
    prompt_text: str
    limits: RouteLimits = NO_LIMITS
    reading: Reading | None = None
    drift: list[DriftReading] = field(default_factory=list)
    read_limits: set[str] = field(default_factory=set)
    arm: dict[str, Any] | None = None

    async def read(self, models: ModelPool) -> Readout:
        """The small model's reading at the end of the prompt, computed once: `PROMPT_WANT` at least.

        Its forward is the prompt's prefill, and it draws the answer's first token: where the small model answers,
        nothing is computed twice, and nothing waits for a turn of its own on the device.
        """
        if self.reading is None:
            seq = self.request.sequence
            # The entropy that is reported is the probe's own, but under a structure, where it is read later.
            want = PROMPT_WANT | StopCondition().want | replace(reported(seq), entropy=False)
            [row] = await models.small.extend(seq, want=want)
            self.reading = Reading(row, want, seq.sampling)
        return self.reading.row


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
