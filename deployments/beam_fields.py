"""Beam search by the names that vLLM's clients send: other names of the method `search` with `beam`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from deployments.decoding_body import Decoding
from deployments.request_fields import BodyPart
from turnout.errors import invalid
from turnout.types import MOST_WIDTH, EarlyStopping

METHOD = "search"
NEEDS = "needs use_beam_search: true"


class BeamFields(BodyPart):
    """Fields of bodies that ask for beam search."""

    use_beam_search: Annotated[
        bool, Field(description="answer with the n best of a beam: the method search, with the search beam")
    ] = False
    best_of: Annotated[
        int | None,
        Field(ge=1, le=MOST_WIDTH, description="with use_beam_search: hypotheses followed, at least n; absent: n"),
    ] = None
    length_penalty: Annotated[
        FiniteFloat, Field(ge=-16.0, le=16.0, description="with use_beam_search: of search.beam")
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping, Field(description="with use_beam_search: of search.beam; true, false or never")
    ] = False

    def with_beams(self, decoding: Decoding, n: int, names: dict[str, str]) -> Decoding:
        """Return how to decode, with what these fields ask for.

        Args:
            decoding: as the body has it.
            n: answers to the prompt.
            names: how refusals spell fields; gets the names of these.

        Raises:
            TurnoutError: INVALID_ARGUMENT: they contradict each other or `decoding`.
        """
        if not self.use_beam_search:
            if self.best_of not in (None, 1):
                raise invalid("best_of", f"{NEEDS}; for the best of several draws use the decoding method `best_of`")
            if self.length_penalty != 1.0:
                raise invalid("length_penalty", f"{NEEDS}; allowed without: 1")
            if self.early_stopping is not False:
                raise invalid("early_stopping", f"{NEEDS}; allowed without: false")
            return decoding
        if decoding.method not in (None, METHOD):
            raise invalid("use_beam_search", f"conflicts with decoding.method {decoding.method!r}; give one of them")
        for name in ("search", "width"):
            if name in decoding.params:
                raise invalid("use_beam_search", f"conflicts with decoding.params.{name}; give one of them")
        width = self.best_of if self.best_of is not None else n
        if width < n:
            raise invalid("best_of", f"must be at least n, {n} (got {width})")
        names["method.params.width"] = "n" if self.best_of is None else "best_of"
        beam: dict[str, Any] = {"name": "beam"}
        for name in ("length_penalty", "early_stopping"):
            beam[name] = getattr(self, name)
            names[f"method.params.search.{name}"] = name
        params = {**decoding.params, "width": width, "search": beam}
        return decoding.model_copy(update={"method": METHOD, "params": params})
