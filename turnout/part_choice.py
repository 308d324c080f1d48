"""What a request chooses from a slot: a part by its name, with its parameters. The classes are in `decoding`."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_serializer, model_validator

from turnout.registry import MethodParams, explain, load


class PartChoice(BaseModel):
    """A part by name, with its parameters: `"svip"`, or `{"name": "svip", "threshold": 0.4}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    params: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and isinstance(value.get("name"), str) and set(value) != {"name", "params"}:
            return {"name": value["name"], "params": {key: each for key, each in value.items() if key != "name"}}
        return value

    @model_serializer
    def _as_given(self) -> str | dict[str, Any]:
        return {"name": self.name, **self.params} if self.params else self.name

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts among its parameters."""
        return tuple(value for value in self.params.values() if isinstance(value, str))

    def find(self, package: str, field: str) -> type[Any]:
        """The class chosen, its parameters checked.

        Raises:
            TurnoutError: NOT_FOUND, listing what exists; INVALID_ARGUMENT, naming the parameter.
        """
        part: type[Any] = load(package, self.name, field).PART
        self.parse(part, field)
        return part

    def parse(self, part: type[Any], field: str) -> MethodParams:
        """The parameters for a part, validated."""
        try:
            params: MethodParams = part.Params.model_validate(self.params)
        except ValidationError as error:
            raise explain(error, field, part.Params) from None
        return params

    def make(self, package: str, field: str) -> Any:
        """The part itself."""
        part = self.find(package, field)
        made = part(self.parse(part, field))
        made.where = field
        return made

    @classmethod
    def of(cls, name: str, **params: Any) -> Self:
        """Written in code."""
        return cls(name=name, params=params)
