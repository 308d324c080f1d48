"""The console's files, held in memory, with the headers that keep a browser from anything but them and us."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

INDEX = "index.html"
MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no frame around it, no form that leaves: a prompt that were taken for markup
# could still do nothing.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; `etag` names its content, quotes included."""

    body: bytes
    media_type: str
    etag: str


class Assets:
    """All files of the page, read once."""

    def __init__(self) -> None:
        self._assets = {
            entry.name: _asset(entry.name, entry.read_bytes())
            for entry in files(__package__).joinpath("static").iterdir()
            if entry.name.rpartition(".")[2] in MEDIA_TYPES
        }

    @property
    def names(self) -> list[str]:
        """What there is, sorted."""
        return sorted(self._assets)

    def response(self, name: str, request: Request) -> Response:
        """The file, or that the browser has it already.

        Raises:
            HTTPException: 404, there is no such file.
        """
        asset = self._assets.get(name)
        if asset is None:
            raise HTTPException(404, "Not Found")
        headers = {**HEADERS, "ETag": asset.etag}
        given = ",".join(request.headers.getlist("if-none-match"))
        known = {tag.strip().removeprefix("W/") for tag in given.split(",")}
        if asset.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, media_type=asset.media_type, headers=headers)


def _asset(name: str, body: bytes) -> Asset:
    digest = hashlib.blake2b(body, digest_size=12).hexdigest()
    return Asset(body, MEDIA_TYPES[name.rpartition(".")[2]], f'"{digest}"')
