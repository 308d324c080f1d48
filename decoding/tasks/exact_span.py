"""The most probable part of a passage as the answer to a question, found exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from decoding.methods.exact_span import cuts_in, most_probable
from decoding.tasks.base import Progress, Task, TaskResult, TaskRun, Text
from turnout.errors import invalid
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import ModelPool

BEFORE, BETWEEN, AFTER = "Passage: ", "\nQuestion: ", "\nAnswer:"


class ExactSpanParams(MethodParams):
    """Parameters of `exact_span`."""

    example: ClassVar = {"passage": "Rain fell on Tuesday.", "question": "When?", "longest": 6, "at_once": 8}

    passage: Annotated[Text, Field(description="text of which the answer is a part")]
    question: Annotated[Text, Field(description="what is asked about it")]
    longest: Annotated[int, Field(ge=1, le=1024, description="tokens of the longest part")] = 32
    normalised: Annotated[bool, Field(description="whether log-probabilities are divided by the number of tokens")] = (
        False
    )
    at_once: Annotated[int, Field(ge=1, le=256, description="most beginnings in one batch")] = 16


class ExactSpanResult(TaskResult):
    """A verbatim part of the passage."""

    text: str
    begin: Annotated[int, Field(description="of its first character in the passage")]
    end: Annotated[int, Field(description="behind its last character")]
    tokens: int
    logprob: Annotated[float, Field(description="of the part and of the end of the answer after it, in nats")]
    score: Annotated[float, Field(description="what was compared")]


class ExactSpan(Task):
    """The search of the method `exact_span`, whose passage and question a request gives.

    Paper #164 (exact-extract): all parts of the passage are compared, by their probability and that of the answer's end
    after them.
    """

    params: ExactSpanParams
    Params = ExactSpanParams
    Result = ExactSpanResult
    papers = (164,)

    async def run(self, run: TaskRun, models: ModelPool, progress: Progress) -> ExactSpanResult:
        """See `Task.run`."""
        params = self.params
        if not run.end_ids:
            raise invalid("model", f"{run.model.name!r} has no token that ends an answer, which this task compares")
        prompt = [*run.begin, *await run.encode(BEFORE + params.passage + BETWEEN + params.question + AFTER)]
        run.check_room("passage", len(prompt), params.longest)
        seq = run.sequence(prompt, max_tokens=params.longest + 1)
        try:
            cuts = cuts_in(prompt, BEFORE + params.passage + BETWEEN, models.tokenizer)
            data = params.passage.encode()
            cuts = {p: cut - len(BEFORE) for p, cut in cuts.items() if 0 <= cut - len(BEFORE) <= len(data)}
            search = (params.longest, params.normalised, params.at_once, progress.done)
            found = await most_probable(run.model, seq, tuple(cuts), *search)
        finally:
            run.model.release(seq)
        if found is None:
            raise invalid(self.field("passage"), "has no part that the model's tokens can be cut at")
        progress.read(len(prompt) + _read(tuple(cuts), params.longest))
        size = len(found.logprobs) - 1
        begin, end = cuts[found.begin], cuts[found.begin + size]
        first = len(data[:begin].decode())
        text = data[begin:end].decode()
        return ExactSpanResult(
            text=text,
            begin=first,
            end=first + len(text),
            tokens=size,
            logprob=sum(found.logprobs),
            score=found.score,
        )


def _read(cuts: tuple[int, ...], longest: int) -> int:
    """Tokens that were read after the prompt: from each beginning, those of the longest part."""
    ends = [[cut for cut in cuts[at + 1 :] if cut - begin <= longest] for at, begin in enumerate(cuts)]
    return sum(each[-1] - begin for each, begin in zip(ends, cuts, strict=True) if each)


PART = ExactSpan
