"""As many samples for each line of a job as are predicted to be worth it, under one budget for all of them.

Paper #45 (Learning How Hard to Think). The job's own lines are what the budget is shared out among, so each is looked
at before any is answered: what the small model makes of its prompt tells the chance that a sample of it is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deployments.batches.inputs import Fault
from deployments.batches.lines import Line
from deployments.surfaces import CHAT, COMPLETIONS
from router.allocation import allocate, marginals
from router.policies.adaptive_best_of import AdaptiveBestOfParams
from turnout.calls import AUTO
from turnout.config import PolicyChoice, RoutingConfig, TurnoutConfig
from turnout.errors import invalid
from turnout.registry import validated

GIVEN = ("artifact", "model", "most", "rerank", "temperature")
SAMPLED = (CHAT, COMPLETIONS)  # endpoints whose lines get samples
PROMPT_FIELDS = ("model", "messages", "prompt", "tools", "tool_choice")


def best_of_params(average: float, given: Mapping[str, Any]) -> AdaptiveBestOfParams:
    """What the samples are and how many there may be.

    Args:
        average: samples a line, over the whole job.
        given: parameters of the policy `adaptive_best_of`, of those that hold for a whole job.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the parameter and what is allowed.
    """
    for name in given:
        if name not in GIVEN:
            raise invalid(f"param.{name}", f"must be one of {', '.join(GIVEN)} with --best-of")
    return validated(AdaptiveBestOfParams, {**given, "average": average}, "best-of")


def looking(config: TurnoutConfig, pool: str, params: AdaptiveBestOfParams) -> TurnoutConfig:
    """The configuration of a pool that tells the chances of prompts: it routes by them, one sample each."""
    asked = {"artifact": params.artifact, "model": params.model, "average": 1.0, "most": 1}
    routing = RoutingConfig(policy=PolicyChoice(name="adaptive_best_of", params=asked))
    changed = config.pools[pool].model_copy(update={"routing": routing})
    return config.model_copy(update={"pools": {**config.pools, pool: changed}})


def looks(rows: Iterable[Line | Fault]) -> Iterator[Line]:
    """For each line that leaves the method open, one that asks for the prediction only; its id is the line's number.

    A line with several prompts has no chance of its own, and is left out.
    """
    for row in rows:
        if isinstance(row, Line) and _is_open(row):
            body = {name: row.body[name] for name in PROMPT_FIELDS if name in row.body}
            body |= {"max_tokens": 1, "temperature": 0, "decoding": {"method": AUTO, "explain": True}}
            yield Line(row.number, str(row.number), row.endpoint, body)


def chances_of(records: Iterable[dict[str, Any]], model: str) -> dict[int, float]:
    """By line, the chance that a sample of a model is right: what the answers to `looks` say."""
    return {
        int(record["custom_id"]): record["response"]["body"]["usage"]["turnout"]["route"]["scores"][f"p_{model}"]
        for record in records
    }


def shared_out(chances: Mapping[int, float], params: AdaptiveBestOfParams) -> dict[int, int]:
    """By line, how many samples it gets: together at most `average` a line, each at least one."""
    items = [marginals(chance, params.most) for chance in chances.values()]
    counts = allocate(items, int(params.average * len(items)), least=1)
    return dict(zip(chances, counts, strict=True))


def with_samples(
    rows: Iterable[Line | Fault], counts: Mapping[int, int], params: AdaptiveBestOfParams
) -> Iterator[Line | Fault]:
    """The same rows; a row with a count asks for that number of samples, the best of which is the answer."""
    for row in rows:
        count = counts.get(row.number)
        yield row if count is None or isinstance(row, Fault) else _with(row, count, params)


def _with(line: Line, count: int, params: AdaptiveBestOfParams) -> Line:
    asked = {"model": params.model, "k": count, "rerank": params.rerank.model_dump(mode="json")}
    decoding = {**(line.body.get("decoding") or {}), "method": "best_of", "params": asked}
    body = {**line.body, "decoding": decoding}
    if count > 1 and body.get("temperature") == 0:
        body["temperature"] = params.temperature  # at 0 all samples would be the same
    return Line(line.number, line.custom_id, line.endpoint, body)


def _is_open(line: Line) -> bool:
    decoding, prompt = line.body.get("decoding") or {}, line.body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)
    open_method = isinstance(decoding, dict) and decoding.get("method") in (None, AUTO)
    return line.endpoint in SAMPLED and open_method and not several
