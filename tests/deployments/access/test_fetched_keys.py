"""Keys of an identity provider at an address: rotated, down, rubbish; and no request that waits for it in vain."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from deployments.access.callers import Callers
from deployments.access.fetched_keys import FetchedKeys
from deployments.access.signed import SignedTokens, fetched_keys
from deployments.http import build_http
from tests.deployments.access.kit import house, house_config, write_house
from tests.deployments.access.test_callers import EC, ED, RSA, jwks, token
from tests.deployments.access.test_tenants_file import until
from turnout.access_config import JwtConfig
from turnout.errors import Code, TurnoutError

NEW = rsa.generate_private_key(public_exponent=65537, key_size=2048)
FORMS = jwt.algorithms
FIRST = jwks(r=(RSA, FORMS.RSAAlgorithm))
ROTATED = jwks(r=(RSA, FORMS.RSAAlgorithm), n=(NEW, FORMS.RSAAlgorithm))
ALGORITHMS = ("RS256", "ES256", "EdDSA")
FOREVER_S = 3600.0


class Provider:
    """Server of a key set: what it answers with can be changed; asked for how often."""

    def __init__(self) -> None:
        self.body, self.status, self.asked = FIRST, 200, 0
        self.open = threading.Event()  # closed: it accepts, and does not answer
        self.open.set()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked += 1
                provider.open.wait(30)
                self.send_response(provider.status)
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(provider.body.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/jwks"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.open.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


def config(provider: Provider, **changes: Any) -> JwtConfig:
    given = {"issuer": "https://id", "audience": "turnout", "jwks_url": provider.url, "jwks_refresh_s": FOREVER_S}
    return JwtConfig.model_validate(given | changes)


async def tenant(signed: SignedTokens, credential: str) -> str:
    await signed.settle(credential)
    return signed.tenant_of(credential)[0]


async def test_a_rotated_key_is_fetched_for_the_first_token_that_names_it(provider: Provider) -> None:
    signed = SignedTokens(config(provider), cooldown_s=0.0)
    try:
        assert await tenant(signed, token()) == "acme"
        provider.body = ROTATED
        credential = token(NEW, kid="n")
        assert await asyncio.gather(*(tenant(signed, credential) for _ in range(20))) == ["acme"] * 20
        assert provider.asked == 2, "those that wait share one fetch"
        provider.body = jwks(n=(NEW, FORMS.RSAAlgorithm))
        with pytest.raises(TurnoutError, match="no key is known"):
            await tenant(signed, token(kid="unknown"))
        with pytest.raises(TurnoutError, match="no key is known"):
            await tenant(signed, token())  # withdrawn
    finally:
        signed.close()


async def test_unknown_keys_cause_one_fetch_in_a_cooldown(provider: Provider) -> None:
    signed = SignedTokens(config(provider), cooldown_s=FOREVER_S)
    try:
        for number in range(10):
            with pytest.raises(TurnoutError, match="no key is known") as refused:
                await tenant(signed, token(NEW, kid=f"made-up-{number}"))
            assert refused.value.code is Code.UNAUTHENTICATED
        assert await tenant(signed, token()) == "acme"
        assert provider.asked == 1
    finally:
        signed.close()


async def test_tokens_that_no_key_could_verify_cause_no_fetch(provider: Provider) -> None:
    signed = SignedTokens(config(provider), cooldown_s=0.0)
    try:
        for credential in ("rubbish", "a.b.c", token(algorithm="PS256", kid="x"), "x" * 9000, token(kid="")):
            await signed.settle(credential)
        assert provider.asked == 1
    finally:
        signed.close()


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (503, "", "the address answers with HTTP status 503"),
        (302, "", "the address answers with HTTP status 302"),  # it is not followed: another host could answer
        (200, "<html>Sign in</html>", "the answer is no JSON object"),
        (200, "[" * 100_000, "the answer is no JSON object"),
        (200, '["keys"]', "the answer is no JSON object"),
        (200, "{}", "no key in it verifies one of RS256, ES256, EdDSA"),
        (200, '{"keys": {"kty": "RSA"}}', "no key in it verifies one of RS256, ES256, EdDSA"),
        (200, '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}, 7, {}]}', "no key in it verifies one of RS256, ES256, EdDSA"),
    ],
)
async def test_what_cannot_be_used_is_a_fault_and_the_keys_before_it_hold(
    provider: Provider, status: int, body: str, fault: str
) -> None:
    signed = SignedTokens(config(provider), cooldown_s=0.0)
    try:
        provider.status, provider.body = status, body
        with pytest.raises(TurnoutError, match="no key is known"):
            await tenant(signed, token(NEW, kid="n"))
        assert signed.fault == f"access.jwt.jwks_url: {fault}"
        assert await tenant(signed, token()) == "acme"
        provider.status, provider.body = 200, ROTATED
        until(lambda: signed.fault is None, 30)  # without any token
        assert await tenant(signed, token(NEW, kid="n")) == "acme"
    finally:
        signed.close()


async def test_a_server_starts_without_its_provider_and_takes_tokens_once_it_is_there(provider: Provider) -> None:
    provider.status = 500
    signed = SignedTokens(config(provider), cooldown_s=0.05)
    try:
        assert signed.fault is not None
        with pytest.raises(TurnoutError, match="keys cannot be fetched now") as refused:
            signed.tenant_of(token())
        assert refused.value.code is Code.UNAVAILABLE
        provider.status = 200
        until(lambda: signed.fault is None, 30)  # without any token
        assert signed.tenant_of(token())[0] == "acme"
    finally:
        signed.close()


def test_nobody_at_the_address_is_a_fault(provider: Provider) -> None:
    provider.close()
    signed = SignedTokens(config(provider))
    try:
        assert str(signed.fault).startswith("access.jwt.jwks_url: the address cannot be reached (")
    finally:
        signed.close()


async def test_a_provider_that_does_not_answer_holds_up_nobody_else(provider: Provider) -> None:
    keys = FetchedKeys(provider.url, lambda found: found, FOREVER_S, timeout_s=30.0, cooldown_s=0.0)
    try:
        keys._client.timeout = 0.2  # from here on: the first look has all the time that it needs
        provider.open.clear()
        waiting = asyncio.create_task(keys.look_again())
        turns = 0
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 10, "the event loop went on"
        assert keys.fault == "access.jwt.jwks_url: the address does not answer in time"
        assert keys.value is not None
    finally:
        provider.open.set()
        keys.close()


def test_a_set_is_fetched_again_in_time(provider: Provider) -> None:
    keys = FetchedKeys(provider.url, lambda found: len(found["keys"]), refresh_s=0.02, timeout_s=5)
    try:
        assert keys.value == 1
        provider.body = ROTATED
        until(lambda: keys.value == 2, 30)
    finally:
        keys.close()


def test_keys_of_kinds_to_come_are_left_out() -> None:
    entries = json.loads(jwks(r=(RSA, FORMS.RSAAlgorithm), e=(EC, FORMS.ECAlgorithm), o=(ED, FORMS.OKPAlgorithm)))
    others = [{"kty": "AKP", "kid": "pq"}, {"kty": "EC", "crv": "brainpool", "x": "AA", "y": "AA"}, {"kty": "oct"}]
    private = json.loads(FORMS.RSAAlgorithm.to_jwk(RSA)) | {"kid": "leaked"}
    found = fetched_keys({"keys": [*others, private, *entries["keys"]]}, ALGORITHMS)
    assert [key.id for key in found] == ["r", "e", "o"]


async def test_over_http_and_the_file_and_the_address_exclude_each_other(provider: Provider, tmp_path: Path) -> None:
    signed = {"issuer": "https://id", "audience": "turnout", "jwks_url": provider.url}
    with house(tmp_path, {"acme": {}}, {"jwt": signed}) as made:
        transport = httpx.ASGITransport(app=build_http(made.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            headers = {"Authorization": f"Bearer {token()}"}
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
            provider.body = jwks(n=(NEW, FORMS.RSAAlgorithm))
            unknown = await http.get("/v1/models", headers={"Authorization": f"Bearer {token(NEW, kid='n')}"})
            assert unknown.status_code == 401, "it was fetched a moment ago"
    with pytest.raises(TurnoutError, match="exactly one of jwks_file, jwks_url and key_file"):
        config(provider, jwks_file="keys.json")
    for wrong in ("file:///etc/keys", "https://user:password@id/jwks"):
        with pytest.raises(ValueError, match="jwks_url"):
            config(provider, jwks_url=wrong)


def test_a_fault_is_shown_to_operators_with_those_of_files(provider: Provider, tmp_path: Path) -> None:
    write_house(tmp_path, {"acme": {}})
    provider.status = 404
    signed = {"issuer": "https://id", "audience": "turnout", "jwks_url": provider.url}
    callers = Callers(house_config(tmp_path, {"jwt": signed}).access)
    try:
        assert callers.faults == ["access.jwt.jwks_url: the address answers with HTTP status 404"]
    finally:
        callers.close()
