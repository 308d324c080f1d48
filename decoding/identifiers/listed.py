"""Names that the request lists, by what stands before the dot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from decoding.identifiers.base import IdentifierProvider
from turnout.registry import MethodParams

Identifier = Annotated[str, Field(min_length=1, max_length=256)]
RECEIVER = re.compile(r"(\w+)\.\Z")


class ListedParams(MethodParams):
    """Parameters of `listed`."""

    example: ClassVar[Mapping[str, Any]] = {"names": {"self": ["size"]}}
    names: Annotated[
        dict[Identifier, Annotated[list[Identifier], Field(max_length=4096)]],
        Field(default_factory=dict, max_length=1024, description="names that may follow, by the word before the dot"),
    ]


class Listed(IdentifierProvider):
    """See the module: for callers that have analysed their code themselves."""

    Params = ListedParams
    params: ListedParams

    async def names(self, code: str) -> list[str]:
        """See `IdentifierProvider.names`."""
        found = RECEIVER.search(code)
        return self.params.names.get(found[1], []) if found is not None else []


PART = Listed
