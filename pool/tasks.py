"""Tasks of a pool: what is asked of its models that writes no answer. The tasks themselves are in `decoding.tasks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from decoding.tasks.base import Progress, Task, TaskRun, of_param, open_task
from decoding.text import continue_with
from pool.scoring import score, scored_groups
from turnout.calls import ScoreCall, ScoredTokens
from turnout.embed_calls import TaskAnswer, TaskCall
from turnout.errors import TurnoutError

if TYPE_CHECKING:
    from engine.member import PoolMember
    from pool.pool import Pool


def opened(call: TaskCall) -> Task:
    """Make the task that a call names.

    Raises:
        TurnoutError: NOT_FOUND: there is none of the name; INVALID_ARGUMENT: a parameter, named in the message.
    """
    return open_task(call.name, dict(call.params))


async def run_task(
    pool: Pool, call: TaskCall, model: PoolMember, task: Task, show: Callable[[int, int], object] | None = None
) -> TaskAnswer:
    """Carry out a task.

    Args:
        pool: whose models.
        call: what is asked for.
        model: which was asked.
        task: of `opened`.
        show: called with the parts that are done, and all of them.

    Raises:
        TurnoutError: as the task does. What was read until then is noted in it, and in any other error.
    """
    task.check(pool.model_pool)
    progress = Progress(show)
    try:
        result = await task.run(task_run(pool, call, model), pool.model_pool, progress)
    except Exception as error:
        vars(error)["prompt_tokens"] = progress.prompt_tokens
        raise
    return TaskAnswer(result.model_dump(mode="json"), progress.prompt_tokens)


def task_run(pool: Pool, call: TaskCall, model: PoolMember) -> TaskRun:
    """The call as a task sees it."""
    tokenizer = pool.tokenizer

    async def encode(text: str) -> list[int]:
        ids = await tokenizer.either(len(text), partial(continue_with, text=text, parse_special=False))
        return list(ids)

    async def scores(prompt: str, completions: tuple[str, ...], top: int) -> list[ScoredTokens]:
        asked = ScoreCall(call.request_id, call.model, prompt, completions, call.tenant, top, parse_special=False)
        asked = replace(asked, sharing=call.sharing, priority=call.priority)
        try:
            return await score(pool, asked, model, await scored_groups(pool, asked, model))
        except TurnoutError as error:
            raise of_param(error) from None

    return TaskRun(
        id=call.request_id,
        model=model,
        score=scores,
        encode=encode,
        begin=tuple(tokenizer.encode("")),
        end_ids=tokenizer.eos_ids,
        sharing=lambda ids: pool.share(call.tenant, ids, call.sharing),
        tenant=call.tenant,
        low_priority=call.priority == "batch",
    )
