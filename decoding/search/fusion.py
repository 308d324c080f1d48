"""Beam search in which a second model, with any vocabulary, rescores every hypothesis (generative fusion decoding)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, StringConstraints

from decoding.model import Model, ModelPool, Readout
from decoding.search._beams import Beam, BeamParams
from decoding.search._second_models import ByteScores, SecondModel, TokenScores
from decoding.search._streams import Streams
from decoding.search.base import Hypothesis, Search, SearchTask, Selection, ordered
from decoding.sequence import Sequence
from decoding.text import codec_of
from decoding.translated_sequence import TranslatedSequence
from decoding.translation import Translation
from turnout.errors import invalid, out_of_range
from turnout.registry import ModelRole
from turnout.types import UNBANNED, SamplingParams, Sharing

ROOM = 256  # continuations of a hypothesis that a second model with the same vocabulary chooses among


class FusionParams(BeamParams):
    """Parameters."""

    example: ClassVar = {"second": "small"}

    second: Annotated[ModelRole, Field(description="role of the second model, with any vocabulary")] = "small"
    weight: Annotated[
        FiniteFloat, Field(ge=0.0, le=1.0, description="of the second model's log-probability; 0 is beam search")
    ] = 0.2
    prompt: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=100_000)] | None,
        Field(description="text that the second model reads before the answer; absent: the request's prompt"),
    ] = None
    temperature: Annotated[
        FiniteFloat, Field(ge=0.01, le=100.0, description="of a second model with another vocabulary")
    ] = 1.0
    ends: Annotated[
        Literal["any", "best"],
        Field(
            description="any: an answer may end as in a beam; best: where its end is the likeliest token, and there it"
            " must, as published"
        ),
    ] = "any"


class FusionSearch(Search):
    """Beams of one model that another one rescores at each step, by paper #122 (Generative Fusion Decoding).

    Hypotheses are ordered by (1 - weight) log P / len^a + weight log P2 / len2^a, each model's log-probability over its
    own number of tokens to the power of `length_penalty`. P2 is of the bytes of the text before the newest token, one
    read of the second model for each hypothesis; see `decoding.byte_scores`. It does not score the end. A second model
    with the same vocabulary reads tokens, and scores all of them: shallow fusion; the request's bias, penalties and
    structure hold for it, its processors do not. `early_stopping` compares scores as if both models had one length.
    """

    Params = FusionParams
    params: FusionParams
    papers = (122,)
    score = (
        "(1 - weight) times the log-probability plus weight times the second model's, each divided by its own length to"
        " the power of `length_penalty`, nats"
    )

    def check(self, models: ModelPool) -> None:
        """See `Part.check`: there must be a second model."""
        self._second_of(models)

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        super().begin(task, models)
        self._beam = Beam(task, task.width, self.params)
        self._second: SecondModel | None = None
        self._by_tokens, self._size = False, task.vocab_size  # ids below it may follow
        second = self._second_of(models)
        translation = models.vocabularies.translation(second, task.model)
        if second.name == task.model.name and self.params.prompt is None:
            message = f"is the model that answers, {second.name!r}: name another role, or give it a prompt of its own"
            raise invalid(f"{self.where}.second", message)
        if translation is None and self.params.temperature != 1.0:
            raise invalid(
                f"{self.where}.temperature", f"must be 1: the vocabulary of {second.name!r} is that of the answer"
            )
        if translation is not None and task.prompt.constraint is not None:
            raise invalid("structure", f"not allowed with search 'fusion' where {second.name!r} has another vocabulary")
        if self.params.weight:
            self._second = self._made(second, translation, models)
            self._by_tokens = translation is None
        if self._by_tokens:
            self._size = min(self._size, second.vocab_size)  # paddings of one vocabulary differ in length
        return None

    def _second_of(self, models: ModelPool) -> Model:
        role = self.params.second
        if role not in models.roles:
            known = ", ".join(sorted(models.roles))
            raise invalid(f"{self.where}.second", f"no model has the role {role!r}; the pool's roles: {known}")
        return models.by_role(role)

    def _made(self, second: Model, translation: Translation | None, models: ModelPool) -> SecondModel:
        """Return the second model with the prompt that it reads."""
        prompt, text, field = self.task.prompt, self.params.prompt, f"{self.where}.prompt"
        asked: dict[str, Any] = {"processors": (), "stop": ()}
        if translation is None:
            ids = codec_of(models, field).encode(text, parse_special=False) if text else prompt.tokens
        elif text:
            ids = _prompt_in(translation, text)
        else:
            ids = TranslatedSequence.prompt_of(prompt, second.name, translation)
        if not ids:
            raise invalid(field, f"has no token for {second.name!r}")
        if len(ids) >= second.max_length:
            message = f"has {len(ids)} tokens for {second.name!r}, whose context holds {second.max_length}"
            raise out_of_range(field if text else f"{self.where}.second", message)
        if translation is not None:  # what names ids or counts tokens holds for the others
            asked |= {"logit_bias": {}, "structure": None, "stop_token_ids": (), **UNBANNED}
            asked["max_tokens"] = second.max_length - len(ids)
        root = self._root(ids, prompt.sampling.model_copy(update=asked), translation is None)
        streams = Streams(second, root, prompt, f"{self.where}.second", "method.params.width")
        if translation is None:
            return TokenScores(streams)
        return ByteScores(streams, translation, self.params.temperature)

    def _root(self, ids: Items[int], sampling: SamplingParams, alike: bool) -> Sequence:
        """The second model's prompt; where its vocabulary is the same, under what the request asks of tokens."""
        prompt = self.task.prompt
        sharing = prompt.sharing if list(ids) == prompt.tokens and alike else None
        sharing = sharing or Sharing(prompt.sharing.rest, salt=prompt.sharing.salt)  # spans are counted in tokens
        ends = prompt.end_ids if alike else ()
        root = Sequence(
            ids, sampling, prompt.seed, ends, None, sharing, prompt.tenant, prompt.lossy, prompt.low_priority
        )
        root.owner = prompt.owner
        if alike and prompt.constraint is not None:
            root.constraint, root.thinking = prompt.constraint.clone(), prompt.thinking
        return root

    @property
    def fanout(self) -> int:
        """See `Search.fanout`."""
        return min(max(super().fanout, ROOM), self.task.vocab_size) if self._by_tokens else super().fanout

    def expand(self, read: list[Hypothesis], rows: Items[Readout]) -> list[Hypothesis]:
        """See `Search.expand`."""
        found = [each for each in super().expand(read, rows) if each.token < self._size]
        if self.params.ends == "any":
            return found
        ends = self.task.end_ids
        best = {each: row.top_processed[0][0] for each, row in zip(read, rows, strict=True)}
        return [each for each in found if each.parent and _may_follow(each.token, best[each.parent], ends)]

    async def rescore(self, read: list[Hypothesis], candidates: list[Hypothesis]) -> None:
        """See `Search.rescore`."""
        if self._second is not None:
            await self._second.rescore(read, candidates)

    def close(self) -> None:
        """See `Search.close`."""
        if self._second is not None:
            self._second.streams.close()

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        for each in candidates:
            each.score = self._fused(each)
        self._beam.advance(ordered(candidates))
        return Selection(self._beam.open, self._beam.done)

    def _fused(self, each: Hypothesis) -> float:
        """The fused score times the length to the power of the penalty, by which the beam divides that of an answer."""
        if self._second is None:
            return each.logp
        logprob, length = self._second.score_of(each)
        scaled: float = logprob * (each.length / length) ** self.params.length_penalty
        return each.logp + self.params.weight * (scaled - each.logp)

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`."""
        return self._beam.finished


def _prompt_in(translation: Translation, text: str) -> list[int]:
    """A text as the beginning of one, in the second model's tokens."""
    tokens = [*translation.draft.begins, *translation.draft.encode(text, first=True)]
    return [token for token in tokens if token < translation.draft_size]


def _may_follow(token: int, best: int, ends: frozenset[int]) -> bool:
    """Whether an end follows only where it is the likeliest token, and nothing else does there."""
    return token == best if best in ends else token not in ends


PART = FusionSearch
