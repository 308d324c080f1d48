"""The configuration's section for `/v1/responses`: where responses are kept, and for how long."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnout.errors import invalid


class ResponsesConfig(BaseModel):
    """Responses of `/v1/responses`; see docs/responses.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: Annotated[
        bool, Field(description="keep responses, encrypted, unless a request says `store: false`; false: keep none")
    ] = True
    folder: Annotated[
        str | None,
        Field(min_length=1, description="where they are kept; absent: in the prefix store's Redis, if there is one"),
    ] = None
    root_key_file: Annotated[
        str | None,
        Field(description="file with 32 random bytes as 64 hex digits or base64, mode 600; needed with a folder"),
    ] = None
    retention_s: Annotated[
        float, Field(gt=0, description="time after its last use for which a response is kept, seconds")
    ] = 30 * 86400.0
    max_bytes: Annotated[
        int,
        Field(
            ge=1 << 16,
            description="most bytes of a tenant's responses, each counted with at least 1,024; the longest unused go",
        ),
    ] = 64 << 20
    ignored_tools: Annotated[
        tuple[str, ...],
        Field(description="types of tools, such as web_search, that are left out of requests; others are refused"),
    ] = ()

    @model_validator(mode="after")
    def _check_key(self) -> ResponsesConfig:
        if (self.folder is None) != (self.root_key_file is None):
            raise invalid("responses.root_key_file", "goes together with responses.folder (openssl rand -hex 32)")
        return self
