"""Two outcomes of one task side by side: do they say the same of the model?"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.foreign.harness import Outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """One task of one model, served, and the same model in the tool's own backend.

    Attributes:
        task: of the harness.
        served_as: the name that requests asked for.
        backend: that asked.
        reference: what the harness's own backend gave.
        served: what the endpoint gave.
    """

    task: str
    served_as: str
    backend: str
    reference: Outcome
    served: Outcome

    @property
    def agrees(self) -> bool:
        """Whether the scores differ by no more than the reference's standard error, over the same problems."""
        same = self.reference.texts.keys() == self.served.texts.keys()
        same = same and self.reference.logprobs.keys() == self.served.logprobs.keys()
        return same and abs(self.served.score - self.reference.score) <= self.reference.stderr

    @property
    def same_texts(self) -> int:
        """Problems with the same text, character for character."""
        return sum(self.served.texts.get(place) == text for place, text in self.reference.texts.items())

    @property
    def logprob_gap(self) -> float:
        """The largest difference between log-probabilities of one text, in nats."""
        return max(
            abs(one - other)
            for place, own in self.reference.logprobs.items()
            for one, other in zip(own, self.served.logprobs[place], strict=True)
        )
