"""Answers to other prompts than the request's, which a part reads and discards."""

from __future__ import annotations

from collections.abc import Sequence as Items

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.candidates import MARK, charge
from decoding.recorder import watched
from decoding.sequence import Sequence


async def write_after(
    group: AnswerSet,
    tokens: Items[int],
    seed: int,
    temperature: float,
    longest: int | None = None,
    mark: str = MARK,
) -> Candidate:
    """Write on from other tokens, with the model that wrote the answers; its work counts as discarded.

    Args:
        group: the answers; has the request's sequence, whose parameters hold.
        tokens: the prompt, at least one.
        seed: of the noise.
        temperature: of the tokens.
        longest: most tokens; None: as many as the answer may still have.
        mark: of the final answer.

    Raises:
        ValueError: the model's context has no room behind the prompt, or endpoints wrote the answers.
    """
    seq, model, models = group.context
    room = min(seq.num_remaining, model.max_length - len(tokens))
    if room < 1:
        raise ValueError("a prompt with a text of the model in it has no room in the model's context")
    most = min(longest or room, room)
    sampling = seq.sampling.model_copy(update={"temperature": temperature, "max_tokens": most, "min_tokens": 0})
    made = Sequence(
        tokens, sampling, seed, seq.end_ids,
        sharing=seq.sharing, tenant=seq.tenant, lossy=seq.lossy, low_priority=seq.low_priority,
    )  # fmt: skip
    made.owner, made.networks = seq.owner, seq.networks
    try:
        await model.decode(made, watched())
        return Candidate.of(made, 0, models, mark)
    finally:
        charge(seq, made)
        model.release(made)
