"""Models made of a function, for trying methods without an engine: same protocol, same numbers, no weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from decoding.drafters.base import Drafter, Room
from decoding.lengths.base import LengthPolicy
from decoding.logits import History
from decoding.model import Busy, Model, ModelPool, Row, Score, TokenText, Until, Want
from decoding.readout import read
from decoding.scoring import score_continuation
from decoding.sequence import Sequence
from decoding.sketch import Sketch
from decoding.stores import Stores
from decoding.stretch import run_stretch
from decoding.tree import DraftTree, ExtraRows
from decoding.verifiers.base import Verdict, Verifier, want_of
from turnout.types import Segment

NextLogits = Callable[[list[int]], torch.Tensor]


def markov(probs: torch.Tensor) -> NextLogits:
    """Next-token logits of a first-order Markov chain; probs: [vocab, vocab], row = last token."""
    logits = probs.to(torch.float32).log()
    return lambda tokens: logits[tokens[-1]]


class TableModel:
    """Implements `decoding.model.Model` over a function from tokens to logits.

    In place of a KV cache it remembers which tokens it has been fed for each sequence, and meters forwards and
    fed tokens as an engine does. Each operation gives other tasks a turn first, so that concurrency is real.

    Args:
        name: the model's name.
        next_logits: all tokens so far -> float32 [vocab].
        vocab_size: length of those logits.
        num_parameters: for the meter.
        max_length: most tokens of a sequence.

    Attributes:
        cached: tokens fed for each sequence.
        forwards: forward passes so far.
        fed_tokens: tokens fed so far.
    """

    runs_here = True

    def __init__(
        self, name: str, next_logits: NextLogits, vocab_size: int, num_parameters: int = 1, max_length: int = 1 << 20
    ) -> None:
        self.name = name
        self.next_logits = next_logits
        self.vocab_size = vocab_size
        self.num_parameters = num_parameters
        self.max_length = max_length
        self.digest = f"table {name}"
        self.cached: dict[Sequence, list[int]] = {}
        self.num_layers = 0
        self.stores = Stores()
        self.forwards = 0
        self.fed_tokens = 0

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: Want = Want(), every: bool = False
    ) -> list[Row]:
        """See `decoding.model.Model.extend`."""
        await asyncio.sleep(0)
        self._feed(seq, seq.tokens + list(tokens), recompute=1 + (len(tokens) if every else 0))
        paths = [tokens[:end] for end in range(0 if every else len(tokens), len(tokens) + 1)]
        return self._read(seq, paths, want)

    async def decode(self, seq: Sequence, until: Until = Until()) -> Segment:
        """See `decoding.model.Model.decode`."""

        async def step(want: Want) -> Row:
            return (await self.extend(seq, want=want))[0]

        return await run_stretch(step, seq, until, self.name, self.num_parameters)

    async def expand(self, seq: Sequence, tree: DraftTree, start: int, want: Want) -> list[Row]:
        """See `decoding.model.Model.expand`."""
        await asyncio.sleep(0)
        self._feed(seq, seq.tokens, recompute=0, num_tree_tokens=len(tree) - start)
        return self._read(seq, [_path_tokens(tree, node) for node in range(start, len(tree))], want)

    async def sketch(self, seq: Sequence, sketch: Sketch, want: Want) -> list[Row]:
        """A function has no layers."""
        raise NotImplementedError

    async def read(
        self, seq: Sequence, states: torch.Tensor, paths: list[tuple[int, ...]], want: Want, normed: bool = False
    ) -> list[Row]:
        """A function has no hidden states."""
        raise NotImplementedError

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """A function has no embeddings."""
        raise NotImplementedError

    async def propose(self, seq: Sequence, drafter: Drafter, room: Room, length: LengthPolicy) -> DraftTree:
        """See `decoding.model.Model.propose`."""
        return await drafter.propose(self, seq, room, length)

    async def verify(
        self, seq: Sequence, draft: DraftTree, verifier: Verifier, want: Want = Want(draw=None)
    ) -> Verdict:
        """See `decoding.model.Model.verify`."""
        await asyncio.sleep(0)
        self._feed(seq, seq.tokens, recompute=1, num_tree_tokens=len(draft.fed_tokens))
        paths = [(), *(_path_tokens(draft, node) for node in range(len(draft)))]
        rows = self._read(seq, paths, want_of(verifier, seq) | want)
        if draft.extra is not None:
            rows += self._read(seq, _seen_by_extra_rows(draft, draft.extra), want)
        verdict = verifier.judge(seq, draft, rows, self.name)
        self.cached[seq] = seq.tokens + [draft.tokens[node] for node in verdict.path]
        return replace(verdict, rows=rows)

    def teach(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: Verdict) -> None:
        """See `decoding.model.Model.teach`."""
        drafter.observe(self, seq, draft, verdict)

    async def score(self, seq: Sequence, continuations: list[tuple[int, ...]], top: int = 0) -> list[Score]:
        """See `decoding.model.Model.score`."""
        return [await score_continuation(self, seq, continuation, top) for continuation in continuations]

    async def absorb(self, seq: Sequence) -> None:
        """See `decoding.model.Model.absorb`."""
        await asyncio.sleep(0)
        self._feed(seq, seq.tokens[:-1], recompute=0)

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `decoding.model.Model.fork`."""
        twin = seq.fork(seed)
        self.cached[twin] = list(self.cached.get(seq, ()))
        return twin

    def release(self, seq: Sequence) -> None:
        """See `decoding.model.Model.release`."""
        self.cached.pop(seq, None)

    def step_seconds(self) -> float:
        """See `decoding.model.Model.step_seconds`."""
        return 0.0

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        """See `decoding.model.Model.forward_seconds`."""
        return 0.0

    def busy(self) -> Busy:
        """See `decoding.model.Model.busy`."""
        return Busy(len(self.cached), sum(map(len, self.cached.values())))

    def reading_seconds(self) -> float:
        """See `decoding.speculation.RunsHere.reading_seconds`."""
        return 0.0

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: Want) -> list[Row]:
        logits = torch.stack([self.next_logits(seq.tokens + list(path)) for path in paths])
        return read(logits, [History(seq, path) for path in paths], [want] * len(paths))

    def _feed(self, seq: Sequence, tokens: list[int], recompute: int, num_tree_tokens: int = 0) -> None:
        """One forward that brings the cache to `tokens`, at least the last `recompute` of them, and a draft tree."""
        cached = self.cached.get(seq, [])
        kept = 0
        for mine, theirs in zip(cached, tokens, strict=False):
            if mine != theirs:
                break
            kept += 1
        kept = min(kept, len(tokens) - recompute)
        if kept == len(tokens) and not num_tree_tokens:
            return
        own = max(min(len(seq), len(tokens)) - kept, 0)
        prompt = max(min(seq.num_prompt_tokens, len(tokens)) - kept, 0)
        decode = 1 if own > prompt and len(tokens) >= len(seq) else 0
        meter = seq.meter.of(self.name, self.num_parameters)
        meter.forwards += 1
        meter.prompt_tokens += prompt
        meter.decode_tokens += decode
        meter.catchup_tokens += own - prompt - decode
        meter.draft_tokens += len(tokens) - kept - own + num_tree_tokens
        self.cached[seq] = list(tokens)
        self.forwards += 1
        self.fed_tokens += len(tokens) - kept + num_tree_tokens


def _path_tokens(draft: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(draft.tokens[each] for each in draft.path(node))


def _seen_by_extra_rows(draft: DraftTree, extra: ExtraRows) -> list[tuple[int, ...]]:
    """What each extra row stands after, by depth: this model knows no rows that see gaps or two rows of one place."""
    tokens, depths = draft.fed_tokens, draft.fed_depths()
    paths = []
    for seen in extra.mask:
        rows = sorted(seen.nonzero().flatten().tolist(), key=depths.__getitem__)
        if [depths[row] for row in rows] != list(range(len(rows))):
            raise ValueError("an extra row must see one row of every place before it")
        paths.append(tuple(tokens[row] for row in rows))
    return paths


class ListText:
    """Token texts from a list. Implements `decoding.model.TokenText`."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def decode(self, ids: Iterable[int]) -> str:
        """See `decoding.model.TokenText.decode`."""
        return "".join(self.texts[token_id] for token_id in ids)

    def token_bytes(self, token_id: int) -> bytes:
        """See `decoding.model.TokenText.token_bytes`."""
        return self.texts[token_id].encode()


def pair(small: Model, large: Model, tokenizer: TokenText | None = None) -> ModelPool:
    """A pool of two models, with token texts "0", "1", ... unless given."""
    texts = tokenizer or ListText([str(token) for token in range(large.vocab_size)])
    return ModelPool({small.name: small, large.name: large}, {"small": small.name, "large": large.name}, texts)
