"""Outcomes: which of a pool's models answers which prompt rightly. What routers and strategies are trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from turnout.atomic_files import write_whole
from turnout.calls import ChatMessage
from turnout.errors import TurnoutError, invalid
from turnout.registry import explain

if TYPE_CHECKING:
    from pool.text import TextTokenizer

Role = Literal["small", "large"]
ROLES: tuple[Role, Role] = ("small", "large")


class Sample(BaseModel):
    """One answer of a model, and what it was worth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: Annotated[FiniteFloat, Field(description="1 right, 0 wrong, or any number")]
    tokens: Annotated[int | None, Field(ge=1, description="tokens of the answer")] = None
    entropy_bits: Annotated[FiniteFloat | None, Field(ge=0, description="their mean entropy, bits")] = None
    logprob: Annotated[FiniteFloat | None, Field(le=0, description="their mean log-probability, nats")] = None
    answer: Annotated[str | None, Field(description="what it comes down to, as the method best_of counts votes")] = None


class Turn(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Asked(BaseModel):
    """What the models were asked, in one of three ways."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Annotated[str | None, Field(min_length=1, description="a question, as a user's message")] = None
    messages: Annotated[tuple[Turn, ...] | None, Field(min_length=1, description="a conversation")] = None
    text: Annotated[str | None, Field(min_length=1, description="a text to be continued")] = None

    @model_validator(mode="after")
    def _check_asked(self) -> Self:
        given = [name for name in ("prompt", "messages", "text") if getattr(self, name) is not None]
        if not given:
            raise invalid("prompt", "is missing; give prompt, messages or text")
        if len(given) > 1:
            raise invalid(given[1], f"excludes {given[0]}; give one of them")
        return self

    @property
    def key(self) -> str:
        """What tells it from others. A prompt is a conversation of one message, whichever way it is written."""
        if self.prompt is not None:
            return self.prompt
        if self.messages is not None and [turn.role for turn in self.messages] == ["user"]:
            return self.messages[0].content
        return json.dumps(self.model_dump(mode="json", include={"messages", "text"}, exclude_none=True))

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """The conversation; of a text, none."""
        if self.text is not None:
            return ()
        turns = self.messages or (Turn(role="user", content=self.prompt or ""),)
        return tuple(ChatMessage(each.role, each.content) for each in turns)

    @property
    def question(self) -> str:
        """What is asked as routing sees it: the text, or the last message of the user."""
        if self.text is not None:
            return self.text
        return next((turn.content for turn in reversed(self.turns) if turn.role == "user"), "")

    def encode(self, tokenizer: TextTokenizer) -> list[int]:
        """Token ids, ready to be answered."""
        if self.text is not None:
            return tokenizer.encode(self.text)
        return tokenizer.encode_chat(list(self.turns))


class Outcome(Asked):
    """One line of an outcomes file: what was asked, and for each model either `correct_ROLE` or `samples_ROLE`."""

    correct_small: bool | None = None
    correct_large: bool | None = None
    samples_small: Annotated[tuple[Sample, ...] | None, Field(min_length=1)] = None
    samples_large: Annotated[tuple[Sample, ...] | None, Field(min_length=1)] = None
    kind: Annotated[str, Field(description="what kind of question it is, for the report")] = ""

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for role in ROLES:
            correct, samples = getattr(self, f"correct_{role}"), getattr(self, f"samples_{role}")
            if correct is None and samples is None:
                raise invalid(f"correct_{role}", f"is missing; give correct_{role} or samples_{role}")
            if correct is not None and samples is not None:
                raise invalid(f"correct_{role}", f"excludes samples_{role}; give one of them")
        return self

    @property
    def found(self) -> tuple[Any, ...]:
        """What was found, however the question is written and whatever kind it is said to be of."""
        return tuple(getattr(self, f"{what}_{role}") for role in ROLES for what in ("correct", "samples"))

    def samples(self, role: Role) -> tuple[Sample, ...]:
        """A model's answers, one at least."""
        found: tuple[Sample, ...] | None = getattr(self, f"samples_{role}")
        return found or (Sample(reward=float(getattr(self, f"correct_{role}"))),)

    def reward(self, role: Role) -> float:
        """Mean reward of a model's answers; with rewards 0 and 1, the share of right ones."""
        samples = self.samples(role)
        return sum(sample.reward for sample in samples) / len(samples)

    def mean(self, role: Role, what: Literal["tokens", "entropy_bits", "logprob"]) -> float | None:
        """Mean over a model's answers of what the file says of each; None where one does not say."""
        values = [getattr(sample, what) for sample in self.samples(role)]
        return None if None in values else sum(values) / len(values)


class About(BaseModel):
    """A line of an outcomes file that is no outcome: whose answers the others are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[dict[Role, str], Field(description="digest of each model, by role")]


@dataclass(frozen=True)
class Outcomes:
    """A checked file.

    Attributes:
        rows: one for everything asked, in the file's order.
        digest: of their content, whatever the order of keys: 32 hexadecimal digits.
        models: digest of each model whose answers these are, by role; empty where the file does not say.
    """

    rows: tuple[Outcome, ...]
    digest: str
    models: dict[Role, str] = field(default_factory=dict)

    def check_models(self, digests: dict[Role, str]) -> None:
        """Refuse to be used for models that gave none of these answers.

        Args:
            digests: of these models, by role.

        Raises:
            TurnoutError: INVALID_ARGUMENT: they are another model's in one of the roles.
        """
        for role, digest in self.models.items():
            if digests[role] != digest:
                raise invalid(
                    "outcomes",
                    f"are answers of the {role} model with digest {digest}; the pool's has {digests[role]}: let its"
                    " models answer (`turnout train outcomes`)",
                )

    @classmethod
    def of(cls, rows: Iterable[Outcome], models: dict[Role, str] | None = None) -> Self:
        """Rows that are known to be sound."""
        kept = tuple(rows)
        digest = hashlib.blake2b(digest_size=16)
        for row in kept:
            digest.update(json.dumps(row.model_dump(mode="json", exclude_none=True), sort_keys=True).encode())
        return cls(kept, digest.hexdigest(), models or {})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read an outcomes file: a JSON object a line. A prompt that stands there twice alike counts once.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it cannot be read, is empty, or a line is at fault, which is named.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise invalid("outcomes", f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise invalid("outcomes", f"{path} is not UTF-8 text") from None
        seen: dict[str, tuple[int, Outcome]] = {}
        models: dict[Role, str] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            row = _parse(line, number)
            if isinstance(row, About):
                if {**models, **row.models} != {**row.models, **models}:
                    raise invalid("outcomes", f"line {number} names other models than a line before it")
                models |= row.models
                continue
            before = seen.setdefault(row.key, (number, row))
            if before[1].found != row.found:
                raise invalid(
                    "outcomes", f"line {number} contradicts line {before[0]}: the same prompt with another outcome"
                )
        if not seen:
            raise invalid("outcomes", f"{path} is empty; at least one line is needed")
        return cls.of((row for _, row in seen.values()), models)

    def write(self, path: Path) -> None:
        """Write such a file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row.model_dump_json(exclude_none=True) for row in self.rows]
        if self.models:
            lines.insert(0, About(models=self.models).model_dump_json())
        write_whole(path, ("\n".join(lines) + "\n").encode())


def _parse(line: str, number: int) -> Outcome | About:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise invalid("outcomes", f"line {number} is no JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(values, dict):
        raise invalid("outcomes", f"line {number} must be an object with prompt and outcomes")
    form = About if set(values) == {"models"} else Outcome
    try:
        return form.model_validate(values)
    except ValidationError as error:
        raise invalid("outcomes", f"line {number}: {explain(error, '', form).message}") from None
    except TurnoutError as error:
        raise invalid("outcomes", f"line {number}: {error.message}") from None
