"""Who reads all of Redis without the root key can neither read a value nor confirm a guessed prompt."""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.admin import StoreAdmin
from kvstore.keys import Chain, Keyring, redis_key
from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from kvstore.tenants.registry import Prefix
from tests.kvstore.acceptance.workers import CHUNK, PARTS, Worker, prompt_of, working
from tests.kvstore.prefixes import ROOT, config
from tests.kvstore.servers import RedisProcess, redis_server
from turnout.types import Namespace, Sharing

TENANTS = {"alice-of-ours": "a", "bob-of-ours": "b"}
PUBLIC_TEXT = "You are a helpful assistant of the house of tests."
PAGE = 16  # bytes of KV that do not come together by chance


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_server(tmp_path / "r", restricted=True) as running:
        yield running


@pytest.fixture
def client(process: RedisProcess) -> Iterator[RedisStore]:
    store = RedisStore(parse_url(process.url))
    try:
        yield store
    finally:
        store.close()


def dump(process: RedisProcess) -> dict[bytes, bytes]:
    """Every key, and everything that lies under it, as one text of bytes."""
    client = process.client()
    found = {}
    for key in client.scan_iter(count=1000):
        kind = client.type(key)
        read: dict[bytes, Callable[[Any], Any]] = {
            b"string": client.get,
            b"hash": lambda each: sum(client.hgetall(each).items(), ()),
            b"zset": lambda each: client.zrange(each, 0, -1),
            b"set": client.smembers,
            b"list": lambda each: client.lrange(each, 0, -1),
        }
        held = read[kind](key)
        found[key] = held if isinstance(held, bytes) else b"\0".join(held)
    client.close()
    return found


def everything(dumped: dict[bytes, bytes]) -> bytes:
    return b"\0".join([*dumped, *dumped.values()])


def spellings(secret: bytes) -> list[bytes]:
    """A digest as it could be written down."""
    return [secret, secret[:16], secret.hex().encode(), *(
        encode(secret).rstrip(b"=")[:20] for encode in (base64.b64encode, base64.urlsafe_b64encode)
    )]  # fmt: skip


def spelled_tokens(tokens: list[int]) -> list[bytes]:
    """Runs of token ids as they could be written down."""
    runs = [tokens[start : start + 6] for start in range(0, len(tokens) - 6, 3)]
    return [
        spelling
        for run in runs
        for spelling in (
            array("I", run).tobytes(), array("q", run).tobytes(), array("H", run).tobytes(), bytes(run),
            ",".join(map(str, run)).encode(), ", ".join(map(str, run)).encode(), " ".join(map(str, run)).encode(),
        )
    ]  # fmt: skip


def guesses(worker: Worker, prompt: list[int], tenant: str) -> list[bytes]:
    """Digests that a guesser would make, who knows everything but the root key: the code, the model, the tenant."""
    namespace, model = Namespace("private", tenant), worker.store.encodings.fingerprint
    found: list[bytes] = []
    for key in (b"", bytes(32), model, namespace.key, hashlib.sha256(namespace.key).digest()):
        digest = bytes(32)
        for start in range(0, len(prompt) - CHUNK + 1, CHUNK):
            packed = array("I", prompt[start : start + CHUNK]).tobytes()
            message = digest + model + CHUNK.to_bytes(4, "little") + packed
            found += [hashlib.sha256(packed).digest(), hashlib.sha256(message).digest()]
            digest = hmac.digest(key, message, "sha256")
            found.append(digest)
    for root in (bytes(32), b"\xff" * 32, model):
        chain = Chain(Keyring(root), model, CHUNK, Sharing(namespace))
        found += [link.digest for link in chain.links(prompt, len(prompt) // CHUNK)]
    return found


def chunks_of(worker: Worker, prompt: list[int], tenant: str) -> list[torch.Tensor]:
    """The KV of a prompt's chunks, as it lies in the pool."""
    seq = worker.sequence(prompt, tenant)
    blocks = worker.model._table(seq).match_prefix()
    worker.model.release(seq)
    kv = worker.model.store.read_blocks(blocks, 4)
    return [kv[:, start : start + CHUNK] for start in range(0, kv.shape[1] - CHUNK + 1, CHUNK)]


def pages_of(chunks: list[torch.Tensor]) -> list[bytes]:
    """Pieces of KV that would stand somewhere if any of it were readable."""
    whole = [chunk[layer].contiguous().numpy().tobytes() for chunk in chunks for layer in range(chunk.shape[0])]
    return [content[start : start + PAGE] for content in whole for start in range(0, len(content) - PAGE, 61)]


def seen(secrets: list[bytes], dumped: bytes) -> int:
    """How many of the secrets stand in what was dumped."""
    return sum(secret in dumped for secret in secrets)


async def test_nothing_of_a_run_can_be_read(process: RedisProcess, client: RedisStore) -> None:
    prompts = {tenant: prompt_of(4 * CHUNK + 1, start) for start, tenant in enumerate(TENANTS)}
    StoreAdmin(config(), client, Keyring(ROOT)).register(
        Prefix("house", "public", "house", {"t": tuple(prompt_of(2 * CHUNK, 9))}, PUBLIC_TEXT)
    )
    async with working(client) as worker:
        for tenant, prompt in prompts.items():
            await worker.answer(prompt, tenant)
            await worker.answer([*prompt_of(2 * CHUNK, 9), *prompt], tenant)
        await worker.settle()
        secrets = {
            "tokens": [each for prompt in prompts.values() for each in spelled_tokens(prompt)],
            "guessed digests": [
                spelling
                for tenant, prompt in prompts.items()
                for digest in guesses(worker, prompt, tenant)
                for spelling in spellings(digest)
            ],
            "names": [*(tenant.encode() for tenant in TENANTS), PUBLIC_TEXT[:12].encode(), b"house"],
            "pages": [
                page for tenant, prompt in prompts.items() for page in pages_of(chunks_of(worker, prompt, tenant))
            ],
            "root key": spellings(ROOT),
        }
        dumped = dump(process)
        values = [key for key in dumped if key.count(b":") == 5]
        assert len(values) >= 12
        assert {name: seen(each, everything(dumped)) for name, each in secrets.items()} == dict.fromkeys(secrets, 0)
        assert min(map(len, secrets.values())) >= 4
        contents = b"".join(dumped[key][96:] for key in values)
        assert len(zlib.compress(contents, 9)) > 0.99 * len(contents)
        _who_holds_the_key_sees_it_all(worker, prompts, dumped)
        _what_is_looked_for_would_be_seen(secrets, dumped)


def _who_holds_the_key_sees_it_all(worker: Worker, prompts: dict[str, list[int]], dumped: dict[bytes, bytes]) -> None:
    encodings = worker.store.encodings
    for tenant, prompt in prompts.items():
        links = Chain(Keyring(ROOT), encodings.fingerprint, CHUNK, Sharing.private(tenant)).links(prompt, 4)
        assert all(
            redis_key(Keyring(ROOT), encodings.fingerprint, link, encodings.all[0].name, 0) in dumped for link in links
        )


def _what_is_looked_for_would_be_seen(secrets: dict[str, list[bytes]], dumped: dict[bytes, bytes]) -> None:
    for name, each in secrets.items():
        careless = {**dumped, b"to1:x": b"before " + each[len(each) // 2] + b" after"}
        assert seen(each, everything(careless)), name


async def test_equal_prompts_of_two_tenants_have_nothing_in_common(process: RedisProcess, client: RedisStore) -> None:
    """So a reader cannot tell that two tenants asked the same."""
    prompt = prompt_of(4 * CHUNK + 1)
    async with working(client) as worker:
        halves = []
        for tenant in TENANTS:
            before = dump(process)
            await worker.answer(prompt, tenant)
            await worker.settle()
            halves.append({key: value for key, value in dump(process).items() if key not in before})
    of_values = [{k: v for k, v in half.items() if k.count(b":") == 5} for half in halves]
    assert [len(half) for half in of_values] == [4, 4]
    digests = [{key.rpartition(b":")[2] for key in half} for half in of_values]
    assert not digests[0] & digests[1]
    pieces = [
        {value[start : start + PAGE] for value in half.values() for start in range(96, len(value) - PAGE)}
        for half in of_values
    ]
    assert not pieces[0] & pieces[1]


async def test_the_same_chunk_stored_again_looks_different(process: RedisProcess, client: RedisStore) -> None:
    """A nonce of its own for every value: a reader cannot tell that a value came back."""
    prompt = prompt_of(CHUNK + 1)
    seen_values = []
    for _ in range(2):
        async with working(client, parts=PARTS) as worker:
            await worker.answer(prompt)
            await worker.settle()
            [(key, value)] = [(k, v) for k, v in dump(process).items() if k.count(b":") == 5]
            seen_values.append(value)
            connected = process.client()
            connected.delete(key)
            connected.close()
    assert seen_values[0][96:] != seen_values[1][96:]
    assert len(seen_values[0]) == len(seen_values[1])
