"""Paths of HTTP requests: names that contain slashes, redirects behind a proxy's path prefix, and HEAD."""

from __future__ import annotations

import re

from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX_HEADER = "x-forwarded-prefix"
# One leading slash only: `//host` would be an address elsewhere.
PREFIX = re.compile(r"(/[A-Za-z0-9._~%!$&'()*+;=:@-]+)+")


class NameConvertor(Convertor[str]):
    """Path parameter that may contain slashes, as `org/model`; `{name:slashed}` in a route."""

    regex = ".*[^/]"  # without a trailing slash, which is redirected as everywhere

    def convert(self, value: str) -> str:
        """Return the decoded path's part as it is."""
        return value

    def to_string(self, value: str) -> str:
        """Return the name as a part of a path."""
        return value


register_url_convertor("slashed", NameConvertor())


class HeadAsGet:
    """ASGI middleware that answers HEAD wherever GET is served: same status and headers, no body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


def redirect_slashes(router: Router) -> None:
    """Redirect paths with a slash too many or too few by relative addresses.

    Starlette's own redirects are absolute: they lose the prefix and the scheme under which a proxy serves us.
    """
    router.redirect_slashes = False

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        target = _other_spelling(router, scope) if scope["type"] == "http" else None
        if target is None:
            await router.not_found(scope, receive, send)
        else:
            await RedirectResponse(target)(scope, receive, send)

    router.default = default


def _other_spelling(router: Router, scope: Scope) -> str | None:
    """Return the relative address of the same path with or without its trailing slash, if there is a route for it."""
    path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
    last = raw.removesuffix(b"/").rpartition(b"/")[2].decode("latin-1")
    if raw.endswith(b"/"):
        other, target = path.removesuffix("/"), f"../{last}"
    elif path.endswith("/"):  # an escaped slash belongs to a name
        return None
    else:
        other, target = f"{path}/", f"./{last}/"
    if not last or all(route.matches({**scope, "path": other})[0] is Match.NONE for route in router.routes):
        return None
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{target}?{query}" if query else target


def proxy_prefix(scope: Scope) -> str:
    """Return the path under which a proxy serves us, without a trailing slash; "" where none is known.

    The proxy names it in X-Forwarded-Prefix (several proxies, outermost first), or the server in `root_path`.
    """
    given = ",".join(Headers(scope=scope).getlist(PREFIX_HEADER))
    prefix = "".join(part.strip().rstrip("/") for part in given.split(","))
    if PREFIX.fullmatch(prefix):
        return prefix
    return str(scope.get("root_path", "")).rstrip("/")
