"""Draft trees grown by a model, one forward a level: by path probability, or from candidates added by a drafter."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from decoding.drafters.base import NOTHING, DraftBudget
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.tree_plans import TreePlan
from decoding.verifiers.base import probs_of

if TYPE_CHECKING:
    from decoding.model import Model

PROBS = ReadSpec(draw=None, probs=True)
# Below every log-probability of a token that is possible, its noise included.
IMPOSSIBLE = -1e6

Beyond = Literal["nothing", "likely", "uniform"]


class GrowingTree:
    """A draft in the making: candidates are added one by one; what is read below them is fed level by level.

    Candidates without a read below them cost the model nothing.

    Args:
        model: reads, and is the draft's source.
        seq: what the draft continues.
        length: says below which candidates to draft on.

    Attributes:
        seq: as given.
        tokens: token of each candidate.
        parents: index of each candidate's parent, ROOT for the root.
        proposals: the distribution each was drawn from, float32 [vocab]; None for a fixed one.
        depths: 1 for the root's children.
    """

    def __init__(self, model: Model, seq: Sequence, length: LengthPolicy) -> None:
        self._model = model
        self.seq = seq
        # Any other says how deep to draft before a round, and nothing within it.
        self._stepwise = length if length.stepwise else None
        self._read_at: dict[int, Readout] = {}
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.proposals: list[torch.Tensor | None] = []
        self.depths: list[int] = []
        self._fed_tokens: list[int] = []
        self._fed_parents: list[int] = []
        self._fed_as = {ROOT: ROOT}
        self._num_read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, proposal: torch.Tensor | None = None) -> int:
        """Add a candidate after its earlier siblings; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.proposals.append(proposal)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        return len(self.tokens) - 1

    def continues(self, node: int) -> bool:
        """Return whether to draft on below a candidate, which stays in the draft whatever the answer.

        Not below one that ends the text, nor where the length policy stops.
        """
        if self.tokens[node] in self.seq.end_ids:
            return False
        if self._stepwise is None:
            return True
        path = []
        while node != ROOT:
            path.append(Step(self.tokens[node], self._read_at[self.parents[node]]))
            node = self.parents[node]
        return self._stepwise.continues(path[::-1])

    async def read_root(self, want: ReadSpec) -> Readout:
        """Read the model's output at the end of the sequence."""
        row = await self._ask_root(self._wanted(want))
        self._keep([ROOT], [row])
        return row

    def has_room(self, count: int) -> bool:
        """Return whether the model's cache holds `count` more rows after the sequence and the rows read of the tree."""
        return len(self.seq) + self._num_read + count <= self._model.max_length

    async def read(self, nodes: list[int], want: ReadSpec) -> list[Readout]:
        """Read the model's output after each of some candidates, in one forward.

        Args:
            nodes: at least one, none of them read before, their parents all read.
            want: what to read.
        """
        rows = await self._ask(nodes, self._wanted(want))
        self._keep(nodes, rows)
        return rows

    def _wanted(self, want: ReadSpec) -> ReadSpec:
        return want if self._stepwise is None else want | self._stepwise.want

    def _keep(self, nodes: list[int], rows: list[Readout]) -> None:
        if self._stepwise is not None:
            self._read_at.update(zip(nodes, rows, strict=True))

    async def _ask_root(self, want: ReadSpec) -> Readout:
        [row] = await self._model.extend(self.seq, want=want)
        return row

    async def _ask(self, nodes: list[int], want: ReadSpec) -> list[Readout]:
        start = len(self._fed_tokens)
        self._num_read += len(nodes)
        for node in nodes:
            self._fed_as[node] = len(self._fed_tokens)
            self._fed_tokens.append(self.tokens[node])
            self._fed_parents.append(self._fed_as[self.parents[node]])
        fed = DraftTree(tuple(self._fed_tokens), tuple(self._fed_parents), self._model.name)
        return await self._model.expand(self.seq, fed, start, want)

    def drawn(self) -> DraftTree:
        """All candidates, with the distributions they were drawn from."""
        return DraftTree(tuple(self.tokens), tuple(self.parents), self._model.name, tuple(self.proposals))

    def some(self, nodes: list[int], proposals: tuple[torch.Tensor | None, ...] = ()) -> DraftTree:
        """Some candidates, each parent before its children."""
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        tokens = tuple(self.tokens[node] for node in nodes)
        parents = tuple(place[self.parents[node]] for node in nodes)
        return DraftTree(tokens, parents, self._model.name, proposals)


@dataclass(frozen=True, slots=True)
class TopTree:
    """The most probable paths under a draft model.

    Attributes:
        tree: the most probable nodes, best first.
        logprobs: [n] raw log-probability of the path from the root to each node, in nats; it never rises.
        root: what the model read at the sequence's end.
    """

    tree: DraftTree
    logprobs: tuple[float, ...]
    root: Readout


async def grow_top_tree(growing: GrowingTree, room: DraftBudget, branch: int, root_want: ReadSpec = NOTHING) -> TopTree:
    """The tree of the most probable paths, found with one forward a level.

    The result is that of expanding the most probable node first (paper #56, Accelerating LLM Inference with Staged
    Speculative Decoding): a node among the best of all has its parent among the best of the levels above, so only
    those are read. A node the length policy stops at has no children, as if it ended the text.

    Args:
        growing: empty; its model's raw log-probabilities decide.
        room: deepest node, and most nodes.
        branch: children considered per node.
        root_want: what else to read at the root.
    """
    want = ReadSpec(draw=None, top=branch)
    root = await growing.read_root(want | root_want)
    logprobs: list[float] = []
    best: list[int] = []
    level, rows = [ROOT], [root]
    for depth in range(1, room.depth + 1):
        for parent, row in zip(level, rows, strict=True):
            above = 0.0 if parent == ROOT else logprobs[parent]
            for token, logprob in row.top[:branch]:
                if logprob > -math.inf:
                    growing.add(token, parent)
                    logprobs.append(above + logprob)
        best = heapq.nsmallest(room.nodes, range(len(logprobs)), key=lambda node: (-logprobs[node], node))
        if depth == room.depth:
            break
        level = sorted(node for node in best if growing.depths[node] == depth and growing.continues(node))
        if not level or not growing.has_room(len(level)):
            break
        rows = await growing.read(level, want)
    return TopTree(growing.some(best), tuple(logprobs[node] for node in best), root)


def draw_without_replacement(
    probs: list[torch.Tensor], most: int, seed: int, position: int, lanes: list[int], exhaust: bool = False
) -> list[list[tuple[int, float]]]:
    """Tokens drawn at several nodes of one level, by Gumbel-top-k: the order of the keys is the draw order.

    Args:
        probs: float32 [vocab] for each node; one without any mass (a mask left nothing) gives no token.
        most: draws per node.
        seed: of the round (`decoding.noise.round_seed`).
        position: the drawn tokens' place in the sequence.
        lanes: what tells the nodes of the level apart.
        exhaust: whether to go on where no more tokens are possible, then with any of the others, all equally likely.

    Returns:
        For each node, the tokens in draw order with their probabilities; fewer than `most` where no more are possible.
    """
    stacked = torch.stack(probs)
    logs = stacked.log()
    if exhaust:
        # In double precision, that so low a number leaves the noise as it is.
        logs = logs.double().clamp_(min=IMPOSSIBLE).masked_fill_(~(stacked > 0).any(-1, keepdim=True), -math.inf)
    keys = logs.add_(tree_noise(seed, position, lanes, stacked))
    best = keys.topk(min(most, keys.shape[1]), dim=-1)
    chances = stacked.gather(1, best.indices)
    drawn = zip(best.values.tolist(), best.indices.tolist(), chances.tolist(), strict=True)
    return [[(token, chance) for key, token, chance in zip(*row, strict=True) if key > -math.inf] for row in drawn]


def tree_noise(seed: int, position: int, lanes: list[int], like: torch.Tensor) -> torch.Tensor:
    """Gumbel noise for nodes of one level.

    Args:
        seed: of the round (`decoding.noise.round_seed`).
        position: the drawn tokens' place in the sequence.
        lanes: what tells the nodes of the level apart, one a row.
        like: [..., vocab], on the device the noise is made on.

    Returns:
        float32 [len(lanes), vocab].
    """
    return gumbel([noise_key(seed, position, Purpose.DRAFT, lane) for lane in lanes], like.shape[-1], like.device)


def sibling_proposals(probs: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
    """Return the distribution that each sibling was drawn from: `probs` without the earlier ones, renormalised.

    Where nothing is left of `probs`, that is the same chance for every token that is not an earlier sibling.

    Args:
        probs: float32 [vocab], what the first was drawn from.
        tokens: in draw order.
    """
    proposals = [probs]
    for place, token in enumerate(tokens[:-1]):
        left = proposals[-1].clone()
        left[token] = 0.0
        mass = float(left.sum())
        if mass == 0.0:
            left.fill_(1.0)[tokens[: place + 1]] = 0.0
            mass = float(left.sum())
        proposals.append(left.div_(mass))
    return proposals[: len(tokens)]


async def grow_planned(growing: GrowingTree, plan: TreePlan, beyond: Beyond = "nothing") -> DraftTree:
    """A tree of one shape, its siblings drawn without replacement; one forward a level.

    Below a node the length policy stops at, the shape is not filled: the places stay free.

    Args:
        growing: empty; its model's distributions are drawn from.
        plan: the shape.
        beyond: what else a node has for children where fewer tokens are possible than it was to have: nothing; the
            likeliest others under the raw distribution, as chosen candidates; others drawn uniformly.
    """
    seq = growing.seq
    seed = round_seed(seq.seed, len(seq))
    children = plan.children()
    want = PROBS | ReadSpec(draw=None, top=max(map(len, children.values())) if beyond == "likely" else 0)
    level, rows = [(ROOT, ROOT)], [await growing.read_root(want)]
    for depth in range(plan.depth):
        most = max(len(children[place]) for place, _ in level)
        probs = [probs_of(row) for row in rows]
        lanes = [node + 1 for _, node in level]
        below = []
        drawn = draw_without_replacement(probs, most, seed, len(seq) + depth, lanes, beyond == "uniform")
        for (place, parent), row, q, draws in zip(level, rows, probs, drawn, strict=True):
            tokens = [token for token, _ in draws[: len(children[place])]]
            left = [token for token, logprob in row.top if token not in tokens and logprob > -math.inf]
            others = left if tokens else []
            candidates = [*zip(tokens, sibling_proposals(q, tokens), strict=True), *((token, None) for token in others)]
            for child, (token, proposal) in zip(children[place], candidates, strict=False):
                node = growing.add(token, parent, proposal)
                if children[child] and growing.continues(node):
                    below.append((child, node))
        if not below:
            break
        level, rows = below, await growing.read([node for _, node in below], want)
    return growing.drawn()
