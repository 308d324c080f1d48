from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from deployments.access.keys import MAX_LENGTH, make_key, parse_key


def test_a_key_opens_its_own_record_and_no_other() -> None:
    key, record = make_key(label="ci")
    other, _ = make_key()
    prefix, key_id, secret = key.split("_", 2)
    assert (prefix, key_id) == ("tk", record.id)
    assert len(secret) == 43  # 256 bits in base64
    assert record.opened_by(secret)
    assert not record.opened_by(other.split("_", 2)[2])
    assert not record.opened_by(secret[:-1])
    assert not record.opened_by("")


def test_nothing_of_a_secret_is_kept() -> None:
    key, record = make_key()
    secret = key.split("_", 2)[2]
    assert secret not in record.model_dump_json()
    assert record.hash not in repr(record)
    assert record.salt not in repr(record)


def test_two_keys_never_have_a_hash_or_a_salt_in_common() -> None:
    records = [make_key()[1] for _ in range(50)]
    assert len({record.hash for record in records} | {record.salt for record in records}) == 100


def test_a_key_ends_when_it_expires_or_is_revoked() -> None:
    now = datetime.now(UTC)
    _, record = make_key(expires=now + timedelta(hours=1))
    assert record.ended(now) is None
    assert record.ended(now + timedelta(hours=1)) == "expired"
    revoked = record.model_copy(update={"revoked": now})
    assert revoked.ended(now) == "revoked"


@pytest.mark.parametrize(
    "text", ["", "tk", "tk_", "tk_abc", "sk_abc_def", "abc", "tk_é_x", "tk_a_" + "x" * MAX_LENGTH, "tk-a-b"]
)
def test_what_is_no_key_is_none(text: str) -> None:
    assert parse_key(text) is None
