from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from deployments.access.callers import Caller, Callers
from deployments.access.keys import make_key
from deployments.access.tenants_file import Tenant, Tenants, read_tenants, write_tenants
from tests.deployments.access.kit import house_config, write_house
from tests.deployments.access.test_tenants_file import until
from turnout.access_config import UNLIMITED
from turnout.calls import GenerateCall
from turnout.config import parse_config
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams, SharingPolicy

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()


def public_pem(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem: bytes = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    return pem


def jwks(**keys: Any) -> str:
    """A key set; by id: (private key, algorithm's class)."""
    entries = []
    for kid, (key, form) in keys.items():
        entries.append({**json.loads(form.to_jwk(key.public_key())), "kid": kid, "use": "sig"})
    return json.dumps({"keys": entries})


def token(key: Any = RSA, algorithm: str = "RS256", kid: str = "r", **changes: Any) -> str:
    now = datetime.now(UTC)
    claims = {"iss": "https://id", "aud": "turnout", "exp": now + timedelta(hours=1), "tenant": "acme"} | changes
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid} if kid else None)


@pytest.fixture
def callers(tmp_path: Path) -> Iterator[Callers]:
    """Tenant acme by key or token, and a key set with one key of each kind."""
    write_house(tmp_path, {"acme": {}, "slow": {"priority": "batch", "max_priority": "batch"}})
    algorithms = jwt.algorithms
    text = jwks(r=(RSA, algorithms.RSAAlgorithm), e=(EC, algorithms.ECAlgorithm), o=(ED, algorithms.OKPAlgorithm))
    (tmp_path / "jwks.json").write_text(text, encoding="utf-8")
    signed = {"issuer": "https://id", "audience": "turnout", "jwks_file": str(tmp_path / "jwks.json")}
    made = Callers(house_config(tmp_path, {"jwt": signed}).access)
    yield made
    made.close()


def refusal(callers: Callers, authorization: str | None, priority: str | None = None) -> TurnoutError:
    with pytest.raises(TurnoutError) as refused:
        callers.of(authorization, priority)
    return refused.value


def test_without_the_section_everybody_is_one_tenant() -> None:
    callers = Callers(None)
    assert callers.of("Bearer whatever") == callers.of(None) == Caller("default", UNLIMITED)


def test_a_caller_is_in_the_call_and_the_body_says_nothing() -> None:
    call = GenerateCall("r", "m", SamplingParams(), prompt="x", tenant="somebody else", key_id="theirs")
    mine = Caller("acme", UNLIMITED, "k", "batch").attributed(call)
    assert (mine.tenant, mine.key_id, mine.priority) == ("acme", "k", "batch")


def test_only_a_tenants_entry_tells_with_whom_it_shares(tmp_path: Path) -> None:
    write_house(tmp_path, {"acme": {"sharing": {"policy": "group", "group": "team"}}, "other": {}})
    (tmp_path / "key.pem").write_bytes(public_pem(RSA))
    signed = {"issuer": "https://id", "audience": "turnout", "key_file": str(tmp_path / "key.pem")}
    for config in (
        house_config(tmp_path, {"jwt": signed}),
        house_config(tmp_path, {"jwt": signed, "tenants_file": None}),
    ):
        assert config.access is not None
        callers = Callers(config.access)
        try:
            acme = SharingPolicy(policy="group", group="team") if config.access.tenants_file else None
            assert callers.of(f"Bearer {token(kid='')}").tenant == "acme"
            assert [callers.sharing(name) for name in ("acme", "other", "nobody")] == [acme, None, None]
        finally:
            callers.close()
    assert Callers(None).sharing("default") is None


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    keys = write_house(tmp_path, {"acme": {"concurrency": 3}, "other": {}})
    callers = Callers(house_config(tmp_path).access)
    try:
        caller = callers.of(f"bearer  {keys['acme']} ")
        assert (caller.tenant, caller.limits.concurrency) == ("acme", 3)
        assert caller.key_id == keys["acme"].split("_")[1]
        mixed = "_".join([*keys["acme"].split("_", 2)[:2], keys["other"].split("_", 2)[2]])
        for wrong in (None, "", "Basic abc", "Bearer", "Bearer x", "Bearer tk_x_y", f"Bearer {mixed}", keys["acme"]):
            error = refusal(callers, wrong)
            assert error.code is Code.UNAUTHENTICATED
            assert error.field == "authorization"
            assert keys["acme"].split("_", 2)[2] not in error.message
    finally:
        callers.close()


def test_keys_end_rotate_and_come_back_without_a_restart(tmp_path: Path) -> None:
    keys = write_house(tmp_path, {"acme": {}})
    path, old = tmp_path / "tenants.yaml", f"Bearer {keys['acme']}"
    callers = Callers(house_config(tmp_path).access, poll_s=0.02)
    try:
        tenant = read_tenants(path).tenant("acme")
        new, record = make_key()
        write_tenants(path, Tenants(tenants={"acme": tenant.with_key(record)}))
        until(lambda: _known(callers, f"Bearer {new}"), 30)
        assert callers.of(old).tenant == "acme"  # the overlap
        past = datetime.now(UTC) - timedelta(seconds=1)
        for change, said in ({"expires": past}, "expired"), ({"revoked": past}, "revoked"):
            ended = tenant.keys[0].model_copy(update=change)
            write_tenants(path, Tenants(tenants={"acme": Tenant(keys=(ended, record))}))
            until(lambda said=said: not _known(callers, old) and said in refusal(callers, old).message, 30)
        assert callers.of(f"Bearer {new}").key_id == record.id
        write_tenants(path, Tenants(tenants={"acme": Tenant(keys=(record,), disabled=True)}))
        until(lambda: not _known(callers, f"Bearer {new}"), 30)
        assert "disabled" in refusal(callers, f"Bearer {new}").message
    finally:
        callers.close()


def test_names_that_may_stand_for_others_are_told_once(tmp_path: Path) -> None:
    write_house(tmp_path, {name: {} for name in ("kept", "gone", "anew", "rotated", "limited")})
    path = tmp_path / "tenants.yaml"
    before = read_tenants(path)
    callers = Callers(house_config(tmp_path).access, poll_s=0.02)
    try:
        assert callers.changed() == set()
        (_, other), (_, second) = make_key(), make_key()
        rotated = before.tenant("rotated").with_key(second)
        changed = {
            "kept": before.tenant("kept"), "limited": before.tenant("limited").model_copy(update={"disabled": True}),
            "anew": Tenant(keys=(other,)), "rotated": rotated, "new": Tenant(),
        }  # fmt: skip
        write_tenants(path, Tenants(tenants=changed))
        until(lambda: callers.knows("new"), 30)
        assert callers.changed() == {"gone", "anew", "new"}
        write_tenants(path, Tenants(tenants={**changed, "gone": Tenant()}))
        until(lambda: callers.knows("gone"), 30)
        write_tenants(path, Tenants(tenants=changed))
        until(lambda: not callers.knows("gone"), 30)
        assert [callers.changed(), callers.changed()] == [{"gone"}, set()]
    finally:
        callers.close()


def _known(callers: Callers, authorization: str) -> bool:
    try:
        callers.of(authorization)
    except TurnoutError:
        return False
    return True


def test_anonymous_requests_have_a_tenant_only_where_one_is_named(tmp_path: Path) -> None:
    keys = write_house(tmp_path, {"guest": {"concurrency": 1}})
    callers = Callers(house_config(tmp_path, {"anonymous": "guest"}).access)
    try:
        assert callers.of(None).limits.concurrency == 1
        assert callers.of(f"Bearer {keys['guest']}").tenant == "guest"
        # Wrong credentials are not the same as none.
        assert refusal(callers, "Bearer tk_000000000000_x").code is Code.UNAUTHENTICATED
    finally:
        callers.close()


def test_priorities(callers: Callers) -> None:
    assert callers.of(f"Bearer {token()}").priority == "interactive"
    assert callers.of(f"Bearer {token()}", "batch").priority == "batch"
    slow = f"Bearer {token(tenant='slow')}"
    assert callers.of(slow).priority == "batch"
    assert refusal(callers, slow, "interactive").code is Code.PERMISSION_DENIED
    error = refusal(callers, f"Bearer {token()}", "urgent")
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "x-turnout-priority")


@pytest.mark.parametrize(("key", "algorithm", "kid"), [(RSA, "RS256", "r"), (EC, "ES256", "e"), (ED, "EdDSA", "o")])
def test_signed_tokens_name_a_tenant(callers: Callers, key: Any, algorithm: str, kid: str) -> None:
    for known in (kid, ""):
        caller = callers.of(f"Bearer {token(key, algorithm, known)}")
        assert (caller.tenant, caller.key_id) == ("acme", kid)


def hand_made(head: dict[str, str], claims: dict[str, Any], secret: bytes) -> str:
    """An HMAC over a token, made without a library that would refuse to."""
    import base64
    import hashlib
    import hmac

    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    signed = f"{part(head)}.{part(claims)}"
    digest = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


CLAIMS = {"iss": "https://id", "aud": "turnout", "exp": 4102444800, "tenant": "acme"}
NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (jwt.encode(CLAIMS, None, algorithm="none"), "must be signed with one of"),
        # The classic attack: the public key as the secret of an HMAC.
        (hand_made({"alg": "HS256", "typ": "JWT", "kid": "r"}, CLAIMS, public_pem(RSA)), "must be signed with one of"),
        (hand_made({"alg": "RS256", "typ": "JWT", "kid": "r"}, CLAIMS, public_pem(RSA)), "signature is wrong"),
        (token(algorithm="RS512"), "must be signed with one of"),
        (token(algorithm="PS256"), "must be signed with one of"),
        (token(EC, "ES256", "r"), "no key is known"),
        (token(rsa.generate_private_key(public_exponent=65537, key_size=2048)), "signature is wrong"),
        (token(exp=NOW - timedelta(minutes=1)), "has expired"),
        (token(nbf=NOW + timedelta(days=1)), "not valid yet"),
        (token(exp=None), "no exp"),
        (token(iss="https://evil"), "another issuer"),
        (token(aud="else"), "another audience"),
        (token(tenant=None), "names no tenant"),
        (token(tenant="../etc"), "names no tenant"),
        (token(tenant=7), "names no tenant"),
        (token(tenant="unheard-of"), "not known"),
        (token()[:-4] + "AAAA", "signature is wrong"),
        ("a.b.c", "malformed"),
        ("x" * 9000, "at most"),
    ],
)
def test_a_token_that_proves_nothing_is_refused(callers: Callers, given: str, says: str) -> None:
    error = refusal(callers, f"Bearer {given}")
    assert error.code is Code.UNAUTHENTICATED
    assert says in error.message
    assert given[-20:] not in error.message


def test_leeway_is_for_clocks_that_differ(callers: Callers) -> None:
    assert callers.of(f"Bearer {token(exp=datetime.now(UTC) - timedelta(seconds=3))}").tenant == "acme"


def signed_by(folder: Path, **settings: Any) -> Callers:
    section = {"issuer": "https://id", "audience": "turnout"} | settings
    return Callers(house_config(folder, {"tenants_file": None, "jwt": section}).access, poll_s=0.02)


def test_a_token_without_an_id_may_be_of_any_key_of_its_kind(tmp_path: Path) -> None:
    new, small = rsa.generate_private_key(public_exponent=65537, key_size=2048), ec.generate_private_key(ec.SECP384R1())
    algorithms = jwt.algorithms
    text = jwks(
        old=(RSA, algorithms.RSAAlgorithm),
        new=(new, algorithms.RSAAlgorithm),
        larger=(small, algorithms.ECAlgorithm),
        e=(EC, algorithms.ECAlgorithm),
    )
    (tmp_path / "jwks.json").write_text(text, encoding="utf-8")
    write_house(tmp_path, {"acme": {}})
    callers = signed_by(tmp_path, jwks_file=str(tmp_path / "jwks.json"))
    try:
        for key, algorithm, name in (RSA, "RS256", "old"), (new, "RS256", "new"), (EC, "ES256", "e"):
            assert callers.of(f"Bearer {token(key, algorithm, '')}").key_id == name
        stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        assert "signature is wrong" in refusal(callers, f"Bearer {token(stranger, kid='')}").message
    finally:
        callers.close()


def test_one_public_key_as_pem_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(public_pem(RSA))
    callers = signed_by(tmp_path, key_file=str(path))
    try:
        assert callers.of(f"Bearer {token(kid='')}").tenant == "acme"
        path.write_bytes(public_pem(EC))
        until(lambda: _known(callers, f"Bearer {token(EC, 'ES256', '')}"), 30)
        assert not _known(callers, f"Bearer {token(kid='')}")
    finally:
        callers.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "h"}]}), "must be public"),
        (json.dumps({"keys": [json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA))]}), "must be public"),
        (json.dumps({"keys": []}), "no key in it"),
        ("{}", "no JSON Web Key Set"),
        ("nonsense", "no JSON Web Key Set"),
    ],
)
def test_a_key_set_of_secrets_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "jwks.json").write_text(text, encoding="utf-8")
    with pytest.raises(TurnoutError, match=says):
        signed_by(tmp_path, jwks_file=str(tmp_path / "jwks.json"))


@pytest.mark.parametrize("algorithm", ["none", "HS256", "HS512", "rs256"])
def test_algorithms_that_prove_nothing_cannot_be_configured(algorithm: str) -> None:
    section = {"issuer": "i", "audience": "a", "key_file": "k", "algorithms": [algorithm]}
    pair = {"models": {"s": {"path": "x"}, "l": {"path": "x"}}, "pools": {"p": {"small": "s", "large": "l"}}}
    with pytest.raises(TurnoutError, match=r"access\.jwt\.algorithms\.0"):
        parse_config({**pair, "access": {"jwt": section}})


def test_a_section_that_lets_nobody_in_is_refused() -> None:
    pair = {"models": {"s": {"path": "x"}, "l": {"path": "x"}}, "pools": {"p": {"small": "s", "large": "l"}}}
    with pytest.raises(TurnoutError, match=r"access\.tenants_file"):
        parse_config({**pair, "access": {}})


def test_a_budget_needs_records(tmp_path: Path) -> None:
    keys = write_house(tmp_path, {"acme": {"budget": {"amount": 5}}, "other": {}})
    callers = Callers(house_config(tmp_path, {"usage": None}).access)
    try:
        error = refusal(callers, f"Bearer {keys['acme']}")
        assert (error.code, error.field) == (Code.PERMISSION_DENIED, "tenants.acme.limits.budget")
        assert callers.of(f"Bearer {keys['other']}").tenant == "other"  # one tenant's fault is nobody else's
        (fault,) = callers.faults
        assert "needs access.usage" in fault
    finally:
        callers.close()
