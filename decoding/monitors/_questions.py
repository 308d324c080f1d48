"""Two questions about a stretch of reasoning, asked of a small model in one prefill each, or of a rule."""

from __future__ import annotations

import re
from typing import Protocol

from decoding.model import Model, ReadSpec, Request
from decoding.sequence import Sequence
from decoding.text import TextCodec, continue_with, yes_and_no
from turnout.types import SamplingParams

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Questions(Protocol):
    """Questions about a candidate conclusion."""

    async def states_answer(self, candidate: str) -> bool:
        """Return whether it states an answer at all."""
        ...

    async def equivalent(self, candidate: str, earlier: str) -> bool:
        """Return whether it states the same answer as an earlier one."""
        ...

    def close(self) -> None:
        """Give back what the questions held."""
        ...


class NumberQuestions:
    """For tasks whose answers are numbers: a candidate's answer is the last number in it."""

    async def states_answer(self, candidate: str) -> bool:
        """See `Questions.states_answer`."""
        return NUMBER.search(candidate) is not None

    async def equivalent(self, candidate: str, earlier: str) -> bool:
        """See `Questions.equivalent`."""
        numbers = [NUMBER.findall(text)[-1:] for text in (candidate, earlier)]
        return numbers[0] == numbers[1] != []

    def close(self) -> None:
        """Nothing is held."""


class ModelQuestions:
    """Asked of a model after the request's prompt, whose cache all questions share; yes if P(yes) > P(no) comes next.

    Args:
        model: reads; one forward a question, nothing is generated.
        codec: its tokenizer.
        request: whose prompt, tenant and meter; what the questions cost is added to the meter by `close`.
        existence: text of the first question, with {candidate}.
        equivalence: text of the second, with {candidate} and {earlier}.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the tokenizer cannot tell yes from no by their first token.
    """

    def __init__(self, model: Model, codec: TextCodec, request: Request, existence: str, equivalence: str) -> None:
        self._model = model
        self._codec = codec
        self._meter = request.sequence.meter
        self._texts = (existence, equivalence)
        seq = request.sequence
        self._base = Sequence(
            seq.tokens[: seq.num_prompt_tokens],
            SamplingParams(temperature=0.0, max_tokens=seq.sampling.max_tokens),
            seed=0,
            sharing=seq.sharing,
            tenant=seq.tenant,
            lossy=seq.lossy,
            low_priority=seq.low_priority,
        )
        self._base.owner = seq.owner
        self._yes, self._no = yes_and_no(codec, "method.params.monitor.asks")

    async def states_answer(self, candidate: str) -> bool:
        """See `Questions.states_answer`."""
        return await self._ask(self._texts[0].replace("{candidate}", candidate))

    async def equivalent(self, candidate: str, earlier: str) -> bool:
        """See `Questions.equivalent`."""
        return await self._ask(self._texts[1].replace("{candidate}", candidate).replace("{earlier}", earlier))

    async def _ask(self, text: str) -> bool:
        """False also where the question has no room in the model's context."""
        # Not kept: candidates come once. What an answer spells out is text.
        tokens = continue_with(self._codec, text, parse_special=False)
        if len(self._base) + len(tokens) > self._model.max_length:
            return False
        [row] = await self._model.extend(self._base, tokens, ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        logits = row.logits.float()
        return bool(logits[self._yes].logsumexp(0) > logits[self._no].logsumexp(0))

    def close(self) -> None:
        """See `Questions.close`."""
        self._model.release(self._base)
        self._meter.merge(self._base.meter)
