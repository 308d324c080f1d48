"""Files and batches as OpenAI's own client uses them, over the service and without a cluster."""

from __future__ import annotations

import asyncio
import codecs
import errno
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import httpx
import openai
import pytest

from deployments.batches.runner import AT_ONCE
from deployments.batches.store import BatchStore
from deployments.bodies import MOST_SLOW, Bodies
from tests.batches.house import House, begin, content, ended, jsonl, line
from tests.deployments.test_metrics import values
from turnout.calls import GenerateCall


async def test_a_batch_is_answered_line_by_line_in_order(house: House) -> None:
    client = house.client()
    batch = await begin(client, jsonl(line(f"id-{n}") for n in range(40)), metadata={"of": "mine"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"of": "mine"})
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (40, 40, 0)
    rows = await content(client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"id-{n}" for n in range(40)]
    assert {row["response"]["body"]["choices"][0]["text"] for row in rows} == {"aba"}
    assert batch.error_file_id is None
    assert batch.usage.output_tokens == 120
    assert batch.usage.model_extra == {"turnout": {"flops": 400.0, "flops_large_only": 800.0}}
    assert batch.created_at <= batch.in_progress_at <= batch.completed_at < batch.expires_at


async def test_files_with_byte_order_marks_are_read_and_lines_are_one_line(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "a\u2028b\u2029c\u0085d"
    monkeypatch.setattr("tests.deployments.fake_pool.TOOL_CALL", said)
    client = house.client()
    # Joined files have a mark each.
    asked = [jsonl([line(name, "tool", max_tokens=len(said), top_k=-1)]) for name in ("a\u2028", "b")]
    uploaded = b"".join(codecs.BOM_UTF8 + each for each in asked)
    batch = await ended(client, (await begin(client, uploaded)).id)
    assert (batch.status, batch.request_counts.completed, batch.errors) == ("completed", 2, None)
    written = (await client.files.content(batch.output_file_id)).content
    rows = [json.loads(each) for each in written.decode().splitlines()]
    assert [row["custom_id"] for row in rows] == ["a\u2028", "b"]
    assert [row["response"]["body"]["choices"][0]["text"] for row in rows] == [said, said]
    assert (await client.files.content(batch.input_file_id)).content == uploaded


async def test_how_far_batches_are_is_told_until_they_end(house: House) -> None:
    client = house.client()
    # Eight are asked at once; those that wait do so until the batch is cancelled.
    good = [line(f"id-{n}", "fast" if n < 8 else "wait") for n in range(20)]

    def told() -> dict[str, float]:
        lines = values(house.service.metrics)["turnout_batch_lines"]
        return {state: count for (state,), count in lines.items()}

    assert told() == {"waiting": 0, "running": 0, "done": 0, "failed": 0}
    batch = await begin(client, jsonl([*good, {"custom_id": "bad"}]))
    async with asyncio.timeout(60):
        while told() != {"waiting": 4, "running": 8, "done": 8, "failed": 1}:
            await asyncio.sleep(0.02)
    await client.batches.cancel(batch.id)
    async with asyncio.timeout(60):
        while any(told().values()):
            await asyncio.sleep(0.02)


async def test_calls_of_a_batch_are_its_tenants_and_give_way(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GenerateCall] = []
    original = house.pool.generate

    def generate(call: GenerateCall) -> Any:
        seen.append(call)
        return original(call)

    monkeypatch.setattr(house.pool, "generate", generate)
    client = house.client("acme")
    batch = await begin(client, jsonl([line("a"), line("b", seed=5)]))
    await ended(client, batch.id)
    assert {(call.tenant, call.key_id, call.priority, call.batch_id) for call in seen} == {
        ("acme", "k", "batch", batch.id)
    }
    # Not those of a request that somebody waits for: such a line would be begun anew until the batch ends.
    assert min(call.deadline_s or 0.0 for call in seen) > 86000.0
    assert 5 in {call.sampling.seed for call in seen}


async def test_a_full_disk_under_an_upload_is_named(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file lies in a temporary folder until all of it has come."""

    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = jsonl(line(f"id-{n}", "x" * 1000) for n in range(2000))
    client = house.client()
    with monkeypatch.context() as patched:
        patched.setattr(SpooledTemporaryFile, "rollover", full)
        with pytest.raises(
            openai.APIStatusError, match="the temporary folder for uploads: the disk is full"
        ) as refused:
            await client.with_options(max_retries=0).files.create(file=("in.jsonl", data), purpose="batch")
    assert refused.value.status_code == 503
    assert (await client.files.create(file=("in.jsonl", data), purpose="batch")).bytes == len(data)


async def test_bad_lines_are_named_by_number_and_the_others_are_served(house: House) -> None:
    client = house.client()
    lines = jsonl(
        [
            line("good"),
            "{not json",
            {**line("other"), "url": "/v1/embeddings"},
            line("good"),
            {"method": "POST", "url": "/v1/completions", "body": {}},
            line("too much", max_tokens=-1),
            line("streamed", stream=True),
            line("also good"),
        ]
    )
    batch = await ended(client, (await begin(client, lines)).id)
    assert batch.status == "completed"
    assert [row["custom_id"] for row in await content(client, batch.output_file_id)] == ["good", "also good"]
    errors = await content(client, batch.error_file_id)
    told = {row["error"]["line"]: row["error"]["message"] for row in errors if row["error"]}
    assert sorted(told) == [2, 3, 4, 5, 7]
    assert "line 2: body: is malformed JSON" in told[2]
    assert "must be /v1/completions" in told[3]
    assert "is that of an earlier line" in told[4]
    [refused] = [row for row in errors if row["response"]]
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("too much", 400)
    assert refused["response"]["body"]["error"]["param"] == "max_tokens"
    assert [each.line for each in batch.errors.data] == [2, 3, 4, 5, 7]
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (8, 2, 6)


@pytest.mark.parametrize("lines", [b"\n\n", b"{}\n", b"\xff\xfe\n"])
async def test_a_file_without_a_request_fails(house: House, lines: bytes) -> None:
    client = house.client()
    batch = await ended(client, (await begin(client, lines)).id)
    assert batch.status == "failed"
    assert batch.errors.data


async def test_a_batch_beyond_the_servers_limit_fails(tmp_path: Path) -> None:
    async with House(tmp_path, max_requests=3).open() as house:
        client = house.client()
        batch = await ended(client, (await begin(client, jsonl(line(str(n)) for n in range(4)))).id)
        assert (batch.status, batch.errors.data[-1].code) == ("failed", "too_many_requests")


async def test_a_cancelled_batch_does_not_wait_for_its_lines_and_keeps_what_was_done(house: House) -> None:
    client = house.client()
    lines = jsonl([*(line(f"quick-{n}") for n in range(8)), *(line(f"w{n}", "wait") for n in range(50))])
    batch = await begin(client, lines)
    while (await client.batches.retrieve(batch.id)).request_counts.completed < 8:
        await asyncio.sleep(0.02)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    assert len(await content(client, batch.output_file_id)) == 8
    assert house.pool.places.num_held == 0
    with pytest.raises(openai.BadRequestError, match="has ended"):
        await client.batches.cancel(batch.id)


async def test_a_restarted_server_goes_on_and_answers_no_line_twice(tmp_path: Path) -> None:
    asked: list[str] = []
    lines = jsonl(line(f"id-{n}", "slow", max_tokens=2) for n in range(30))
    async with House(tmp_path, concurrency=4).open() as house:
        client = house.client()
        batch = await begin(client, lines)
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 4:
            await asyncio.sleep(0.02)
    async with House(tmp_path, concurrency=30).open() as house:
        original = house.pool.generate

        def generate(call: GenerateCall) -> Any:
            asked.append(call.request_id)
            return original(call)

        house.pool.generate = generate  # type: ignore[method-assign]
        client = house.client()
        batch = await ended(client, batch.id)
        rows = await content(client, batch.output_file_id)
    assert batch.status == "completed"
    assert [row["custom_id"] for row in rows] == [f"id-{n}" for n in range(30)]
    assert len(asked) == len(set(asked)) <= 26
    assert batch.usage.output_tokens == 60


async def test_a_batch_whose_input_is_gone_fails_and_keeps_what_was_answered(tmp_path: Path) -> None:
    async with House(tmp_path, concurrency=4).open() as house:
        client = house.client()
        batch = await begin(client, jsonl([line("quick"), line("never", "wait")]))
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            await asyncio.sleep(0.02)
    [data] = (tmp_path / "batches").glob("*/files/*.data")
    data.unlink()
    async with House(tmp_path, concurrency=4).open() as house:
        client = house.client()
        batch = await ended(client, batch.id)
        assert (batch.status, batch.errors.data[-1].code) == ("failed", "unreadable")
        assert [row["custom_id"] for row in await content(client, batch.output_file_id)] == ["quick"]


async def test_of_many_batches_the_oldest_go_first_and_a_cancelled_one_ends(tmp_path: Path) -> None:
    async with House(tmp_path, max_batches=6).open() as house:
        client, other = house.client(), house.client("other")
        batches = [await begin(client, jsonl([line("a", "wait")])) for _ in range(6)]
        with pytest.raises(openai.RateLimitError, match="have not ended"):
            await begin(client, jsonl([line("a")]))
        assert (await ended(other, (await begin(other, jsonl([line("a")]))).id)).status == "completed"

        async def states_now() -> list[str]:
            return [(await client.batches.retrieve(each.id)).status for each in batches]

        async with asyncio.timeout(60):
            while (await states_now()).count("validating") > 2:
                await asyncio.sleep(0.02)
        assert (await ended(other, (await begin(other, jsonl([line("a")]))).id)).status == "completed"
        states = await states_now()  # the runner has looked again since, and begun no other
        assert states.count("validating") == 2
        await client.batches.cancel(batches[states.index("validating")].id)
        assert (await ended(client, batches[states.index("validating")].id)).status == "cancelled"


async def test_a_batch_of_the_same_second_does_not_begin_beside_those_that_have_been_begun(tmp_path: Path) -> None:
    async with House(tmp_path).open() as house:
        client, other = house.client(), house.client("other")
        batches = [await begin(client, jsonl([line("a", "wait")])) for _ in range(AT_ONCE)]
        async with asyncio.timeout(60):
            while {(await client.batches.retrieve(each.id)).status for each in batches} != {"in_progress"}:
                await asyncio.sleep(0.02)
        store = BatchStore(house.service.batches)
        first = min(store.unfinished(), key=lambda each: each.created_at)
        store.add_batch(first.model_copy(update={"id": f"batch_{0:024}", "status": "validating"}))
        assert store.unfinished()[0].id == f"batch_{0:024}"
        assert (await ended(other, (await begin(other, jsonl([line("a")]))).id)).status == "completed"
        assert (await client.batches.retrieve(f"batch_{0:024}")).status == "validating"


async def test_a_line_may_be_no_larger_than_a_request(house: House) -> None:
    client = house.client()
    large = line("large", "x" * house.service.max_body_bytes)
    batch = await ended(client, (await begin(client, jsonl([large, line("a")]))).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert "bytes" in batch.errors.data[0].message


async def test_two_servers_on_one_folder_work_on_a_batch_once(tmp_path: Path) -> None:
    async with House(tmp_path).open() as one, House(tmp_path).open() as two:
        client = two.client()
        batch = await ended(client, (await begin(client, jsonl(line(str(n)) for n in range(20)))).id)
        assert batch.request_counts.completed == 20
        assert len(await content(one.client(), batch.output_file_id)) == 20


async def test_what_is_a_tenants_is_nobody_elses(house: House) -> None:
    mine, theirs = house.client("acme"), house.client("other")
    batch = await begin(mine, jsonl([line("a")]))
    for ask in (
        theirs.batches.retrieve(batch.id),
        theirs.batches.cancel(batch.id),
        theirs.files.retrieve(batch.input_file_id),
        theirs.files.content(batch.input_file_id),
        theirs.files.delete(batch.input_file_id),
        theirs.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    assert (await theirs.batches.list()).data == []
    assert (await theirs.files.list()).data == []
    await ended(mine, batch.id)


async def test_files_are_listed_read_and_deleted(house: House) -> None:
    client = house.client()
    files = [await client.files.create(file=(f"{n}.jsonl", jsonl([line("a")])), purpose="batch") for n in range(5)]
    listed = [each.id async for each in client.files.list(limit=2)]
    assert sorted(listed) == sorted(each.id for each in files)
    assert (await client.files.content(files[0].id)).content == jsonl([line("a")])
    assert (await client.files.delete(files[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(files[0].id)


async def test_a_file_that_is_being_read_cannot_be_deleted(house: House) -> None:
    client = house.client()
    batch = await begin(client, jsonl([line("a", "wait")]))
    with pytest.raises(openai.BadRequestError, match="is being read"):
        await client.files.delete(batch.input_file_id)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "file-%2e%2e", "file-" + "0" * 24, "x" * 300])
async def test_no_id_leads_out_of_the_folder(house: House, name: str) -> None:
    client = house.client("../..")
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(name)


async def test_limits_of_files(tmp_path: Path) -> None:
    async with House(tmp_path, max_file_bytes=1000, max_files=2).open() as house:
        client = house.client()
        for size in (1001, 1 << 20):
            with pytest.raises(openai.BadRequestError, match="at most 1000 bytes"):
                await client.files.create(file=("a", b"x" * size), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="must not be empty"):
            await client.files.create(file=("a", b""), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("a", b"x"), purpose="fine-tune")
        for _ in range(2):
            await client.files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="delete some"):
            await client.files.create(file=("a", b"x"), purpose="batch")
        kept = list((tmp_path / "batches").glob("*/files/*"))
        assert len(kept) == 4, "what was refused has left something"


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_bodies_that_come_slowly_are_given_up_and_a_tenant_has_only_so_many(house: House, path: str) -> None:
    """They hold places of the ingress as those of generations do, and are counted with them."""
    never = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await never.wait()

    transport = httpx.ASGITransport(house.app)
    headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        house.app.state.bodies = Bodies(100, slow_s=0.0, most_s=0.05)
        late = await asyncio.wait_for(client.post(path, content=half()), 10)
        assert (late.status_code, late.json()["error"]["message"]) == (
            408,
            f"POST {path}: body: not whole after 0.05 s",
        )
        house.app.state.bodies = Bodies(100, slow_s=0.0, most_s=60.0)
        many = [asyncio.create_task(client.post(path, content=half())) for _ in range(MOST_SLOW // 2 + 1)]
        [refused], rest = await asyncio.wait(many, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert (refused.result().status_code, len(rest)) == (429, MOST_SLOW // 2)
        for each in rest:
            each.cancel()
        await asyncio.wait(rest)
    assert house.app.state.bodies.slow == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "at most 30d"),
        ({"metadata": {"a": 5}}, "metadata"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(house: House, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        await begin(house.client(), jsonl([line("a")]), **options)


async def test_without_the_section_the_endpoints_say_what_is_missing(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.service.batches = None
    from deployments.batches.http import router

    house.app.router.routes.clear()
    house.app.include_router(router(house.service, None))
    with pytest.raises(openai.NotFoundError, match="no section batches"):
        await house.client().files.list()


async def test_what_is_old_is_forgotten(tmp_path: Path) -> None:
    async with House(tmp_path, retention_s=3600.0).open() as house:
        client = house.client()
        batch = await ended(client, (await begin(client, jsonl([line("a")]))).id)
        store = BatchStore(house.service.batches)  # type: ignore[arg-type]
        store.sweep(time.time() + 1800)
        assert len((await client.files.list()).data) == 2
        store.sweep(time.time() + 7200)
        assert (await client.files.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(batch.id)
