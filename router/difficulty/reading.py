"""What a probe says of a request, by whatever it reads: the small model's state after the prompt, or the text."""

from __future__ import annotations

from decoding.model import ModelPool
from router.base import Asked
from router.difficulty.features import features_of, state_of
from router.difficulty.probe import Probe
from router.difficulty.text_features import read_text
from turnout.errors import TurnoutError, invalid


def check_reads(probe: Probe, models: ModelPool, field: str) -> None:
    """Refuse a probe that reads what no model of the pool can say.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it reads the small model's state, and that model is an endpoint.
    """
    if probe.reads == "text":
        return
    try:
        models.by_role("small")
    except TurnoutError:
        name = models.roles["small"]
        raise invalid(
            field,
            f"its probe reads the hidden state of the small model, and {name!r} is an endpoint; train one that reads"
            " the prompt's text (`turnout train router --reads text`)",
        ) from None


async def ask_probe(probe: Probe, asked: Asked, models: ModelPool) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a probe predicts for a request, and the features that it saw; see `Probe.predict`."""
    if probe.reads == "text":
        vector, features = read_text(asked.prompt_text)
    else:
        row = await asked.read(models)
        vector, features = state_of(row), features_of(row, asked.request.sequence.num_prompt_tokens)
    return probe.predict(vector, features), features
