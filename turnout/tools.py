"""Tools that a conversation may call: what a caller offers, and what a model asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller can run; `parameters` is the JSON schema of its arguments, as JSON."""

    name: str
    description: str = ""
    parameters: str = "{}"

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": json.loads(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made; `arguments` are a JSON object, as JSON."""

    id: str
    name: str
    arguments: str

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": json.loads(self.arguments)},
        }


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """New output of the call with number `index` in an answer, from 0.

    Its first part has the id and the name; the arguments of all parts, joined, are a JSON object, as JSON.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
