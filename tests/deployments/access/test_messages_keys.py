"""Keys and limits as Anthropic's clients meet them: the key in a header of its own, errors in Anthropic's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from deployments.http import build_http
from tests.deployments.access.kit import house

TENANTS: dict[str, dict[str, Any]] = {"acme": {}, "one": {"requests_per_minute": 1}, "narrow": {"pools": ["demo"]}}
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "fast"}], "max_tokens": 2}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")


async def test_keys_and_limits(tmp_path: Path) -> None:
    with house(tmp_path, TENANTS, max_body_bytes=10_000) as made:
        transport = httpx.ASGITransport(app=build_http(made.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://turnout") as web:

            async def ask(path: str, key: str, asked: dict[str, Any] = ASKED, **more: str) -> tuple[int, Any]:
                answer = await web.post(path, json=asked, headers={"x-api-key": key, **more} if key else more)
                told = answer.json()
                return answer.status_code, told.get("error", told).get("type")

            keys, bearer = made.keys, {"Authorization": f"Bearer {made.keys['acme']}"}
            assert await ask(PATHS[0], keys["one"]) == (200, "message")
            assert await ask(PATHS[0], keys["one"]) == (429, "rate_limit_error")
            assert await ask(PATHS[0], "", **bearer) == (200, "message")
            assert await ask(PATHS[0], "unknown", **bearer) == (200, "message")
            assert (await ask("/v1/chat/completions", keys["acme"]))[0] == 200
            for path in PATHS:
                assert (await ask(path, keys["acme"]))[0] == 200
                assert await ask(path, keys["acme"], ASKED | {"system": "x" * 20_000}) == (413, "request_too_large")
                for key, more in (("", {}), ("unknown", {}), (keys["acme"], {"Authorization": "Bearer unknown"})):
                    assert await ask(path, key, **more) == (401, "authentication_error")
            assert await ask(PATHS[0], keys["narrow"], ASKED | {"model": "other"}) == (403, "permission_error")


async def test_a_stream_of_a_tenant_counts_its_prompt(tmp_path: Path) -> None:
    with house(tmp_path, TENANTS) as made:
        transport = httpx.ASGITransport(app=build_http(made.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://turnout") as web:
            headers = {"x-api-key": made.keys["acme"]}
            answer = await web.post(PATHS[0], json=ASKED | {"stream": True}, headers=headers)
            counted = (await web.post(PATHS[1], json=ASKED, headers=headers)).json()["input_tokens"]
            usage = (await web.get("/v1/tenant", headers=headers)).json()["usage"]
    assert f'"input_tokens": {counted}, ' in answer.text.split("\n\n")[0]
    assert counted == len("fast")
    assert usage["tokens"] == counted + 2
