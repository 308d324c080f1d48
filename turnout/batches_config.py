"""The configuration's section for batches: many requests in a file, answered when there is time."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class BatchesConfig(BaseModel):
    """Files and batches of `/v1/files` and `/v1/batches`; see docs/batch.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Annotated[
        str, Field(min_length=1, description="where files and batches are kept; one server at a time works on them")
    ]
    max_file_bytes: Annotated[int, Field(ge=1, description="largest file that is taken, bytes")] = 200 << 20
    max_files: Annotated[int, Field(ge=1, description="files a tenant may keep")] = 1000
    max_bytes: Annotated[int, Field(ge=1, description="most bytes of a tenant's files, those of answers included")] = (
        20 << 30
    )
    max_batches: Annotated[int, Field(ge=1, description="batches of a tenant that have not ended")] = 100
    max_ended: Annotated[
        int, Field(ge=1, description="batches of a tenant that have ended and are still shown, the newest")
    ] = 1000
    max_requests: Annotated[int, Field(ge=1, description="lines of one batch")] = 200_000
    concurrency: Annotated[int, Field(ge=1, description="requests of all batches that are asked at once")] = 64
    retention_s: Annotated[
        float, Field(gt=0, description="time after which files, and batches that have ended, are deleted, seconds")
    ] = 30 * 86400.0
