"""Models made of a function, for trying methods without an engine: same protocol, same numbers, no weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from decoding.decode_loop import run_decode_loop
from decoding.drafter_state import Stores
from decoding.drafters.base import Drafter
from decoding.fixed_forward import FixedForward, FixedRows
from decoding.model import Busy, Model, ModelPool, Readout, ReadSpec, TokenText
from decoding.operations import Choose, Decode, Expand, Extend, Handlers, Operation, PrefillAhead, Verify
from decoding.read_spec import Decoded
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import DraftTree, ExtraRows
from decoding.verifiers.base import VerifyResult, want_of

R = TypeVar("R")

NextLogits = Callable[[list[int]], torch.Tensor]


def markov(probs: torch.Tensor) -> NextLogits:
    """Next-token logits of a first-order Markov chain; probs: [vocab, vocab], row = last token."""
    logits = probs.to(torch.float32).log()
    return lambda tokens: logits[tokens[-1]]


class TableModel(Model):
    """A model over a function from tokens to logits.

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
        lanes: tokens of the lanes of forwards of a fixed shape, by the sequence that owns them.
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
        self.lanes: dict[Sequence, list[list[int]]] = {}
        self.num_layers = 0
        self.by_length = False
        self.stores = Stores()
        self.forwards = 0
        self.fed_tokens = 0

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`; a function has no layers and no hidden states."""
        return await HANDLERS.do(self, seq, op)

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """A function has no embeddings."""
        raise NotImplementedError

    def observe(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: VerifyResult) -> None:
        """See `decoding.model.Model.observe`."""
        drafter.observe(self, seq, draft, verdict)

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `decoding.model.Model.fork`."""
        twin = seq.fork(seed)
        self.cached[twin] = list(self.cached.get(seq, ()))
        return twin

    def release(self, seq: Sequence) -> None:
        """See `decoding.model.Model.release`."""
        self.cached.pop(seq, None)
        self.lanes.pop(seq, None)
        if (companion := seq.companions.pop(self.name, None)) is not None:
            self.release(companion)

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

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        logits = torch.stack([self.next_logits(seq.tokens + list(path)) for path in paths])
        return read(logits, [RowContext(seq, path) for path in paths], [want] * len(paths))

    def _feed(self, seq: Sequence, tokens: list[int], recompute: int, num_tree_tokens: int = 0) -> None:
        """Run a forward that brings the cache to `tokens`, at least the last `recompute` of them, and a draft tree."""
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


HANDLERS: Handlers[TableModel] = Handlers()


@HANDLERS.of(Extend)
async def _extend(model: TableModel, seq: Sequence, op: Extend) -> list[Readout]:
    await asyncio.sleep(0)
    tokens = op.tokens
    model._feed(seq, seq.tokens + list(tokens), recompute=1 + (len(tokens) if op.every else 0))
    return model._read(seq, [tokens[:end] for end in range(0 if op.every else len(tokens), len(tokens) + 1)], op.want)


@HANDLERS.of(Decode)
async def _decode(model: TableModel, seq: Sequence, op: Decode) -> Decoded:
    async def step(want: ReadSpec) -> Readout:
        return (await model.extend(seq, want=want))[0]

    until = op.until.twins()
    return Decoded(await run_decode_loop(step, seq, until, model.name, model.num_parameters), until.rules)


@HANDLERS.of(Expand)
async def _expand(model: TableModel, seq: Sequence, op: Expand) -> list[Readout]:
    await asyncio.sleep(0)
    nodes = range(op.start, len(op.tree))
    model._feed(seq, seq.tokens, recompute=0, num_tree_tokens=len(nodes))
    return model._read(seq, [_path_tokens(op.tree, node) for node in nodes], op.want)


@HANDLERS.of(Verify)
async def _verify(model: TableModel, seq: Sequence, op: Verify) -> VerifyResult:
    await asyncio.sleep(0)
    draft = op.draft
    model._feed(seq, seq.tokens, recompute=1, num_tree_tokens=len(draft.fed_tokens))
    paths = [(), *(_path_tokens(draft, node) for node in range(len(draft)))]
    rows = model._read(seq, paths, want_of(op.verifier, seq) | op.want)
    if draft.extra is not None:
        rows += model._read(seq, _seen_by_extra_rows(draft, draft.extra), op.want)
    verdict = op.verifier.verdict(seq, draft, rows, model.name)
    model.cached[seq] = seq.tokens + [draft.tokens[node] for node in verdict.path]
    return verdict


@HANDLERS.of(Choose)
async def _choose(model: TableModel, seq: Sequence, op: Choose) -> list[Readout]:
    await asyncio.sleep(0)
    return read(op.logits.float(), op.histories(seq, model.vocab_size), [op.want] * len(op.paths))


@HANDLERS.of(PrefillAhead)
async def _prefill_ahead(model: TableModel, seq: Sequence, op: PrefillAhead) -> None:
    await asyncio.sleep(0)
    model._feed(seq, seq.tokens[:-1], recompute=0)


@HANDLERS.of(FixedForward)
async def _fixed_forward(model: TableModel, seq: Sequence, op: FixedForward) -> FixedRows:
    await asyncio.sleep(0)
    if op.place == 0:
        model.lanes[seq] = [[] for _ in op.tokens]
    for lane, token in zip(model.lanes[seq], op.tokens, strict=True):
        lane[op.place :] = [token]
    meter = seq.meter.of(model.name, model.num_parameters)
    meter.forwards += 1
    meter.decode_tokens += len(op.tokens)
    return FixedRows(torch.stack([model.next_logits(lane) for lane in model.lanes[seq]]).float(), "table")


def _path_tokens(draft: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(draft.tokens[each] for each in draft.path(node))


def _seen_by_extra_rows(draft: DraftTree, extra: ExtraRows) -> list[tuple[int, ...]]:
    """Return the tokens before each extra row, by depth; rows that see gaps, or two of one place, are unsupported."""
    tokens, depths = draft.fed_tokens, [*draft.depths(), *extra.depths]
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
