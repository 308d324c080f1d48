"""Draft lengths sampled from what is believed of the acceptance rate."""

from __future__ import annotations

from collections.abc import Sequence as Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from decoding.lengths._readings import top_probability
from decoding.lengths.base import LengthParams, LengthPolicy, Round, Step
from decoding.lengths.smartspec import SmartSpecLength, SmartSpecParams
from decoding.model import ReadSpec
from decoding.noise import Purpose, noise_key, round_seed, uniform
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from turnout.types import TokenKind

Prior = Annotated[FiniteFloat, Field(gt=0, le=1000)]


class ThompsonParams(LengthParams):
    """Parameters of `thompson`."""

    control: Annotated[
        Literal["beta", "calibrated"],
        Field(description="beta: the posterior alone; calibrated: mixed with the draft's own confidence"),
    ] = "beta"
    accepted: Annotated[Prior, Field(description="the prior's count of accepted tokens")] = 1.0
    rejected: Annotated[Prior, Field(description="the prior's count of rejected tokens")] = 1.0
    half: Annotated[
        FiniteFloat,
        Field(gt=0, le=10_000, description="judged tokens after which posterior and confidence weigh the same"),
    ] = 10.0
    abstains: Annotated[
        bool,
        Field(
            description="decode plainly where `smartspec` would, and draft no deeper than it; false: draft one token at"
            " least"
        ),
    ] = True


class ThompsonLength(LengthPolicy):
    """Beta-TS and Calibration-TS (paper #33, EESD): one Bernoulli draw of the acceptance rate before a further token.

    The rate has a Beta posterior that counts this answer's accepted tokens, and a rejected one per round that had
    one. A rate drawn anew from Beta(a, b) before every decision, then a Bernoulli of that rate, is by the law of
    total probability one Bernoulli with the posterior's mean a / (a + b), so the rate itself is not drawn.
    Calibration-TS mixes it with the draft's top-1 probability c at the token in question, w a / (a + b) + (1 - w) c
    with w = n / (n + half) after n judged tokens; how w grows is a choice made here.

    Whether to draft at all is no matter of the paper, which drafts a token at least. Here goodput decides on it, and
    what drafts may lose is bounded; see `smartspec`, whose averages of all answers of a tenant are shared.

    The decision is made before the further token is drawn, with noise of its own. It is keyed by round and depth:
    branches of a tree that stand equally deep share it.
    """

    Params = ThompsonParams
    params: ThompsonParams
    papers = (33,)
    stepwise = True
    abstains = True
    changing = ("_accepted", "_rejected", "_root", "_seed")

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._accepted = self._rejected = self._root = self._seed = 0
        self._calibrated = self.params.control == "calibrated"
        self.want = ReadSpec(draw=None, top=1 if self._calibrated else 0)
        self._goodput = SmartSpecLength(SmartSpecParams(most=self.params.most)) if self.params.abstains else None

    @property
    def mean(self) -> float:
        """The posterior's mean acceptance rate."""
        accepted, rejected = self.params.accepted + self._accepted, self.params.rejected + self._rejected
        return accepted / (accepted + rejected)

    def share_risk(self, num_arms: int) -> None:
        """See `LengthPolicy.share_risk`."""
        if self._goodput is not None:
            self._goodput.share_risk(num_arms)

    def promise(self, round: Round) -> float:
        """See `LengthPolicy.promise`."""
        return 1.0 if self._goodput is None else self._goodput.promise(round)

    def before_round(self, round: Round) -> int:
        """As deep as allowed; 0 where a draft is not expected to pay."""
        self._root = len(round.seq)
        self._seed = round_seed(round.seq.seed, self._root)
        return self.params.most if self._goodput is None else self._goodput.before_round(round)

    def defer(self) -> None:
        """See `LengthPolicy.defer`."""
        if self._goodput is not None:
            self._goodput.defer()

    def continues(self, path: Path[Step]) -> bool:
        """One draw."""
        rate = self.mean
        if self._calibrated:
            judged = self._accepted + self._rejected
            weight = judged / (judged + self.params.half)
            rate = weight * rate + (1.0 - weight) * top_probability(path[-1].row)
        return uniform(noise_key(self._seed, self._root + len(path), Purpose.LENGTH)) < rate

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Count what was accepted, and whether a candidate was rejected."""
        if self._goodput is not None:
            self._goodput.observe(draft, verdict, seconds)
        if not len(draft):
            return
        self._accepted += verdict.num_accepted_tokens
        self._rejected += verdict.tokens[-1].kind is TokenKind.RECOVERED


PART = ThompsonLength
