"""What the text of an answer must look like: what a caller asks for, checked for size before anything is compiled."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# `tools` is a server's own: calls of the functions that a request offers, see `turnout.tool_formats.grammar`.
Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "tools"]
KINDS: tuple[Kind, ...] = ("json_schema", "json_object", "regex", "grammar", "choice")

# One form for every value, as `json.dumps` writes it: free blanks would let a model write blanks for ever.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_CHARS = 65_536
MAX_TOOLS_CHARS = 4 * MAX_CHARS
MAX_DEPTH = 32
MAX_NODES = 8192
MAX_CHOICES = 1024


class Structure(BaseModel):
    """A constraint on an answer's text. Short forms are taken too: `{"regex": "[0-9]+"}`, `{"choice": ["yes", "no"]}`.

    Attributes:
        kind: what `value` is.
        value: a JSON schema as JSON, a regular expression, a grammar in Lark's notation, or a JSON list of texts;
            empty for `json_object`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[Kind, Field(description="json_schema, json_object, regex, grammar or choice")]
    value: Annotated[str, Field(description="the schema as JSON, the expression, the grammar, the texts as JSON")] = ""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "kind" in given:
            return given
        if len(given) != 1 or next(iter(given)) not in KINDS:
            raise _fault(f"must hold exactly one of {', '.join(KINDS)}")
        [(kind, value)] = given.items()
        if kind == "json_object":
            if value is not True:
                raise _fault("json_object must be true; leave the structure out where none is wanted")
            return {"kind": kind}
        if kind in ("json_schema", "choice") and not isinstance(value, str):
            if kind == "json_schema":
                _check_schema(value)
            value = json.dumps(value, ensure_ascii=False)
        return {"kind": kind, "value": value}

    @model_validator(mode="after")
    def _check(self) -> Structure:
        most = MAX_TOOLS_CHARS if self.kind == "tools" else MAX_CHARS
        if len(self.value) > most:
            raise _fault(f"{self.kind} is too large: {len(self.value)} characters, at most {most}")
        if self.kind == "json_object":
            if self.value:
                raise _fault("json_object takes no value")
        elif not self.value:
            raise _fault(f"{self.kind} must not be empty")
        if self.kind == "json_schema":
            _check_schema(_parsed(self.value, self.kind))
        elif self.kind == "choice":
            _check_texts(_parsed(self.value, self.kind))
        return self

    @property
    def short(self) -> dict[str, Any]:
        """The short form, as bodies and clients write it."""
        if self.kind == "json_object":
            return {"json_object": True}
        return {self.kind: json.loads(self.value) if self.kind in ("json_schema", "choice") else self.value}

    @property
    def schema_value(self) -> Any:
        """The JSON schema: an object, or true or false."""
        return json.loads(self.value)

    @property
    def choices(self) -> list[str]:
        """The texts of a `choice`."""
        texts: list[str] = json.loads(self.value)
        return texts


def _fault(message: str) -> PydanticCustomError:
    # The message goes into a template as a value, so that braces in it stay what they are.
    return PydanticCustomError("structure", "{message}", {"message": message})


def _parsed(text: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _fault(f"{kind} is nested too deeply: at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _fault(f"{kind} is no JSON: {error}") from None


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise _fault("json_schema must be an object, true or false")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise _fault("json_schema must not hold x-guidance: how JSON is written is not chosen")
    nodes, level = 0, [schema]
    for depth in range(MAX_DEPTH + 1):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise _fault(f"json_schema is too large: more than {MAX_NODES} values")
        level = [below for each in level for below in _below(each)]
        if not level:
            return
        if depth == MAX_DEPTH:
            raise _fault(f"json_schema is nested too deeply: at most {MAX_DEPTH} levels")


def _below(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_texts(texts: Any) -> None:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise _fault("choice must be a list of texts that are not empty")
    if len(texts) > MAX_CHOICES:
        raise _fault(f"choice has {len(texts)} texts; at most {MAX_CHOICES}")
