"""The base of what a request's body consists of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class BodyPart(BaseModel):
    """Unknown fields are refused, values are immutable, and null is as good as absent.

    Clients send back what they were answered, with null for everything that an answer could have had, whether it is
    known here or not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values
