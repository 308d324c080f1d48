"""A model whose rows are combined from several streams, read in lockstep: what methods see under a contrast."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from decoding.contrast.base import MAIN, RequestContrast, Stream, StreamRows
from decoding.decode_loop import run_decode_loop
from decoding.drafters.base import Candidates
from decoding.model import Busy, Model, ModelPool, Readout, ReadSpec, Request, WrappedModel
from decoding.operations import Decode, Extend, Handlers, Operation, Verify
from decoding.read_spec import Decoded
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, want_of
from turnout.cost import Meter
from turnout.types import SamplingParams

R = TypeVar("R")
T = TypeVar("T")
Path = tuple[int, ...]
Read = Callable[[Model, Sequence, ReadSpec], Coroutine[Any, Any, list[Readout]]]

LOGITS = ReadSpec(draw=None, logits=True)


async def load_contrast(request: Request, models: ModelPool, params: Any) -> None:
    """Load what the request's contrast works with, before `contrasted`, without holding up other requests.

    Args:
        request: with its contrast, or none.
        models: the pool.
        params: of the method.

    Raises:
        TurnoutError: INVALID_ARGUMENT or NOT_FOUND: the contrast cannot work with these models.
    """
    if request.contrast is not None and not request.contrast.part.is_off:
        await request.contrast.part.load(_own(models, request.tenant), _answering(models, params))


def _own(models: ModelPool, tenant: str) -> ModelPool:
    return replace(models, artifacts=models.artifacts.of_tenant(tenant))


def _answering(models: ModelPool, params: Any) -> Model:
    return models.by_role(getattr(params, "model", "large"))


@contextmanager
def contrasted(request: Request, models: ModelPool, params: Any) -> Iterator[ModelPool]:
    """Yield the models as the request's method sees them; where it has a contrast, free its streams then.

    The model that answers is the one in the method's parameter `model`, else the large one.

    Args:
        request: gets in `stream_meter` what the streams took.
        models: the pool.
        params: of the method.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the contrast cannot work with these models.
    """
    asked = request.contrast
    if asked is None or asked.part.is_off:
        yield models
        return
    model = _answering(models, params)
    made = ContrastedModel(model, _own(models, request.tenant), asked, request.sequence)
    request.notes.append(f"contrast {asked.part.name}: logits combined from {made.num_streams} streams")
    try:
        yield replace(models, models={**models.models, model.name: made})
    finally:
        request.stream_meter.merge(made.close())


@dataclass(slots=True)
class _Reader:
    """Reader of one prompt with one model: of some streams, by their layers.

    Attributes:
        model: reads.
        prompt: name of the prompt.
        streams: places among all streams, and layers; None: the logits of all layers together.
    """

    model: Model
    prompt: str
    streams: list[tuple[int, int | None]] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        """Layers whose outputs are read."""
        return [layer for _, layer in self.streams if layer is not None]


class ContrastedModel(WrappedModel):
    """Model that reads combined rows.

    What drafts, reads given states or scores is the model itself; what writes or verifies tokens reads all streams. The
    other streams are sequences of their own, released with the one they belong to.

    Args:
        inner: the model that answers.
        models: the pool.
        contrast: of the request.
        main: the request's sequence.

    Attributes:
        max_length: most tokens of the main stream with which all streams fit their models.
        runs_here: its decode loop runs in this process, wherever the models are.
        num_streams: streams that its rows are combined from, the main one included.
    """

    runs_here = True

    def __init__(self, inner: Model, models: ModelPool, contrast: RequestContrast, main: Sequence) -> None:
        super().__init__(inner)
        self._part, self._prompts = contrast.part, contrast.prompts
        self._text, self._meter = models.tokenizer, Meter()
        streams = (Stream(), *self._part.streams(models, inner))
        self.num_streams = len(streams)
        readers: dict[tuple[str, str], _Reader] = {}
        for place, stream in enumerate(streams):
            model = inner if stream.role == MAIN else models.by_role(stream.role)
            reader = readers.setdefault((model.name, stream.prompt), _Reader(model, stream.prompt))
            reader.streams.append((place, stream.layer))
        self._readers = list(readers.values())
        # Which of its prompts a stream reads may not be decided yet.
        longest = max((len(prompt.tokens) for prompt in self._prompts.values()), default=0) - main.num_prompt_tokens
        others = {MAIN: 0}
        self.max_length = min(each.model.max_length - others.get(each.prompt, longest) for each in self._readers)
        self._hidden = self._part.reads().hidden
        self._followers: dict[Sequence, list[Sequence]] = {}
        self._deciding, self._decided = asyncio.Lock(), dict[str, str]()
        self._has_decided = False

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        return await (HANDLERS.do(self, seq, op) if HANDLERS.has(op) else self.inner.do(seq, op))

    def reading_seconds(self) -> float:
        """See `decoding.speculation.RunsHere.reading_seconds`."""
        own = getattr(self.inner, "reading_seconds", None)
        return own() if own is not None else 0.0

    def busy(self) -> Busy:
        """See `decoding.model.Model.busy`; every stream takes its share of the capacity."""
        readers = Counter(reader.model.name for reader in self._readers)
        fitting = [reader.model.busy().capacity // readers[reader.model.name] for reader in self._readers]
        return replace(self.inner.busy(), capacity=min(filter(None, fitting), default=0))

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `decoding.model.Model.fork`; its streams are forked with it."""
        twin = self.inner.fork(seq, seed)
        if seq in self._followers:
            pairs = zip(self._readers[1:], self._followers[seq], strict=True)
            self._followers[twin] = [reader.model.fork(follower) for reader, follower in pairs]
        return twin

    def release(self, seq: Sequence) -> None:
        """See `decoding.model.Model.release`."""
        self._release_streams(seq)
        self.inner.release(seq)

    def close(self) -> Meter:
        """Release all streams but the main ones; return the work that was done for them."""
        for seq in list(self._followers):
            self._release_streams(seq)
        return self._meter

    def _release_streams(self, seq: Sequence) -> None:
        for reader, follower in zip(self._readers[1:], self._followers.pop(seq, ()), strict=False):
            self._release(reader.model, follower)

    def _release(self, model: Model, follower: Sequence) -> None:
        model.release(follower)
        for meter in follower.meter.models.values():
            meter.generated_tokens = 0  # they are the main stream's, and counted there, or no part of the answer
        self._meter.merge(follower.meter)

    async def _decide(self, seq: Sequence) -> None:
        """Let the contrast choose among prompts, once."""
        async with self._deciding:
            if not self._has_decided:
                self._decided = dict(await self._part.decide(partial(self._ask, seq)))
                self._has_decided = True

    async def _ask(self, seq: Sequence, name: str, most: int) -> str:
        """Continue one of the prompts by at most `most` tokens, greedily, and return their text."""
        room = self.inner.max_length - len(self._prompts[name].tokens)
        asked = self._follower(seq, name, SamplingParams(max_tokens=min(most, room), temperature=0.0), seq.end_ids)
        try:
            segment = await self.inner.decode(asked)
        finally:
            self._release(self.inner, asked)
        return self._text.decode([token.id for token in segment.tokens])

    def _sequences(self, seq: Sequence) -> list[Sequence]:
        """Return what each reader reads: the sequence, and those that follow it, with all of its tokens."""
        if seq not in self._followers:
            names = [self._decided.get(reader.prompt, reader.prompt) for reader in self._readers[1:]]
            self._followers[seq] = [self._follower(seq, name) for name in names]
        followers = self._followers[seq]
        for reader, follower in zip(self._readers[1:], followers, strict=True):
            if missing := seq.tokens[seq.num_prompt_tokens + len(follower.generated) :]:
                follower.append_plain(missing, reader.model.name, reader.model.num_parameters)
        return [seq, *followers]

    def _follower(
        self, seq: Sequence, name: str, sampling: SamplingParams | None = None, ends: Iterable[int] = ()
    ) -> Sequence:
        prompt, sharing = seq.tokens[: seq.num_prompt_tokens], seq.sharing
        if name != MAIN:
            prompt, sharing = list(self._prompts[name].tokens), self._prompts[name].sharing
        sampling = sampling or SamplingParams(max_tokens=seq.sampling.max_tokens)
        context = (sharing, seq.tenant, seq.lossy, seq.low_priority)
        follower = Sequence(prompt, sampling, seq.seed, ends, None, *context)
        follower.owner = seq.owner
        return follower

    async def rows(self, seq: Sequence, paths: list[Path], read: Read, want: ReadSpec) -> list[Readout]:
        """Read combined rows, and choose tokens from them.

        Args:
            seq: whose next tokens they are.
            paths: hypothetical tokens that each row stands after.
            read: reads one stream: at least a row for each path, in their order; main rows beyond are returned as
                they are.
            want: what to read; hidden states are the main stream's.
        """
        await self._decide(seq)
        hidden = replace(LOGITS, hidden=want.hidden | self._hidden, before=want.before, mean=want.mean)
        sequences = self._sequences(seq)
        read_by = zip(self._readers, sequences, strict=True)
        found = await _together(
            *(self._read(reader, each, paths, read, hidden if each is seq else LOGITS) for reader, each in read_by)
        )
        main = found[0][0]
        device = main[0].logits.device if main[0].logits is not None else "cpu"
        streams: list[torch.Tensor] = [torch.empty(0)] * self.num_streams
        for reader, (_, logits) in zip(self._readers, found, strict=True):
            for (place, _), values in zip(reader.streams, logits, strict=True):
                streams[place] = _as_wide(values.float().to(device), self.inner.vocab_size)
        read_rows = main[: len(paths)]
        known = self._hidden & read_rows[0].hidden.keys()
        states = {layer: torch.stack([row.hidden[layer] for row in read_rows]).float() for layer in known}
        rows = StreamRows([RowContext(seq, path) for path in paths], states)
        combined = await self._part.combined(torch.stack(streams, 1), rows)
        asked = replace(want, hidden=frozenset(), before=frozenset(), mean=False)
        made = await self.inner.choose(seq, combined, paths, asked)
        for row, of_model in zip(made, main, strict=False):
            row.hidden = {layer: of_model.hidden[layer] for layer in want.hidden}
            row.before, row.mean = of_model.before, of_model.mean
        return made + main[len(paths) :]

    async def _read(
        self, reader: _Reader, seq: Sequence, paths: list[Path], read: Read, want: ReadSpec
    ) -> tuple[list[Readout], list[torch.Tensor]]:
        """Return a reader's rows, and for each of its streams the logits of the paths, [rows, vocab]."""
        layers = reader.layers
        rows = await read(reader.model, seq, replace(want, hidden=want.hidden | frozenset(layers)))
        read_rows = rows[: len(paths)]
        early: dict[int, torch.Tensor] = {}
        if layers:
            states = torch.cat([torch.stack([row.hidden[layer] for row in read_rows]) for layer in layers])
            exits = await reader.model.read(seq, states, paths * len(layers), LOGITS, normed=True)
            for place, layer in enumerate(layers):
                early[layer] = _logits(exits[place * len(paths) : (place + 1) * len(paths)])
        whole = _logits(read_rows)
        return rows, [whole if layer is None else early[layer] for _, layer in reader.streams]


def _logits(rows: list[Readout]) -> torch.Tensor:
    return torch.stack([row.logits for row in rows if row.logits is not None])


def _as_wide(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """Logits [rows, any] of another model as [rows, vocab]: paddings of one vocabulary differ in length."""
    lacking = vocab - logits.shape[1]
    if lacking <= 0:
        return logits[:, :vocab]
    return torch.cat([logits, logits.amin(-1, keepdim=True).expand(-1, lacking)], 1)


async def _together(*jobs: Awaitable[T]) -> list[T]:
    """Run jobs at the same time; where one fails, or the caller gives up, all have ended when that is raised."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _NoVerdict(Verifier):
    """Verifier that keeps nothing: how a stream reads a draft tree before all of them judge it together."""

    lossless = True
    accepts = tuple(Candidates)
    want = LOGITS

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`."""
        return VerifyResult((), ())


@dataclass(frozen=True, slots=True)
class ReadTree(Operation[list[Readout]]):
    """Read a draft tree: at the root, after every node, after every extra row. Nothing of it is kept."""

    name: ClassVar[str] = "read_tree"
    draft: DraftTree
    want: ReadSpec

    async def run(self, model: Any, seq: Sequence) -> list[Readout]:
        """Verify it next to the model, so that all of what is read travels."""
        rows: list[Readout] = (await model.verify(seq, self.draft, _NoVerdict(), self.want)).rows
        return rows


HANDLERS: Handlers[ContrastedModel] = Handlers()


@HANDLERS.of(Extend)
async def _extend(model: ContrastedModel, seq: Sequence, op: Extend) -> list[Readout]:
    first = 0 if op.every else len(op.tokens)
    paths = [op.tokens[:end] for end in range(first, len(op.tokens) + 1)]
    return await model.rows(seq, paths, lambda by, each, want: by.extend(each, op.tokens, want, op.every), op.want)


@HANDLERS.of(Decode)
async def _decode(model: ContrastedModel, seq: Sequence, op: Decode) -> Decoded:
    async def step(want: ReadSpec) -> Readout:
        return (await model.extend(seq, want=want))[0]

    until = op.until.twins()
    name, num_parameters = model.inner.name, model.inner.num_parameters
    return Decoded(await run_decode_loop(step, seq, until, name, num_parameters), until.rules)


@HANDLERS.of(Verify)
async def _verify(model: ContrastedModel, seq: Sequence, op: Verify) -> VerifyResult:
    """Judge a draft by combined rows. Of a draft in a row, all streams keep the cache of what is accepted."""
    draft, want = op.draft, want_of(op.verifier, seq) | op.want
    if draft.extra is None and draft.parents == tuple(range(-1, len(draft) - 1)):
        rows = await model.extend(seq, draft.tokens, want, every=True)
    else:
        paths = [(), *(tuple(draft.tokens[each] for each in draft.path(node)) for node in range(len(draft)))]

        async def read(by: Model, each: Sequence, read_spec: ReadSpec) -> list[Readout]:
            return await by.do(each, ReadTree(draft, read_spec | op.want if each is seq else read_spec))

        rows = await model.rows(seq, paths, read, want)
    return op.verifier.verdict(seq, draft, rows, model.inner.name)
