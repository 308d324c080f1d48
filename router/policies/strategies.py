"""Easy, normal or hard: how warm, how long and with which words a question is answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from decoding.artifacts import ArtifactName, Kept
from decoding.model import ModelPool
from router.base import Asked, RoutingPolicy
from router.decision import Decision, rules_version
from router.difficulty.probe import STRATEGY_PROBE, Probe
from router.difficulty.reading import ask_probe, check_reads
from router.difficulty.strategies import STRATEGIES
from turnout.part_choice import PartChoice
from turnout.registry import ALONE, MethodParams, get_method

Suffix = Annotated[str, Field(max_length=2000)]


class StrategiesParams(MethodParams):
    """Parameters of `strategies`."""

    artifact: ArtifactName = "strategies"
    method: Annotated[PartChoice, Field(description="who answers: a method, as in static's rules")] = PartChoice.of(
        ALONE, model="small"
    )
    suffixes: Annotated[
        dict[Literal["easy", "normal", "hard"], Suffix],
        Field(description='text put after the question, where not the built-in one; "": none'),
    ] = {}  # noqa: RUF012 (pydantic copies it)


class StrategiesPolicy(RoutingPolicy):
    """Paper #52 (DiffAdapt): a probe on the small model's state after the prompt picks one of three strategies.

    Easy: temperature 0.5 and 0.4 of the caller's max_tokens; normal: 0.8 and all; hard: 0.4 and half. The likeliest
    strategy is taken.
    """

    Params = StrategiesParams
    papers = (52,)
    params: StrategiesParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._rules = rules_version(self.params.model_dump(mode="json"))
        self._kept = Kept(self.params.artifact, STRATEGY_PROBE, Probe.load)

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: no such artifact, or for other models.
        """
        field = f"{self.where}.artifact"
        check_reads(self._kept.get(models, field)[0], models, field)

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """See `RoutingPolicy.methods`."""
        yield f"{field}.method", self.params.method

    @classmethod
    def check_params(cls, params: Any, field: str) -> None:
        """See `RoutingPolicy.check_params`."""
        get_method(params.method.name, f"{field}.method.name").parse(params.method.params, f"{field}.method")

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        probe, version = self._kept.get(models, f"{self.where}.artifact")
        scores, features = await ask_probe(probe, asked, models)
        strategy = STRATEGIES[max(STRATEGIES, key=scores.__getitem__)]
        sampling = {
            "temperature": strategy.temperature,
            "max_tokens_share": strategy.share,
        }
        return Decision(
            self.params.method.name,
            self.params.method.params,
            self.name,
            f"{version}+{self._rules}",
            features,
            scores,
            reason=f"the question looks {strategy.name} ({scores[strategy.name]:.2f})",
            sampling=sampling,
            suffix=self.params.suffixes.get(strategy.name, strategy.suffix),  # type: ignore[call-overload]
        )


PART = StrategiesPolicy
