"""The console's part of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ConsoleConfig(BaseModel):
    """The web page at /console."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: Annotated[bool, Field(description="serve the page; the endpoints it uses are served anyway")] = True
    experiments: Annotated[
        str | None,
        Field(min_length=1, description="folder of experiment reports (*.json) that it plots; absent: no such page"),
    ] = None
