"""Models of a hub: what is downloaded, once; what is refused, in one line; what a cache alone can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from tests.checkpoint_folders import write_checkpoint
from tests.hub_server import Hub, own_caches, point_at, running
from turnout.errors import Code, TurnoutError
from turnout.hub_models import Snapshot
from turnout.model_fetching import fetch_model, find_model, pin_model
from turnout.model_location import HubRepository

FIELD = "models.m.path"
PATH = "hf:tiny/pair@main"
OTHERS = {
    "modeling_tiny.py": b"raise SystemExit",
    "README.md": b"# tiny",
    "tf_model.h5": b"h5",
    "flax_model.msgpack": b"flax",
    "pytorch_model.bin": b"pickled",
    "onnx/model.onnx": b"onnx",
    "original/tokenizer.model": b"original",
    "model.fp16.safetensors": b"variant",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Caches of this test's own; the function makes this process forget what it fetched."""
    return own_caches(tmp_path, monkeypatch)


@pytest.fixture
def hub(own_cache: Callable[[], None], files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running() as hub:
        point_at(hub, monkeypatch)
        hub.push("tiny/pair", files | OTHERS)
        yield hub


def refusal(path: str = PATH) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        fetch_model(path, FIELD)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(f"{FIELD}: ")
    return caught.value


def test_only_what_is_needed_is_downloaded_and_only_once(
    hub: Hub, files: dict[str, bytes], own_cache: Callable[[], None]
) -> None:
    commit = hub.repositories["tiny/pair"]["main"]
    assert find_model(PATH).path is None
    folder = fetch_model(PATH, FIELD)
    assert folder.name == commit
    assert {path.name: path.read_bytes() for path in folder.rglob("*")} == files
    assert pin_model(PATH) == f"hf:tiny/pair@{commit}"
    before = hub.requests.copy()
    own_cache()
    assert fetch_model(PATH, FIELD) == find_model(PATH).path == folder
    assert hub.requests - before == {"info": 1}  # what main is by now
    assert fetch_model(f"hf:tiny/pair@{commit}", FIELD) == folder
    assert hub.requests - before == {"info": 1}


def test_the_description_comes_without_the_weights(hub: Hub) -> None:
    folder = fetch_model(PATH, FIELD, weights=False)
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))
    found = find_model(PATH)
    assert (found.path, found.lacking) == (None, ("model.safetensors",))
    assert find_model(PATH, weights=False).path == folder


def test_a_moved_branch_is_another_folder_in_the_next_process_only(
    hub: Hub, files: dict[str, bytes], own_cache: Callable[[], None]
) -> None:
    first = fetch_model(PATH, FIELD)
    commit = hub.push("tiny/pair", files | {"generation_config.json": b'{"eos_token_id": 3}'})
    assert fetch_model(PATH, FIELD) == first
    own_cache()
    assert fetch_model(PATH, FIELD).name == commit != first.name


def test_shards_are_those_of_the_index(hub: Hub, files: dict[str, bytes]) -> None:
    whole = {name: data for name, data in files.items() if name != "model.safetensors"}
    index = b'{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}'
    parts = {f"part-{each}.safetensors": files["model.safetensors"] for each in (1, 2, 3)}
    hub.push("tiny/parts", whole | parts | {"model.safetensors.index.json": index})
    folder = fetch_model("hf:tiny/parts", FIELD)
    assert {path.name for path in folder.glob("part-*")} == {"part-1.safetensors", "part-2.safetensors"}
    hub.push("tiny/short", whole | {"model.safetensors.index.json": index})
    assert "hf:tiny/short lacks part-1.safetensors, part-2.safetensors, which model" in refusal("hf:tiny/short").message


def test_pickled_weights_are_taken_where_there_are_no_others(hub: Hub, files: dict[str, bytes]) -> None:
    hub.push("tiny/old", {name: data for name, data in (files | OTHERS).items() if name != "model.safetensors"})
    folder = fetch_model("hf:tiny/old", FIELD)
    assert (folder / "pytorch_model.bin").read_bytes() == b"pickled"


def test_one_file_of_a_repository(hub: Hub) -> None:
    hub.push("tiny/packed", {"q4.gguf": b"GGUF 4", "q8.gguf": b"GGUF 8", "README.md": b""})
    assert fetch_model("hf:tiny/packed/q8.gguf@main", FIELD).read_bytes() == b"GGUF 8"
    assert hub.requests["GET q4.gguf"] == 0
    assert "GGUF files there: q4.gguf, q8.gguf" in refusal("hf:tiny/packed/q2.gguf").message
    assert "it holds GGUF files: name one of q4.gguf, q8.gguf in the path" in refusal("hf:tiny/packed").message


def test_a_gguf_file_of_a_repository_comes_with_its_other_shards(hub: Hub) -> None:
    shards = [f"q8-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.push("tiny/packed", {shards[0]: b"GGUF 1", shards[1]: b"GGUF 2"})
    path = f"hf:tiny/packed/{shards[1]}"
    found = fetch_model(path, FIELD)
    assert [found.with_name(name).read_bytes() for name in shards] == [b"GGUF 1", b"GGUF 2"]
    found.with_name(shards[0]).unlink()
    assert find_model(path, FIELD).lacking == (shards[0],)
    hub.push("tiny/half", {shards[1]: b"GGUF 2"})
    assert f"there is no file {shards[0]}" in refusal(f"hf:tiny/half/{shards[1]}").message


def test_a_broken_connection_is_taken_up_where_it_broke(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)
    large = files | {"model.safetensors": files["model.safetensors"] + bytes(1 << 16)}
    hub.push("tiny/pair", large)
    hub.cut["model.safetensors"] = 1 << 15
    folder = fetch_model(PATH, FIELD)
    assert (folder / "model.safetensors").read_bytes() == large["model.safetensors"]
    assert hub.ranges == [f"model.safetensors {1 << 15}"]


def test_an_interrupted_download_is_completed(hub: Hub, files: dict[str, bytes], own_cache: Callable[[], None]) -> None:
    folder = fetch_model(PATH, FIELD)
    (folder / "model.safetensors").resolve().unlink()
    (folder / "tokenizer.json").resolve().write_bytes(b"{")
    assert find_model(PATH).lacking == ("tokenizer.json", "model.safetensors")
    before = hub.requests.copy()
    own_cache()
    assert fetch_model(PATH, FIELD) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    fetched = hub.requests - before
    assert {name for name in fetched if name.startswith("GET")} == {"GET model.safetensors", "GET tokenizer.json"}


def test_a_gated_repository_says_where_tokens_are_taken_from(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("tiny/pair")
    error = refusal()
    assert error.code is Code.PERMISSION_DENIED
    assert "refuses access to tiny/pair (403), and no token was found: accept its terms" in error.message
    assert "HF_TOKEN, the file of HF_TOKEN_PATH, or `hf auth login`" in error.message
    monkeypatch.setenv("HF_TOKEN", "hf_of_mine")
    assert "the token that was sent does not suffice" in refusal().message
    assert "Bearer hf_of_mine" in hub.tokens


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    error = refusal("hf:tiny/none")
    assert error.code is Code.NOT_FOUND
    assert f"no repository tiny/none at {hub.url}, or it is private" in error.message


def test_a_revision_that_is_not_there(hub: Hub) -> None:
    assert f"tiny/pair has no revision 'v9' at {hub.url}: name a branch" in refusal("hf:tiny/pair@v9").message


def test_bytes_that_are_not_those_announced(hub: Hub, files: dict[str, bytes], own_cache: Callable[[], None]) -> None:
    data = files["model.safetensors"]
    hub.sent["model.safetensors"] = data[:-1] + b"?"
    assert "model.safetensors has the SHA-256" in refusal().message
    assert find_model(PATH).lacking == ("model.safetensors",)
    hub.sent.clear()
    own_cache()
    assert (fetch_model(PATH, FIELD) / "model.safetensors").read_bytes() == data
    hub.push("tiny/pair", files | {"config.json": files["config.json"] + b" "})
    hub.sent["config.json"] = files["config.json"] + b"\n"
    own_cache()
    assert "config.json has the git hash" in refusal().message


def test_names_that_lead_out_of_the_folder_are_not_there() -> None:
    names = ["config.json", "a/b.gguf", "../x.gguf", "a/../../x.gguf", "/x.gguf"]
    listing: list[Any] = [SimpleNamespace(path=name, size=1) for name in names]
    assert list(Snapshot(HubRepository("tiny/pair"), "0" * 40, listing, FIELD).sizes) == names[:2]


def test_a_disk_without_room(hub: Hub) -> None:
    hub.announced["model.safetensors"] = 10**18
    error = refusal()
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert "hf:tiny/pair@main: 1.0 EB are to be downloaded, and the disk of " in error.message
    assert hub.requests["GET model.safetensors"] == 0


def test_a_hub_that_is_gone(
    files: dict[str, bytes], own_cache: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as hub:
        point_at(hub, monkeypatch)
        hub.push("tiny/pair", files)
        folder = fetch_model(PATH, FIELD)
        hub.push("tiny/other", files)
        fetch_model("hf:tiny/other", FIELD, weights=False)
    own_cache()
    assert fetch_model(PATH, FIELD) == folder
    message = refusal("hf:tiny/none").message
    assert f"hf:tiny/none: this machine lacks its files, and {hub.url} cannot be reached: ConnectError" in message
    message = refusal("hf:tiny/other").message
    assert f"lacks model.safetensors (16 B), and {hub.url} cannot be reached: ConnectError" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    own_cache()
    assert fetch_model(PATH, FIELD) == folder
    message = refusal("hf:tiny/other").message
    assert "hf:tiny/other: this machine lacks model.safetensors (" in message
    assert "HF_HUB_OFFLINE is set; `turnout models pull hf:tiny/other` fetches it" in message
