"""Pages of other origins call only where the configuration names them."""

from __future__ import annotations

import httpx
import pytest

from deployments.http import build_http
from tests.deployments.in_process import make_config, make_service
from turnout.errors import TurnoutError

APP, OTHER = "https://app.example.com", "https://other.example.com"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


@pytest.mark.parametrize(
    ("origins", "caller", "allowed"),
    [((), APP, None), ((APP,), APP, APP), ((APP,), OTHER, None), (("*",), OTHER, "*")],
)
async def test_a_page_may_call_from_the_origins_that_are_named(
    origins: tuple[str, ...], caller: str, allowed: str | None
) -> None:
    transport = httpx.ASGITransport(build_http(make_service(cors_origins=origins)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers={"Origin": caller}) as client:
        before = await client.options("/v1/chat/completions", headers=ASKS)
        answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        refused = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 0})
    assert answer.status_code == 200
    assert refused.status_code == 400
    for each in (before, answer, refused):
        assert each.headers.get("access-control-allow-origin") == allowed
    if allowed:
        assert before.status_code == 200
        assert "authorization" in before.headers["access-control-allow-headers"]


@pytest.mark.parametrize("origin", ["example.com", "https://*.example.com", "https://example.com/path", ""])
def test_what_is_no_origin_is_refused_by_name(origin: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        make_config(cors_origins=[origin])
    assert refused.value.field == "server.cors_origins.0"
