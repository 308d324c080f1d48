"""GGUF files: refused in a line where they are not whole or not supported; described once, and anew when changed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import platformdirs
import pytest
from tokenizers import Tokenizer

from tests.gguf_models import write_gguf
from training.random_models import llama_config, random_model
from turnout import gguf_files
from turnout.config import check_resources, parse_config
from turnout.errors import Code, TurnoutError
from turnout.gguf_files import described, index_of, shard_names
from turnout.gguf_files.tokenizer import SPLITS

FIELD = "models.large.path"
MODEL = random_model(llama_config(num_hidden_layers=1), seed=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: folder)
    return folder / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", MODEL)


def refusal(path: Path) -> str:
    """The one line that refuses a path, without the field at its start."""
    pools = {"p": {"large": "large", "default": {"name": "plain"}}}
    with pytest.raises(TurnoutError) as caught:
        check_resources(parse_config({"models": {"large": {"path": str(path)}}, "pools": pools}))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, FIELD)
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix(f"{FIELD}: ")


def test_a_file_and_a_folder_with_it_are_one_model(file: Path, cache: Path) -> None:
    folder = described(file)
    assert folder == described(file.parent)
    assert folder.parent == cache
    assert described(folder) == folder
    pools = {"p": {"large": "large", "default": {"name": "plain"}}}
    check_resources(parse_config({"models": {"large": {"path": str(file)}}, "pools": pools}))
    blob = file.rename(file.with_name("sha256-0a1b"))  # other programs name them so
    assert index_of(described(blob)) == index_of(folder)


def test_a_changed_file_is_described_anew(file: Path, cache: Path) -> None:
    one = described(file)
    write_gguf(file, MODEL, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    two = described(file)
    assert one != two
    rope = json.loads((two / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert sorted(cache.iterdir()) == sorted([one, two]), "nothing half-written is left"


def test_a_file_written_over_with_its_old_time_is_described_anew(file: Path) -> None:
    one, before = described(file), file.stat()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert described(file) != one


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {"rope_type": "default"}),
    ],
)
def test_rope_is_scaled_as_llama_cpp_scales_it(metadata: dict[str, Any], rope: dict[str, Any], file: Path) -> None:
    write_gguf(file, MODEL, metadata={f"llama.{key}": value for key, value in metadata.items()})
    found = json.loads((described(file) / "config.json").read_text())["rope_parameters"]
    assert found == {"rope_theta": 10000.0, **rope}


def test_a_cache_that_cannot_be_written_is_replaced(file: Path, cache: Path) -> None:
    cache.write_text("a file")
    folder = described(file)
    assert (folder / "config.json").is_file()
    assert folder == described(file)
    assert cache not in folder.parents


def test_several_models_in_a_folder_are_listed(file: Path) -> None:
    shutil.copy(file, file.with_name("other.gguf"))
    says = f"{file.parent} holds several GGUF models; name the file of one of them: model.gguf, other.gguf"
    assert refusal(file.parent) == says


def split(file: Path, folder: Path) -> list[Path]:
    """The model in two files, the first with all metadata, as llama-gguf-split writes them."""
    reader, found = gguf.GGUFReader(file), []
    for number, tensors in enumerate((reader.tensors[:3], reader.tensors[3:])):
        found.append(folder / f"big-{number + 1:05d}-of-00002.gguf")
        writer = gguf.GGUFWriter(found[-1], "llama")
        for name, each in reader.fields.items():
            if number == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                inner = each.types[-1] if each.types[0] is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, each.contents(), each.types[0], inner)
        for each in tensors:
            writer.add_tensor(each.name, numpy.array(each.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return found


def test_shards_are_one_model_and_none_may_lack(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    first, second = split(file, folder)
    described_folder = described(second)
    assert described_folder == described(folder) == described(first)
    whole, parts = index_of(described(file)), index_of(described_folder)
    assert whole is not None
    assert parts is not None
    assert whole.keys() == parts.keys()
    assert {each.file for each in parts.values()} == {0, 1}
    second.unlink()
    assert refusal(folder) == f"{folder} lacks {second.name}, which {first.name} belongs to"


@pytest.mark.parametrize("name", ["x-00001-of-00000.gguf", "x-00003-of-00002.gguf", "x-00000-of-00002.gguf"])
def test_a_number_that_no_shard_has_is_a_part_of_a_name(name: str, file: Path) -> None:
    assert shard_names(name) == [name]
    assert described(file.rename(file.with_name(name)).parent) == described(file.with_name(name))


def cut(size: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:size])

    return change


def starting(start: bytes) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_bytes(start + file.read_bytes()[len(start) :])

    return change


def written(**changed: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        write_gguf(file, MODEL, **changed)

    return change


def of_type(number: int) -> Callable[[Path], None]:
    """The first tensor, float32, named to be of another type."""

    def change(file: Path) -> None:
        data, reader = file.read_bytes(), gguf.GGUFReader(file)
        place = reader.tensors[0].field.offset + 8 + len(reader.tensors[0].name) + 4 + 16
        file.write_bytes(data[:place] + number.to_bytes(4, "little") + data[place + 4 :])

    return change


def header(tensors: int, values: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + struct.pack("<Q", 1) + b"t" + rest


FAULTS = {
    "lists of lists of lists": (
        starting(header(0, 1, struct.pack("<I", 9) + 3000 * struct.pack("<IQ", 9, 1))),
        " has a header that is not valid GGUF: maximum recursion depth exceeded",
    ),
    "a tensor of many dimensions": (
        starting(header(1, 0, struct.pack("<I", 20000) + 20000 * struct.pack("<Q", 1 << 63))),
        " has a header that is not valid GGUF: t has 20000 dimensions",
    ),
    "a text for a number": (
        written(metadata={"llama.embedding_length": "many"}),
        ": its metadata has values that cannot be used (TypeError: ",
    ),
    "OLMo 3, which is named as OLMo 2": (
        written(architecture="olmo2", metadata={"olmo2.attention.sliding_window": 4096.0}),
        ": OLMo 3 (olmo2.attention.sliding_window) is not supported in a GGUF file",
    ),
    "another file": (starting(b"GGML"), " is not a GGUF file: it does not start with GGUF"),
    "empty": (cut(0), " is not a GGUF file: it does not start with GGUF"),
    "big-endian": (starting(b"GGUF\0\0\0\3"), " is a big-endian GGUF file; only little-endian ones are supported"),
    "an old version": (starting(b"GGUF\1\0\0\0"), " is GGUF version 1; supported: 2, 3"),
    "nothing but a start": (cut(10), " is cut off in its header; copy it again"),
    "half a header": (cut(900), " is cut off in its header; copy it again"),
    "a huge number of keys": (starting(b"GGUF\3\0\0\0" + b"\1" + 7 * b"\0" + 8 * b"\xee"), " is cut off in its header"),
    "half of the tensors": (cut(200_000), " bytes of its tensors; copy it again"),
    "another architecture": (
        written(architecture="mamba"),
        ": general.architecture 'mamba' is not supported; supported: gemma2, gemma3, llama, olmo2, phi3, qwen2, qwen3,",
    ),
    "no tokenizer": (written(tokenizer=None), ": its metadata lacks tokenizer.ggml.model"),
    "another tokenizer": (
        written(tokenizer={"kind": "rwkv"}),
        ": tokenizer.ggml.model 'rwkv' is not supported; supported: gpt2, llama",
    ),
    "an unknown way to cut text": (written(tokenizer={"pre": "new"}), ": tokenizer.ggml.pre 'new' is not supported; "),
    "longrope": (
        written(metadata={"llama.rope.scaling.type": "longrope"}),
        ": rope.scaling.type 'longrope' is not supported; supported: none, linear, yarn",
    ),
    "a type that is not read": (of_type(34), "is stored as TQ1_0, which is not supported; supported: F32, F16, BF16, "),
    "a type that is unknown": (of_type(99), "is stored as type 99, which is not supported; supported: F32, F16, BF16"),
}


@pytest.mark.parametrize(("change", "says"), FAULTS.values(), ids=FAULTS)
def test_a_file_at_fault_is_refused_in_a_line(
    file: Path, cache: Path, change: Callable[[Path], None], says: str
) -> None:
    change(file)
    message = refusal(file)
    assert says in message
    assert message.startswith(str(file))
    assert list(cache.iterdir()) == []


def test_sentencepiece_merges_follow_scores() -> None:
    """By hand: of ▁a, ab, abb the best is joined first; bytes stand for what has no token."""
    tokens = ["<unk>", "<s>", "<0xC3>", "<0xA4>", "▁", "a", "b", "ab", "▁a", "abb"]
    types = [2, 3, 6, 6, 1, 1, 1, 1, 1, 1]
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0, 0, 0, 0, -1, -1, -1, -2, -3, -1.5],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    header = gguf_files.Header(values, {})
    made = gguf_files.tokenizer_of(gguf_files.Metadata(header, [Path("x.gguf")], "path"))
    assert made["model"]["merges"] == [["ab", "b"], ["a", "b"], ["▁", "a"]]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    assert tokenizer.encode("abb").ids == [1, 4, 9], "begin of text, prefix, a and b joined before the space and a"
    assert tokenizer.encode("ä a").ids == [1, 4, 2, 3, 8]
    assert tokenizer.decode([1, 4, 2, 3, 8]) == "ä a"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġ", "Ġok"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġ", "Ġok"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġok"]),
        ("gpt-4o", ["It's", "Ġ", "123", "4", "Ġ", "Ġok"]),
    ],
)
def test_text_is_cut_as_the_model_cuts_it(pre: str, pieces: list[str], file: Path) -> None:
    write_gguf(file, MODEL, tokenizer={"pre": pre})
    made = Tokenizer.from_file(str(described(file) / "tokenizer.json"))
    assert [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("It's 1234  ok")] == pieces
    assert pre in SPLITS
