"""Grammar-aligned decoding: answers under a structure follow the model's law given that they fit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

import torch
from pydantic import Field

from decoding.constraints.base import ANY, Constraint
from decoding.decode_loop import reported, stream
from decoding.logits import keep_allowed
from decoding.model import Model, ModelPool, ReadSpec, Request
from decoding.processor_chain import chain_of
from decoding.sequence import Sequence
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

MOST_NODES = 1 << 20
NODE_BYTES = 400


class AsapParams(MethodParams):
    """Parameters of `asap`."""

    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"


class Node:
    """Beginning of an answer that has been written.

    Attributes:
        fitting: upper bound of the probability that the model ends it with a text that fits.
        allowed: probability of the tokens that the structure allows after it.
        children: by token, its raw probability and where it leads.
    """

    __slots__ = ("allowed", "children", "fitting")

    def __init__(self) -> None:
        self.fitting = 1.0
        self.allowed = 1.0
        self.children: dict[int, tuple[float, Node]] = {}

    def update(self) -> None:
        """Lower the bound to what is known of its children; unexplored ones that are allowed count as fitting."""
        lost = sum(prob * (1.0 - child.fitting) for prob, child in self.children.values())
        self.fitting = min(self.fitting, max(self.allowed - lost, 0.0))


class Expectations:
    """Beginnings of the answers to one prompt under one structure; see `decoding.drafter_state`."""

    def __init__(self) -> None:
        self.root = Node()
        self.count = 1

    @property
    def nbytes(self) -> int:
        """Estimated host memory."""
        return self.count * NODE_BYTES

    def below(self, node: Node, token: int, prob: float) -> Node:
        """Return the node after a token, made where there is none; with too many nodes all are forgotten."""
        if token not in node.children:
            if self.count >= MOST_NODES:
                self.root, self.count = Node(), 1
            node.children[token] = prob, Node()
            self.count += 1
        return node.children[token][1]


@method(params=AsapParams, papers=(170,), lossless=False, needs=frozenset(), resumable=True)
async def asap(request: Request, models: ModelPool, params: AsapParams) -> AsyncIterator[Segment]:
    """One model answers under a structure, and learns from each answer which beginnings end badly.

    Paper #170 (Grammar-Aligned Decoding), adaptive sampling with approximate expected futures. A mask alone gives a
    beginning the model's probability, however improbable all ways are to end it. Here it is multiplied by the
    probability that the model ends it with a text that fits: 1 at first, then what earlier answers to the same prompt
    under the same structure have shown. So the first answer is that of `plain`, and the law of later ones converges to
    the model's own, given that the text fits. A tenant's answers learn from each other, also those of one request;
    an answer depends on those before it, not on its seed alone.
    """
    model, seq = models.by_role(params.model), request.sequence
    constraint, why = seq.constraint, _unsupported(seq)
    if constraint is None or why:
        request.notes.append(f"asap: as plain, for {why}")
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    known = model.stores.open(_kind(seq, model), seq.learner, Expectations)
    node = known.root
    for written in seq.answer:  # of an answer that another replica began, as far as it is known here
        node = node.children[written][1] if written in node.children else Node()
    walked = [node]
    try:
        while not seq.finished:
            token, prob, node.allowed = await _next(model, seq, constraint, node)
            node = known.below(node, token.id, prob)
            walked.append(node)
            seq.append(token, model.num_parameters)
            yield Segment((token,), "finish" if seq.finished else "max_tokens")
    finally:  # what was written until the caller left has been seen, too
        for each in reversed(walked[:-1]):
            each.update()


def _unsupported(seq: Sequence) -> str:
    """Why the weights are not used; "": they are."""
    if seq.constraint is None:
        return "the request has no structure"
    chain, sampling = chain_of(seq), seq.sampling
    if sampling.greedy or chain.before or chain.after or sampling.bans_tokens:
        return "the weights are of the model's own law: temperature 1, and nothing else that changes it"
    return ""


def _kind(seq: Sequence, model: Model) -> str:
    structure = seq.sampling.structure
    asked = f"{model.digest} {structure} {seq.tokens[: seq.num_prompt_tokens]}"
    return f"asap/{hashlib.sha256(asked.encode()).hexdigest()}"


async def _next(model: Model, seq: Sequence, constraint: Constraint, node: Node) -> tuple[Token, float, float]:
    """The next token, its raw probability, and that of all that are allowed."""
    [row] = await model.extend(seq, want=reported(seq) | ReadSpec(draw=None, logits=True))
    assert row.logits is not None
    logp = torch.log_softmax(row.logits.float(), -1)
    [mask] = constraint.masks(seq.answer, [()])
    masked = logp[None] if mask is None or mask is ANY else keep_allowed(logp[None], [0], [mask])
    weighted = logp.clone()
    for known, (_, child) in node.children.items():
        weighted[known] += math.log(child.fitting) if child.fitting > 0.0 else -math.inf
    if not bool((weighted + masked[0]).isfinite().any()):  # every way on ends badly: an end is owed all the same
        weighted = logp
    [chosen] = await model.choose(seq, weighted[None], [()], ReadSpec())
    logprob = float(logp[chosen.token])
    token = Token(chosen.token, model.name, logprob=logprob, entropy_bits=row.entropy_bits, top=row.top)
    return token, math.exp(logprob), min(float(masked.logsumexp(-1).exp()), 1.0)
