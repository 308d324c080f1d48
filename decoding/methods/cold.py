"""COLD: text that meets constraints, by Langevin dynamics on the logits of soft tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat, model_validator

from decoding.candidates import reading
from decoding.decode_loop import stream
from decoding.model import MEASURES, Model, ModelPool, ReadSpec, Request, StopCondition
from decoding.noise import Purpose, noise_key, normal
from decoding.sequence import Sequence
from decoding.soft_likelihood import SoftLikelihood, SoftScores
from decoding.soft_matches import NGram, match, ngrams, similarity
from decoding.steps import StepEnd, StepRule, step_marks, tokens_written
from decoding.text import TextCodec, codec_of, continue_with, text_within
from decoding.token_bans import is_banned
from turnout.errors import FieldError, invalid, out_of_range
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

FIELD = "method.params"
# The standard deviation of the noise, as a factor of `noise`, until a share of the steps (the authors' code).
SCHEDULE = ((0.025, 1.0), (0.25, 0.5), (0.5, 0.1), (0.75, 0.05), (1.0, 0.01))
MOST_LOGITS = 1 << 24
MOST_READ = 1 << 24  # tokens, of all chains and steps
CPU = torch.device("cpu")
Word = Annotated[str, Field(min_length=1, max_length=64)]
Mark = Annotated[str, Field(min_length=1, max_length=64)]


class ColdParams(MethodParams):
    """Parameters of `cold`."""

    example: ClassVar = {"keywords": ["b"], "right_context": "cd", "length": 3, "steps": 3, "chains": 2}

    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    keywords: Annotated[tuple[Word, ...], Field(max_length=16, description="words that the text is to have")] = ()
    right_context: Annotated[str, Field(max_length=4096, description="text that is to follow well on it")] = ""
    reference: Annotated[str, Field(max_length=4096, description="text that it is to resemble, by n-grams")] = ""
    longest_ngram: Annotated[int, Field(ge=1, le=8, description="of these, from two tokens on where it is more")] = 3
    length: Annotated[int, Field(ge=1, le=64, description="tokens that are optimised")] = 10
    steps: Annotated[int, Field(ge=0, le=10_000, description="Langevin steps")] = 2000
    chains: Annotated[int, Field(ge=1, le=16, description="texts that are tried, the best of which is taken")] = 4
    step_size: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="factor on the gradient")] = 0.1
    noise: Annotated[
        FiniteFloat, Field(ge=0.0, le=10.0, description="standard deviation in the first steps; it falls in five parts")
    ] = 1.0
    constraint_weight: Annotated[
        FiniteFloat, Field(ge=0.0, le=1.0, description="of all constraints; the rest is that of fluency")
    ] = 0.5
    similarity_weight: Annotated[
        FiniteFloat, Field(ge=0.0, le=10.0, description="of words that the text has in common with right_context")
    ] = 0.05
    top_k: Annotated[
        int, Field(ge=1, le=1000, description="of the model's tokens at each place; keywords are added")
    ] = 5
    temperature: Annotated[
        FiniteFloat, Field(ge=1e-6, le=10.0, description="of the mixtures of embeddings that the model reads")
    ] = 0.001
    right_to_left: Annotated[
        str, Field(pattern=r"^([a-z][a-z0-9_]*)?$", max_length=64, description="role of a right-to-left model, if any")
    ] = ""
    forward_share: Annotated[
        FiniteFloat, Field(ge=0.0, le=1.0, description="of the left-to-right model in the fluency, if there are two")
    ] = 0.6
    separators: Annotated[
        tuple[Mark, ...],
        Field(max_length=16, description="strings at which the model ends the sentence; none: it does not"),
    ] = (".", "!", "?", "\n")

    @property
    def needs(self) -> frozenset[str]:
        """Roles of further models."""
        return frozenset({self.right_to_left} if self.right_to_left else ())

    @model_validator(mode="after")
    def _check_keywords(self) -> Self:
        for place, word in enumerate(self.keywords):
            if not word.strip():
                raise FieldError(f"keywords.{place}", "is blank")
        return self


@method(params=ColdParams, papers=(74,), lossless=False, needs=frozenset(), drafts=True, draws=True)
async def cold(request: Request, models: ModelPool, params: ColdParams) -> AsyncIterator[Segment]:
    """Text with given words, or before a given text, is found by noisy gradient steps on its soft tokens.

    Paper #74 (COLD Decoding). The logits Y of `length` soft tokens begin as the model's own, and move by
    Y - step_size * gradient of E + noise, where E = -(1 - w) fluency - w (keywords + prediction + similarity) and w is
    the constraint weight: see `decoding.soft_likelihood` and `decoding.soft_matches`. Then each token, from left to
    right, is the best by Y among the model's `top_k` and the keywords' tokens. Of all chains the one with most keywords
    is taken, among these the most probable. The model then ends the sentence. No law is kept.
    Gradients need the weights: models in this process or in actors, not split, not kept as integers; they are held in
    float32 once more meanwhile, and for a minute afterwards. Structures, thinking and a least length are answered by
    plain decoding.
    """
    model, seq = models.by_role(params.model), request.sequence
    if why := _unsupported(seq):
        request.notes.append(f"cold: as plain, for {why}")
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    targets = Targets.of(codec_of(models, "method"), seq, model, params)
    best, energy = await Program(models, seq, targets, params).best()
    covered = targets.covered(best)
    measured = {"cold_energy": energy, "cold_keywords": float(covered), "cold_steps": float(params.steps)}
    request.extra.setdefault(MEASURES, {}).update(measured)
    if best:
        yield Segment(seq.extend(await tokens_written(model, seq, best), models.sizes), "max_tokens")
    if seq.finished:
        return
    if params.separators:
        marks = await asyncio.to_thread(step_marks, models.tokenizer, model.vocab_size, params.separators)
        end = StepEnd(marks, params.separators)
        if not any([end.feed(token) for token in best][-1:]):
            yield await model.decode(seq, StopCondition((StepRule(end),)))
    if seq.end_ids and not seq.finished:
        yield Segment(seq.extend([Token(min(seq.end_ids), model.name)], models.sizes), "finish")


def _unsupported(seq: Sequence) -> str:
    """Why a text is not optimised; "": it is."""
    if seq.constraint is not None:
        return "a structure is written from left to right"
    if seq.thinking is not None and seq.thinking.start != "closed":
        return "the model may think before it answers"
    if seq.sampling.min_tokens:
        return "min_tokens is of an answer in one part"
    return ""


@dataclass(frozen=True)
class Targets:
    """Texts that a request names, in tokens.

    Attributes:
        codec: the pool's tokenizer.
        length: tokens that are optimised.
        keywords: the words, stripped.
        forms: of each keyword, its tokens: with a space before it, and without.
        after: the right-hand context.
        common: n-grams that the text is to have in common with it, or with the reference.
        weight: of these.
    """

    codec: TextCodec
    length: int
    keywords: tuple[str, ...]
    forms: tuple[tuple[NGram, ...], ...]
    after: tuple[int, ...]
    common: tuple[tuple[float, tuple[NGram, ...]], ...]

    @classmethod
    def of(cls, codec: TextCodec, seq: Sequence, model: Model, params: ColdParams) -> Targets:
        """Encode the texts of a request.

        Raises:
            TurnoutError: INVALID_ARGUMENT: a keyword is not in the vocabulary, or the keywords are longer than the
                text; OUT_OF_RANGE: all of it does not fit the context, there are too many logits, or all steps read
                too many tokens.
        """
        length = min(params.length, seq.num_remaining)
        words = tuple(word.strip() for word in params.keywords)
        forms = tuple(_forms(codec, word, place) for place, word in enumerate(words))
        least = sum(min(map(len, each)) for each in forms)
        if least > length:
            raise invalid(f"{FIELD}.keywords", f"take at least {least} tokens; {length} are optimised")
        after = continue_with(codec, params.right_context, parse_special=False) if params.right_context else ()
        other = continue_with(codec, params.reference, parse_special=False) if params.reference else ()
        needed = len(seq) + length + len(after)
        if needed > model.max_length:
            name = "right_context" if after else "length"
            raise out_of_range(f"{FIELD}.{name}", f"{needed} tokens with the prompt; at most {model.max_length}")
        chains = seq.sampling.n * params.chains  # answers are found at the same time
        if (numbers := chains * length * model.vocab_size) > MOST_LOGITS:
            raise out_of_range(f"{FIELD}.chains", f"{numbers} logits of {chains} chains; at most {MOST_LOGITS}")
        if (read := (params.steps + 1) * chains * needed) > MOST_READ:
            said = f"read {read} tokens, {needed} of each of {chains} chains; at most {MOST_READ}"
            raise out_of_range(f"{FIELD}.steps", said)
        sizes = range(min(2, params.longest_ngram), params.longest_ngram + 1)
        common = ((params.similarity_weight, ngrams(after, (1,))), (1.0, ngrams(other, sizes)))
        return cls(codec, length, words, forms, after, common)

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens of keywords, which are allowed at every place."""
        return tuple(sorted({token for forms in self.forms for form in forms for token in form}))

    def covered(self, tokens: tuple[int, ...]) -> int:
        """Number of keywords in a text."""
        text = text_within(self.codec, tokens)
        return sum(word in text for word in self.keywords)

    def matched(self, logits: torch.Tensor) -> torch.Tensor:
        """Score keywords and similarity in soft tokens, differentiably: [chains]."""
        logp = logits.log_softmax(-1)
        total = logp.new_zeros(len(logp))
        for forms in self.forms:
            total = total + match(logp, forms)
        for weight, grams in self.common:
            total = total + weight * similarity(logp, grams)
        return total


def _forms(codec: TextCodec, word: str, place: int) -> tuple[NGram, ...]:
    spelt = dict.fromkeys(continue_with(codec, text, parse_special=False) for text in (f" {word}", word))
    forms = tuple(each for each in spelt if each and text_within(codec, each).strip() == word)
    if not forms:
        raise invalid(f"{FIELD}.keywords.{place}", f"{word!r} is not in the vocabulary of this pool's tokenizer")
    return forms


class Program:
    """One run of the dynamics.

    Args:
        models: the pool.
        seq: the request's; nothing is appended to it.
        targets: its constraints.
        params: of the method.

    Attributes:
        back: the right-to-left model, and the sequence of what stands behind the soft tokens, in its order.
    """

    def __init__(self, models: ModelPool, seq: Sequence, targets: Targets, params: ColdParams) -> None:
        self.model = models.by_role(params.model)
        self._models = models
        self.back: tuple[Model, Sequence] | None = None
        self.seq = seq
        self.targets = targets
        self.params = params

    async def best(self) -> tuple[tuple[int, ...], float]:
        """Return the tokens of the best chain, none where there can be none, and its energy at the end."""
        if self.params.right_to_left:
            model, targets = self._models.by_role(self.params.right_to_left), self.targets
            begin = targets.after[::-1] or targets.codec.encode("") or [min(self.seq.end_ids, default=0)]
            with reading(model, self.seq, begin) as behind:
                self.back = model, behind
                return await self._best()
        return await self._best()

    async def _best(self) -> tuple[tuple[int, ...], float]:
        logits, energies = await self.dynamics(await self.initial())
        texts = [await self.discretised(each) for each in logits]
        begun = [chain for chain, text in enumerate(texts) if text]
        if not begun:  # the model may only end its answer
            return (), float(energies[0])
        texts, energies = [texts[chain] for chain in begun], energies[begun]
        scores = await self.model.score(self.seq, [(*text, *self.targets.after) for text in texts])
        ranks = [
            (self.targets.covered(text), score.total / len(score.token_logprobs))
            for text, score in zip(texts, scores, strict=True)
        ]
        chosen = max(range(len(texts)), key=lambda chain: ranks[chain])
        return texts[chosen], float(energies[chosen])

    async def initial(self) -> torch.Tensor:
        """Logits of the model's greedy continuation, the same for each chain: [chains, length, vocab]."""
        rows: list[torch.Tensor] = []
        path: tuple[int, ...] = ()
        for _ in range(self.targets.length):
            [row] = await self.model.extend(self.seq, path, ReadSpec(draw=None, logits=True))
            assert row.logits is not None
            rows.append(row.logits.to(CPU, torch.float32, copy=True))
            path += (int(rows[-1].argmax()),)
        return await asyncio.to_thread(lambda: torch.stack(rows).expand(self.params.chains, -1, -1).clone())

    async def dynamics(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take all steps; returns the logits, and their energies [chains]."""
        for step in range(self.params.steps):
            _, gradient = await self.energy(logits)
            logits = await asyncio.to_thread(self._moved, logits, gradient, step)
        energies, _ = await self.energy(logits)
        return logits, energies

    async def energy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the energies [chains] of soft tokens, and their gradient, of the shape of the logits."""
        weight, after = self.params.constraint_weight, self.targets.after
        forward = (self.params.forward_share if self.back else 1.0) * (1.0 - weight)
        predicted = weight if after else 0.0
        behind: SoftScores | None = None
        ahead = await self._read(self.model, self.seq, logits, after, forward, predicted)
        if self.back is not None:
            model, seq = self.back
            turned = await asyncio.to_thread(logits.flip, 1)
            behind = await self._read(model, seq, turned, (), 1.0 - weight - forward, 0.0)

        def summed() -> tuple[torch.Tensor, torch.Tensor]:
            matched, gradient = self._matched(logits)
            total = forward * ahead.fluency + predicted * ahead.prediction + weight * matched
            gradient.mul_(weight).add_(ahead.gradient)
            if behind is not None:
                total += (1.0 - weight - forward) * behind.fluency
                gradient += behind.gradient.flip(1)
            return -total, gradient.neg_()

        return await asyncio.to_thread(summed)

    async def _read(
        self, model: Model, seq: Sequence, logits: torch.Tensor, after: NGram, fluency: float, prediction: float
    ) -> SoftScores:
        params, kept = self.params, self.targets.kept
        op = SoftLikelihood(logits, after, fluency, prediction, params.temperature, params.top_k, kept)
        return await model.do(seq, op)

    def _matched(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.detach().clone().requires_grad_()
        scores = self.targets.matched(leaf)
        if not scores.requires_grad:
            return scores, torch.zeros_like(logits)
        [gradient] = torch.autograd.grad(scores.sum(), leaf)
        return scores.detach(), gradient

    def _moved(self, logits: torch.Tensor, gradient: torch.Tensor, step: int) -> torch.Tensor:
        moved = logits - self.params.step_size * gradient
        deviation = self.params.noise * noise_factor(step, self.params.steps)
        if deviation == 0.0 or step == self.params.steps - 1:
            return moved
        rows = range(logits.shape[0] * logits.shape[1])
        keys = [noise_key(self.seq.seed, step, Purpose.LANGEVIN, row) for row in rows]
        return moved + deviation * normal(keys, logits.shape[2], CPU).view_as(logits)

    async def discretised(self, logits: torch.Tensor) -> tuple[int, ...]:
        """Choose tokens from left to right: the best by logits [length, vocab] among the model's and the keywords'."""
        seq, path = self.seq, tuple[int, ...]()
        want = ReadSpec(draw=None, top_processed=self.params.top_k + len(seq.end_ids))
        for row in logits:
            [read] = await self.model.extend(seq, path, want)
            allowed = [token for token, logp in read.top_processed if logp > -math.inf and token not in seq.end_ids]
            kept = [token for token in self.targets.kept if not is_banned(seq, path, token)]
            candidates = list(dict.fromkeys([*allowed[: self.params.top_k], *kept]))
            if not candidates:
                break
            path += (candidates[int(row[candidates].argmax())],)
        return path


def noise_factor(step: int, steps: int) -> float:
    """Factor of the noise at a step, counted from 0; see `SCHEDULE`."""
    return next(factor for until, factor in SCHEDULE if step < until * steps)
