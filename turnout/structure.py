"""What the text of an answer must look like: a kind by its name, with its value. The kinds are in `decoding`."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# One form for every value, as `json.dumps` writes it: free blanks would let a model write blanks for ever.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_CHARS = 65_536
MAX_TOOLS_CHARS = 4 * MAX_CHARS
MAX_DEPTH = 32
MAX_NODES = 8192
MAX_CHOICES = 1024


class Structure(BaseModel):
    """A constraint on an answer's text. Short forms are taken too: `{"regex": "[0-9]+"}`, `{"choice": ["yes", "no"]}`.

    Its kind and value are checked where the kinds are: see `decoding.structures`.

    Attributes:
        kind: name of a module of `decoding.constraints`.
        value: as the kind reads it: a text, or JSON; empty, or `true`, for a kind without a value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64, description="json_schema, regex, ...")]
    value: Annotated[str, Field(description="a text, or JSON: the schema, the expression, the texts, ...")] = ""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "kind" in given:
            return given
        if len(given) != 1:
            raise _fault("must hold exactly one kind")
        [(kind, value)] = given.items()
        return {"kind": kind, "value": value if isinstance(value, str) else _written(value, kind)}

    @model_validator(mode="after")
    def _check(self) -> Structure:
        if len(self.value) > MAX_TOOLS_CHARS:
            raise _fault(f"{self.kind} is too large: {len(self.value)} characters, at most {MAX_TOOLS_CHARS}")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts of a value that is a JSON list of texts; empty where it is none."""
        try:
            found = json.loads(self.value)
        except (ValueError, RecursionError):
            return []
        return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else []


def _written(value: Any, kind: str) -> str:
    if not isinstance(value, dict | list | tuple | bool):
        raise _fault(f"{kind} must be a text, an object, a list, true or false")
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise _fault(f"{kind} is nested too deeply: at most {MAX_DEPTH} levels") from None
    except (TypeError, ValueError):
        raise _fault(f"{kind} is no JSON") from None


def _fault(message: str) -> PydanticCustomError:
    # The message goes into a template as a value, so that braces in it stay what they are.
    return PydanticCustomError("structure", "{message}", {"message": message})
