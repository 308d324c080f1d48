from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import Chain, Keyring, Link, fingerprint, key_prefix, load_root_key, redis_key, write_root_key
from tests.kvstore.chunks import ALICE, BOB, MODEL, PUBLIC, ROOT, TEAM
from turnout.errors import Code, TurnoutError
from turnout.types import Namespace, Sharing

TOKENS = list(range(1000, 1030))
SIZE = 4
RING = Keyring(ROOT)
PARTS: dict[str, str | int] = {
    "config": "c0", "weights": "w0", "tokenizer": "t0", "dtype": "bfloat16", "layout": 1, "numerics": "amx",
    "chunk_tokens": 64,
}  # fmt: skip

# What the store was filled with before an update must be found after it, by any version of Python: these are literals.
FIRST_NAME = b"to1:Ywvl-E1uMtXXePlZgJz1DQ:rcSh4I5Beqc:raw:0:FTT0s3AGCDeuWr0x2lkBkrYn1sHmnCeOnsnYR3EIn7Q"
FINGERPRINT = "d9141b9d402212c635e8c2dbf1ae2a40c8706bd4fbfaff29cb1ab6612030f5dd"


def links(
    tokens: list[int], sharing: Sharing, ring: Keyring = RING, model: bytes = MODEL, size: int = SIZE
) -> list[Link]:
    return Chain(ring, model, size, sharing).links(tokens, len(tokens))


def names_of(tokens: list[int], sharing: Sharing, ring: Keyring = RING, model: bytes = MODEL) -> list[bytes]:
    return [redis_key(ring, model, link, "raw", 0) for link in links(tokens, sharing, ring, model)]


def differing_bits(one: bytes, other: bytes) -> int:
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()


def test_a_digest_is_the_formula() -> None:
    key = RING.chain_key(ALICE)
    before = bytes(32)
    for link in links(TOKENS, Sharing(ALICE)):
        content = b"".join(token.to_bytes(4, "little") for token in TOKENS[link.index * 4 : link.index * 4 + 4])
        before = hmac.new(key, before + MODEL + (4).to_bytes(4, "little") + content, hashlib.sha256).digest()
        assert link.digest == before
        assert link.namespace == ALICE


def test_another_salt_is_another_digest_in_the_same_namespace() -> None:
    salts = ("", "a", "b", "ab")
    made = [links(TOKENS, Sharing(ALICE, salt=salt)) for salt in salts]
    assert {link.namespace for chain in made for link in chain} == {ALICE}
    assert len({link.digest for chain in made for link in chain}) == len(salts) * len(made[0])
    assert links(TOKENS, Sharing(ALICE, salt="a")) == made[1]


def test_only_full_chunks_have_links() -> None:
    assert [len(links(TOKENS[:count], Sharing(ALICE))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_names_stay_what_they_are() -> None:
    assert fingerprint(PARTS).hex() == FINGERPRINT
    assert names_of(TOKENS[:4], Sharing(ALICE)) == [FIRST_NAME]


def test_names_are_equal_in_every_process() -> None:
    script = (
        "from kvstore.keys import *; from turnout.types import *; import json\n"
        f"tokens = {TOKENS}\n"
        "parts = {name: name for name in {'weights', 'config', 'tokenizer', 'dtype', 'numerics'}}\n"
        "ring, model = Keyring(bytes(range(32)), 3), fingerprint(parts)\n"
        "sharing = Sharing(Namespace('private', 'alice'), ((8, Namespace('public', 'p')),))\n"
        "chain = Chain(ring, model, 4, sharing).links(tokens, 9)\n"
        "print(json.dumps([redis_key(ring, model, link, 'raw', 0).decode() for link in chain]))"
    )
    answers = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert answers[0] == answers[1]
    assert len(set(json.loads(answers[0]))) == 7


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.data())
def test_a_growing_sequence_has_the_links_of_a_finished_one(tokens: list[int], data: st.DataObject) -> None:
    sharing = Sharing(ALICE, ((6, PUBLIC),))
    chain = Chain(RING, MODEL, SIZE, sharing)
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        asked = data.draw(st.integers(0, 12))
        got = chain.links(tokens[:end], asked)
        assert len(got) >= min(asked, end // SIZE)
    assert chain.links(tokens, 99) == links(tokens, sharing)


@given(st.integers(0, 27), st.integers(0, 2**32 - 1))
def test_a_changed_token_changes_its_chunk_and_all_after_it_but_none_before(place: int, token: int) -> None:
    changed = [*TOKENS[:place], token, *TOKENS[place + 1 :]]
    pairs = zip(links(TOKENS, Sharing(ALICE)), links(changed, Sharing(ALICE)), strict=True)
    same = [one.digest == other.digest for one, other in pairs]
    assert same == [index < place // SIZE or token == TOKENS[place] for index in range(7)]


def test_a_chunk_does_not_stand_for_its_tokens_alone() -> None:
    twice = links([1, 2, 3, 4, 1, 2, 3, 4], Sharing(ALICE))
    assert twice[0].digest != twice[1].digest
    assert twice[0].digest != links([1, 2, 3, 4], Sharing(ALICE), size=2)[1].digest
    other = fingerprint({"weights": "another"})
    assert links([1, 2, 3, 4], Sharing(ALICE), model=other)[0].digest != twice[0].digest


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_beyond_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        links([token, 1, 2, 3], Sharing(ALICE))


def test_what_is_public_is_found_by_all_and_what_follows_by_its_owner_only() -> None:
    spans = ((12, PUBLIC),)
    mine, theirs = links(TOKENS, Sharing(ALICE, spans)), links(TOKENS, Sharing(BOB, spans))
    assert mine[:3] == theirs[:3]
    assert {link.namespace for link in mine[:3]} == {PUBLIC}
    assert not {link.digest for link in mine[3:]} & {link.digest for link in theirs[3:]}
    assert {link.namespace for link in mine[3:]} == {ALICE}


def test_a_chunk_belongs_to_the_most_private_span_it_touches() -> None:
    found = links(TOKENS, Sharing(ALICE, ((6, PUBLIC), (15, TEAM))))
    assert [link.namespace for link in found] == [PUBLIC, TEAM, TEAM, ALICE, ALICE, ALICE, ALICE]


def test_digests_of_two_namespaces_are_unrelated() -> None:
    pairs = zip(links(TOKENS, Sharing(ALICE)), links(TOKENS, Sharing(BOB)), strict=True)
    # 256 fair coins: beyond 80 to 176 once in a billion
    assert all(80 <= differing_bits(one.digest, other.digest) <= 176 for one, other in pairs)


def test_every_name_changes_with_the_root_key() -> None:
    one_bit = bytes([ROOT[0] ^ 1, *ROOT[1:]])
    for namespace in (ALICE, TEAM, PUBLIC):
        mine, theirs = (names_of(TOKENS, Sharing(namespace), Keyring(root)) for root in (ROOT, one_bit))
        assert not set(mine) & set(theirs)
        for one, other in zip(mine, theirs, strict=True):
            # neither the namespace's name nor the digest of a guessed prompt can be confirmed without the key
            assert one.split(b":")[1] != other.split(b":")[1]
            assert one.split(b":")[5] != other.split(b":")[5]


def test_nothing_of_tokens_or_tenants_is_in_a_name() -> None:
    content = b"".join(token.to_bytes(4, "little") for token in TOKENS[:4])
    chained = bytes(32) + MODEL + (4).to_bytes(4, "little") + content
    unkeyed = [hashlib.sha256(text).digest() for text in (content, chained, ALICE.key, ALICE.id.encode())]
    unkeyed += [hashlib.blake2b(text, digest_size=32).digest() for text in (content, chained)]
    unkeyed += [hmac.digest(bytes(32), chained, "sha256"), hmac.digest(MODEL, chained, "sha256")]
    name = names_of(TOKENS[:4], Sharing(ALICE))[0]
    parts = [base64.urlsafe_b64decode(part + b"==") for part in (name.split(b":")[1], name.split(b":")[5])]
    assert not any(part in text for part in parts for text in unkeyed)
    assert not any(content[i : i + 4] in part for part in parts for i in range(0, len(content), 4))
    assert ALICE.id.encode() not in name


def test_a_name_says_model_codec_and_group() -> None:
    link = links(TOKENS, Sharing(ALICE))[0]
    name = redis_key(RING, MODEL, link, "cachegen-2", 1)
    assert name.startswith(key_prefix(RING, MODEL, ALICE))
    head, namespace, model, codec, group, digest = name.split(b":")
    assert (head, codec, group) == (b"to1", b"cachegen-2", b"1")
    assert base64.urlsafe_b64decode(namespace + b"==") == RING.namespace_id(ALICE)
    assert base64.urlsafe_b64decode(model + b"=") == MODEL[:8]
    assert base64.urlsafe_b64decode(digest + b"=") == link.digest
    assert b"{" not in name


def test_an_epoch_renames_chunks_but_not_namespaces() -> None:
    later = Keyring(ROOT, 1)
    assert later.namespace_id(ALICE) == RING.namespace_id(ALICE)
    assert not set(names_of(TOKENS, Sharing(ALICE))) & set(names_of(TOKENS, Sharing(ALICE), later))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace("group", "org_1|2345"), Namespace("group", "org_12345|")),
        (Namespace("private", "a"), Namespace("group", "a")),
        (Namespace("group", ""), Namespace("public", "")),
        (Namespace("private", "alice"), Namespace("private", "alice\0")),
        (Namespace("private", "\u00e9"), Namespace("private", "e\u0301")),
    ],
)
def test_namespaces_do_not_run_into_each_other(one: Namespace, other: Namespace) -> None:
    assert RING.namespace_id(one) != RING.namespace_id(other)
    assert RING.chain_key(one) != RING.chain_key(other)


@given(st.text(max_size=8), st.text(max_size=8), st.integers(0, 8))
def test_no_cut_of_the_same_text_is_the_same_namespace(left: str, right: str, cut: int) -> None:
    text = left + right
    one, other = (_any_namespace(text[:place], text[place:]) for place in (len(left), cut))
    assert (RING.namespace_id(one) == RING.namespace_id(other)) == (one == other)
    assert (RING.derive("x", one, 0) == RING.derive("x", other, 0)) == (one == other)


def _any_namespace(policy: str, name: str) -> Namespace:
    return Namespace(policy, name)  # type: ignore[arg-type]


def test_keys_for_different_purposes_are_different() -> None:
    derived = [
        RING.derive(purpose, namespace, epoch)
        for purpose in ("chain", "value", "registry")
        for namespace in (ALICE, BOB, TEAM, None)
        for epoch in (0, 1)
    ]
    assert len(set(derived)) == len(derived)
    assert all(len(key) == 32 and key != ROOT for key in derived)


def test_a_value_key_opens_its_own_namespace_and_epoch_only() -> None:
    sealed = RING.value_key(ALICE, 0).encrypt(bytes(12), b"kv", None)
    assert Keyring(ROOT, 5).value_key(ALICE, 0).decrypt(bytes(12), sealed, None) == b"kv"
    for other in (RING.value_key(BOB, 0), RING.value_key(ALICE, 1), Keyring(ROOT[::-1]).value_key(ALICE, 0)):
        with pytest.raises(InvalidTag):
            other.decrypt(bytes(12), sealed, None)


def test_derived_keys_are_kept() -> None:
    assert RING.value_key(ALICE, 0) is RING.value_key(Namespace("private", "alice"), 0)


@pytest.mark.parametrize(("root", "epoch"), [(b"", 0), (bytes(31), 0), (bytes(33), 0), (ROOT, -1), (ROOT, 2**32)])
def test_a_bad_root_key_or_epoch_is_refused(root: bytes, epoch: int) -> None:
    with pytest.raises(ValueError, match=r"root key|epoch"):
        Keyring(root, epoch)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_in_the_fingerprint(name: str) -> None:
    value = PARTS[name]
    changed = {**PARTS, name: value + 1 if isinstance(value, int) else f"{value}x"}
    assert fingerprint(changed) != fingerprint(PARTS)
    assert fingerprint({key: part for key, part in PARTS.items() if key != name}) != fingerprint(PARTS)


def test_a_fingerprint_is_of_contents_not_of_order() -> None:
    assert fingerprint(dict(reversed(PARTS.items()))) == fingerprint(PARTS)
    assert fingerprint({"layout": 1}) != fingerprint({"layout": "1"})
    assert fingerprint({"a": "b", "c": "d"}) != fingerprint({"a": 'b","c":"d'})
    assert len(fingerprint(PARTS)) == 32


@pytest.mark.parametrize("parts", [{}, {"rate": 0.5}, {"digest": b"x"}, {"lora": None}])
def test_a_fingerprint_of_what_has_no_one_text_is_refused(parts: dict[str, str | int]) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        fingerprint(parts)


@pytest.mark.parametrize(
    "text", [ROOT.hex(), ROOT.hex().upper(), f"\n {ROOT.hex()}\n", base64.b64encode(ROOT).decode() + "\n"]
)
def test_a_root_key_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="ascii")
    path.chmod(0o600)
    assert load_root_key(path) == ROOT
    assert caplog.records == []


@pytest.mark.parametrize(
    "text",
    [
        "", "secret", ROOT.hex()[:-2], ROOT.hex() + "00", "zz" + ROOT.hex()[2:], base64.b64encode(ROOT[:16]).decode(),
        base64.b64encode(ROOT + ROOT).decode(), "\u00e9" * 64, "00 " * 21 + "0", ROOT.hex() * 100,
    ],
)  # fmt: skip
def test_a_file_with_anything_else_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TurnoutError) as refusal:
        load_root_key(path, "kvstore.root_key_file")
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert refusal.value.field == "kvstore.root_key_file"
    assert str(path) in str(refusal.value)
    assert len(text) < 6 or text not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(TurnoutError, match="cannot read"):
            load_root_key(path)


def test_a_key_that_everybody_may_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    path.write_text(ROOT.hex(), encoding="ascii")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load_root_key(path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert ROOT.hex() not in caplog.text


def test_a_new_key_is_random_private_and_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = write_root_key(path)
    assert load_root_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert write_root_key(tmp_path / "other") != key
    with pytest.raises(FileExistsError):
        write_root_key(path)
    assert load_root_key(path) == key
