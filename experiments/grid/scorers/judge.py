"""A model grades the answer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

from experiments.grid.scorers.text import last_number
from experiments.grid.scoring import Item, JudgeChoice, Score
from pool.local_pool import LocalPool
from turnout.api_keys import read_api_key
from turnout.calls import ChatMessage, Chunk, GenerateCall
from turnout.client import AsyncClient
from turnout.errors import Code, TurnoutError, invalid
from turnout.types import SamplingParams


class JudgeScorer:
    """The last number of a greedy reply, over the best grade; the judge does not know which model answered."""

    generates = True

    def __init__(self, choice: JudgeChoice) -> None:
        self._choice = choice

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """See `Scorer.score`."""
        given = {name: item.fields[name] for name in self._choice.fields}
        try:
            question = self._choice.template.format(prompt=item.prompt, answer=answer, **given)
        except (KeyError, IndexError, ValueError) as error:
            raise invalid("scorer.template", f"uses {error}, which is not among prompt, answer and fields") from None
        within_s = self._choice.timeout_s
        try:
            async with asyncio.timeout(within_s):
                reply = await (self._served(question) if self._choice.address else self._local(question, item, pool))
        except TimeoutError:
            message = f"the judge did not reply within {within_s:g} s"
            raise TurnoutError(Code.DEADLINE_EXCEEDED, message, "scorer.timeout_s") from None
        grade = last_number(reply)
        if grade is None:
            raise TurnoutError(Code.INVALID_ARGUMENT, f"the judge gave no number: {reply[:80]!r}", "scorer.judge")
        return Score(min(max(grade / self._choice.most, 0.0), 1.0), reply.strip()[:200])

    async def _served(self, question: str) -> str:
        async with AsyncClient(str(self._choice.address), api_key=self._key()) as client:
            found = await client.generate(
                messages=[ChatMessage("user", question)],
                model=self._choice.model,
                temperature=0.0,
                max_tokens=self._choice.max_tokens,
            )
        return found.text

    def _key(self) -> str:
        """As it is now: keys are replaced while experiments run."""
        path = self._choice.key_file
        return read_api_key(Path(path).expanduser() if path is not None else None, "scorer.key_file")

    async def _local(self, question: str, item: Item, pool: LocalPool | None) -> str:
        if pool is None:
            raise invalid("scorer.address", "is missing, and no pool is loaded that could judge")
        sampling = SamplingParams(temperature=0.0, max_tokens=self._choice.max_tokens, seed=0)
        call = GenerateCall(
            f"judge-{item.id}",
            self._choice.model or pool.roles["large"],
            sampling,
            messages=(ChatMessage("user", question),),
            method="plain",
        )
        text = ""
        async with aclosing(pool.generate(call)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Chunk):
                    text += event.text
        return text


SCORER = JudgeScorer
