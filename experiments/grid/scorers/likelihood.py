"""Mean log-probability of a row's text after its prompt."""

from __future__ import annotations

from experiments.grid.scoring import Item, LikelihoodChoice, Score
from pool.local_pool import LocalPool
from turnout.calls import ScoreCall
from turnout.errors import invalid


class LikelihoodScorer:
    """Nats a token, under the model that the cell's method `plain` names."""

    generates = False

    def __init__(self, choice: LikelihoodChoice) -> None:
        self._choice = choice

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """See `Scorer.score`."""
        if pool is None:
            raise invalid("scorer.kind", "likelihood needs a pool, and none is loaded")
        text = str(item.fields[self._choice.text])
        [scored] = await pool.score(ScoreCall(f"likelihood-{item.id}", model, item.prompt, (text,)))
        logprobs = [token.logprob for token in scored.tokens if token.logprob is not None]
        if not logprobs:
            raise invalid(self._choice.text, "must not be empty")
        return Score(sum(logprobs) / len(logprobs))


SCORER = LikelihoodScorer
