"""A tree of the sequences a stochastic beam search draws without replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.draft_trees import PROBS, GrowingTree, tree_noise
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.noise import round_seed
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import probs_of
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model


class RsdSParams(MethodParams):
    """Parameters of `rsd_s`."""

    beam: Annotated[int, Field(ge=1, le=64, description="nodes of each level")] = 6


class RsdSDrafter(Drafter):
    """Stochastic beam search (paper #80, Recursive Speculative Decoding).

    Every level keeps the `beam` nodes with the largest perturbed log-probabilities of their paths. Siblings stand by
    these, which is the order they were drawn in without replacement. A path that fell out of the beam is left out
    without harm: given its earlier siblings, whether a node is in the beam does not depend on its own token.
    """

    Params = RsdSParams
    papers = (80,)
    runs_on = "small"
    kinds = frozenset({Candidates.DRAWN})
    stepwise = True
    depth = 5
    nodes = 64
    params: RsdSParams

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The tree; where nodes run out, the last level has a narrower beam."""
        growing = GrowingTree(model, seq, length)
        seed = round_seed(seq.seed, len(seq))
        rows = [await growing.read_root(PROBS)]
        level = [ROOT]
        logprobs = perturbed = torch.zeros(1, dtype=torch.float32)
        for depth in range(room.depth):
            probs = torch.stack([probs_of(row) for row in rows])
            noise = tree_noise(seed, len(seq) + depth, [node + 1 for node in level], probs)
            paths = logprobs.to(probs.device)[:, None] + probs.log()
            keys = perturb(paths, perturbed.to(probs.device), noise)
            best = keys.flatten().topk(min(self.params.beam, room.nodes - len(growing), keys.numel()))
            kept = best.indices[best.values > float("-inf")]
            perturbed, logprobs = best.values[: len(kept)], paths.flatten()[kept]
            added = _add(growing, level, probs, kept)
            if len(growing) >= room.nodes or depth + 1 == room.depth:
                break
            # A path that ends here leaves its place in the beam to others: which ones was not decided by their tokens.
            on = [place for place, node in enumerate(added) if growing.continues(node)]
            level, perturbed, logprobs = [added[place] for place in on], perturbed[on], logprobs[on]
            if not level:
                break
            rows = await growing.read(level, PROBS)
        return growing.drawn()


def _add(growing: GrowingTree, level: list[int], probs: torch.Tensor, kept: torch.Tensor) -> list[int]:
    """Add the beam (entries of `probs` flattened, in draw order) under the nodes of a level; returns its nodes."""
    left = list(probs)
    drawn_last: dict[int, int] = {}
    nodes = []
    for entry in kept.tolist():
        slot, token = divmod(entry, probs.shape[1])
        if slot in drawn_last:
            rest = left[slot].clone()
            rest[drawn_last[slot]] = 0.0
            left[slot] = rest.div_(rest.sum())
        drawn_last[slot] = token
        nodes.append(growing.add(token, level[slot], left[slot]))
    return nodes


def perturb(paths: torch.Tensor, above: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Gumbel-perturbed log-probabilities of extended paths, conditioned so that the best of a node equals its own.

    `-log(exp(-G) - exp(-Z) + exp(-g))` with g = path + noise, Z = max g, G the node's own value, in a form that
    does not overflow (Kool, van Hoof, Welling 2019, Stochastic Beams and Where to Find Them).

    Args:
        paths: [beam, vocab] log-probabilities.
        above: [beam] perturbed values of the nodes they extend.
        noise: [beam, vocab] standard Gumbel.

    Returns:
        [beam, vocab]; -inf where the path is impossible.
    """
    values = (paths + noise).nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
    best = values.amax(-1, keepdim=True)
    gap = above[:, None] - values + torch.log1p(-(values - best).exp())
    found = above[:, None] - gap.clamp(min=0.0) - torch.log1p((-gap.abs()).exp())
    return found.masked_fill_(values == float("-inf"), float("-inf"))


PART = RsdSDrafter
