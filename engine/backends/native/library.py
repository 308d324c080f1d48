"""Compiles the kernels for this machine, keeps the result on disk, and declares what can be called."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import platformdirs
import torch

from turnout.atomic_files import sync

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fno-math-errno", "-Wall", "-Wno-maybe-uninitialized")
COMPILE_TIMEOUT_S = 300
NEEDED = {"avx2", "f16c", "fma"}  # with AVX-512 the kernels use it
CHECKSUM_BYTES = 32  # SHA-256 at the end of a library, which the dynamic linker does not read
REMEDY = "set XDG_CACHE_HOME to a folder in which this user may write files and load libraries"


class NativeUnavailableError(Exception):
    """The kernels cannot be used here; the message says why and what would change that."""


class Matrix(ctypes.Structure):
    """A packed weight; see `panels.h`."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("units", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("blocked", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


class Batch(ctypes.Structure):
    """One forward's ragged batch; see `batch.h`."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        ("block_width", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("tree_words", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("tree_sizes", ctypes.c_void_p),
        ("tree_masks", ctypes.c_void_p),
        ("keys_read", ctypes.c_void_p),
        ("nodes", ctypes.c_int64),
        ("partial_rows", ctypes.c_int64),
        ("positions_end", ctypes.c_int64),
        ("prefixes", ctypes.c_void_p),
        ("prefix_rows", ctypes.c_void_p),
        ("leaves", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
    )


class Scores(ctypes.Structure):
    """How products become weights; 0 stands for no soft cap, no window, no chunk and no sinks."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    )


class Layer(ctypes.Structure):
    """One decoder layer's weights and cache; see `layers.h`."""

    _fields_ = (
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("before_attention", ctypes.c_void_p),
        ("before_mlp", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("scores", Scores),
        ("skips_attention", ctypes.c_bool),
        ("skips_mlp", ctypes.c_bool),
    )


class Shape(ctypes.Structure):
    """Widths that all layers of a stack share."""

    _fields_ = (
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("intermediate", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("byte_cache", ctypes.c_bool),
    )


class Space(ctypes.Structure):
    """Working memory of a forward, one row per fed token."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
    )


_BOOL, _INT, _INDEX, _ADDRESS = ctypes.c_bool, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "turnout_forward": (
        _BOOL,
        _ADDRESS,
        _INDEX,
        _INDEX,
        ctypes.POINTER(Shape),
        ctypes.POINTER(Batch),
        _ADDRESS,
        ctypes.POINTER(Space),
        _INT,
    ),
    "turnout_linear": (_BOOL, ctypes.POINTER(Matrix), _ADDRESS, _INDEX, _INDEX, _ADDRESS, _BOOL, _INT),
    "turnout_attention": (
        _BOOL,
        _BOOL,
        ctypes.POINTER(Batch),
        _ADDRESS,
        _INDEX,
        _INDEX,
        _INDEX,
        ctypes.POINTER(Scores),
        _ADDRESS,
        _ADDRESS,
        _INT,
    ),
    "turnout_norm": (_BOOL, _ADDRESS, _ADDRESS, _INDEX, _INDEX, _ADDRESS, ctypes.c_float, _ADDRESS),
}


def library() -> ctypes.CDLL:
    """The compiled kernels; compiling takes some ten seconds, once per machine and version.

    Raises:
        NativeUnavailableError: no compiler, a processor without the instructions, or a cache that cannot be used.
    """
    found = _find()
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


@cache
def _find() -> ctypes.CDLL | str:
    """The kernels, or why they cannot be used. A failure is remembered too: every try compiles for ten seconds."""
    try:
        return _load()
    except NativeUnavailableError as error:
        return str(error)
    except OSError as error:  # of /proc or of the sources
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _load() -> ctypes.CDLL:
    _check_processor()
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NativeUnavailableError("no C++ compiler found (looked for g++ and c++); install g++")
    runtime = _openmp_runtime()
    folder = _cache_folder()
    target = folder / f"kernels-{_digest(compiler, runtime)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_whole(target):
            with _alone_in(folder):
                if not _is_whole(target):
                    _compile(compiler, runtime, target)
        loaded = ctypes.CDLL(str(target))
    except OSError as error:
        message = f"their folder {folder} cannot be used: {error.strerror or error}; {REMEDY}"
        raise NativeUnavailableError(message) from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


@cache
def panel_columns() -> int:
    """Columns of a panel, in which weights are packed: two vectors of this processor.

    Raises:
        NativeUnavailableError: as `library`.
    """
    return int(library().turnout_panel())


def _check_processor() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailableError(f"written for Linux on x86-64; this is {platform.system()} {platform.machine()}")
    flags = set(_processor_flags().split())
    missing = NEEDED - flags
    if missing:
        raise NativeUnavailableError(f"the processor lacks {', '.join(sorted(missing))}")


def _processor_flags() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("flags"):
            return line.partition(":")[2]
    return ""


def _openmp_runtime() -> str:
    """The OpenMP runtime torch has loaded. A second one would bring threads of its own, fighting for the same cores."""
    torch.get_num_threads()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        path = line.split(maxsplit=5)[-1]
        if any(name in Path(path).name for name in ("libgomp", "libiomp", "libomp")):
            return path
    raise NativeUnavailableError("torch has loaded no OpenMP runtime to share threads with")


def _digest(compiler: str, runtime: str) -> str:
    """Names the build: another source, compiler, processor or runtime is another file."""
    digest = hashlib.sha256(repr((compiler, FLAGS, runtime, _processor_flags(), CHECKSUM_BYTES)).encode())
    digest.update(_version(compiler).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    try:
        command = [compiler, "--version"]
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeUnavailableError(f"the compiler {compiler} does not run: {error}") from None


def _cache_folder() -> Path:
    with suppress(RuntimeError):
        folder = platformdirs.user_cache_path("turnout") / "native"
        if folder.is_absolute():  # older versions leave a "~" that leads to no home as it is
            return folder
    raise NativeUnavailableError(f"there is no folder for them: this user has no home; {REMEDY}")


def _is_whole(target: Path) -> bool:
    """Whether a library is there and ends in its checksum.

    The dynamic linker does not look: a library that was cut off kills the process that loads it.
    """
    try:
        content = target.read_bytes()
    except FileNotFoundError:
        return False
    whole = hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() == content[-CHECKSUM_BYTES:]
    if not whole:
        log.info("%s is damaged: it is compiled again", target)
    return whole


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes that compile here waiting, which then find the result; not where files cannot be locked."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(compiler: str, runtime: str, target: Path) -> None:
    """Compile to a temporary name and move it into place: who reads it finds it whole, or not at all."""
    log.info("compiling the CPU kernels (once; kept in %s)", target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        _run([compiler, *FLAGS, "-fopenmp", "-c", str(SOURCES / "api.cpp"), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), runtime, "-o", str(linked)])
        checksum = hashlib.sha256(linked.read_bytes()).digest()
        with linked.open("ab") as file:
            file.write(checksum)
        sync(linked)
        linked.replace(target)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        raise NativeUnavailableError(f"the kernels do not compile: {lines[0] if lines else error}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"the kernels do not compile: {error}") from None
