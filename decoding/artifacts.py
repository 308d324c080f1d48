"""Trained parts on disk: one safetensors file each, which says what it is and which models it belongs to."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from turnout.access_config import TENANT_PATTERN
from turnout.atomic_files import write_whole
from turnout.errors import TurnoutError, invalid, not_found

if TYPE_CHECKING:
    from decoding.model import ModelPool

log = getLogger(__name__)
T = TypeVar("T")
Opened = Callable[[str, "Artifact", str], None]

ENTRY = "turnout_artifact"
FORMAT = 1
SUFFIX = ".safetensors"
TENANTS = "tenants"  # folder in a pool's folder of artifacts with one folder for each tenant that has its own
SAMPLED = 4096
VERSION_DIGITS = 12
TENANT_BYTES = 4 << 30  # of tenants' own files that a pool keeps in memory

ArtifactName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="which of the pool's artifacts, without .safetensors"
    ),
]


@dataclass(frozen=True, slots=True)
class Artifact:
    """Artifact: what a trainer made for models that stay as they are.

    Attributes:
        kind: which part it is for.
        trainer: module that made it.
        settings: everything but the weights that the part, or a reader, must know; plain JSON values.
        models: digest of each model it belongs to, by role.
        tensors: the weights, by name.
        networks: what was built of the weights, by class: one object for all requests, as actors keep every network
            that they are sent.
    """

    kind: str
    trainer: str
    settings: dict[str, Any]
    models: dict[str, str]
    tensors: dict[str, torch.Tensor]
    networks: dict[type, torch.nn.Module] = field(default_factory=dict, init=False, repr=False, compare=False)

    def save(self, path: Path) -> None:
        """Write the file under a temporary name and rename it: readers never see a partial file, and none is left over.

        Raises:
            OSError: it cannot be written.
        """
        about = {"kind": self.kind, "trainer": self.trainer, "settings": self.settings, "models": self.models}
        # One entry, because safetensors writes several in an order that changes from file to file.
        metadata = {ENTRY: json.dumps({"format": FORMAT, **about}, sort_keys=True, allow_nan=False)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save({name: each.contiguous() for name, each in self.tensors.items()}, metadata))

    @classmethod
    def load(cls, path: Path, where: str = "artifact") -> Artifact:
        """Read what `save` wrote.

        Args:
            path: the file.
            where: name of the field that chose it, for refusals.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it is no such file, or of another format.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError):
            raise invalid(where, f"{path.stem!r} is no readable safetensors file") from None
        try:
            about = json.loads(metadata.get(ENTRY, "{}"))
            found = about.pop("format", None)
            if found != FORMAT:
                raise invalid(where, f"{path.stem!r} has the format {found}; this version reads {FORMAT}")
            made = cls(**about, tensors=tensors)
            texts = [made.kind, made.trainer, *made.models, *made.models.values()]
            objects = (made.settings, made.models)
            if not (all(isinstance(each, dict) for each in objects) and all(isinstance(each, str) for each in texts)):
                raise TypeError("settings and models are objects, all else texts")
            return made
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise invalid(where, f"{path.stem!r} does not say what it is as artifacts do") from None

    @property
    def version(self) -> str:
        """Names what it holds: 12 hexadecimal digits, equal for equal settings, models and weights."""
        digest = hashlib.blake2b(digest_size=VERSION_DIGITS // 2)
        digest.update(json.dumps([self.kind, self.settings, self.models], sort_keys=True, default=str).encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().contiguous()
            digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def check(self, kind: str, models: ModelPool, where: str) -> None:
        """Refuse to be used for anything else than what it was made for.

        Args:
            kind: what is needed.
            models: the pool it is to be used in.
            where: name of the field that chose it.

        Raises:
            TurnoutError: INVALID_ARGUMENT: another kind, or another model in one of its roles.
        """
        if self.kind != kind:
            raise invalid(where, f"is of the kind {self.kind!r}; {kind!r} is needed")
        for role, digest in self.models.items():
            found = models.digest_of(role)
            if found != digest:
                raise invalid(
                    where, f"was made for the {role} model with digest {digest}; {models.roles[role]!r} has {found}"
                )


class Kept(Generic[T]):
    """Object made of an artifact that the configuration names: at first use, and again when the file is replaced.

    A replacement that cannot be used (gone, unreadable, of another kind, for other models, or one that `make` refuses)
    changes nothing and is logged; only the first one must fit.

    Args:
        name: the artifact's.
        kind: what it must be.
        make: from the artifact to what is worked with; raises whatever is wrong with it.
    """

    def __init__(self, name: str, kind: str, make: Callable[[Artifact], T]) -> None:
        self._name = name
        self._kind = kind
        self._make = make
        self._now: tuple[Artifact, T, str] | None = None
        self._tried: Artifact | None = None
        self._refused = ""

    def get(self, models: ModelPool, where: str) -> tuple[T, str]:
        """Return the object, and the artifact's version.

        Args:
            models: the pool's, with its artifacts.
            where: name of the field that chose the artifact.

        Raises:
            TurnoutError: nothing usable was there yet.
        """
        try:
            artifact = models.artifacts.open(self._name, self._kind, models, where)
            if self._now is None or (artifact is not self._now[0] and artifact is not self._tried):
                self._tried = artifact  # one that cannot be used is not tried again with every request
                self._now = (artifact, self._make(artifact), artifact.version)
                self._refused = ""
        except Exception as error:  # whatever the file holds, requests go on with what was there before
            refusal = error if isinstance(error, TurnoutError) else invalid(where, f"cannot be used: {error!r}")
            if self._now is None:
                raise refusal from error
            if refusal.message != self._refused:
                self._refused = refusal.message
                log.warning("%s; going on with version %s", refusal.message, self._now[2])
        return self._now[1], self._now[2]


def unheard(name: str, artifact: Artifact, version: str) -> None:
    """Ignore an opened artifact: the default observer."""


class _File(NamedTuple):
    """File as it was read: when it was written, its bytes, what it holds, and the version of that."""

    written_ns: int
    size: int
    artifact: Artifact
    version: str


class ArtifactFiles:
    """Files that were read, and that threads may read: those of tenants up to a number of bytes.

    Beyond it, the tenants' file that was used least recently is dropped; requests that use it keep it until they end.

    Args:
        most: bytes of tenants' files.
    """

    def __init__(self, most: int = TENANT_BYTES) -> None:
        self._most = most
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, path: Path) -> bool:
        return path in self._files

    def read(self, path: Path, where: str) -> tuple[Artifact, str]:
        """Return what a file holds, and its version; read it if that was not done since it was written.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the field `where`: unreadable, or a tenant's and too large.
        """
        try:
            stat = path.stat()
        except OSError:
            raise invalid(where, f"{path.stem!r} cannot be read") from None
        with self._lock:
            known = self._files.get(path)
            if known is not None and known[:2] == (stat.st_mtime_ns, stat.st_size):
                self._files.move_to_end(path)
                return known[2:]
        if _is_tenants(path) and stat.st_size > self._most:
            allowed = f"a tenant's own may have at most {self._most:,}"
            raise invalid(where, f"{path.stem!r} has {stat.st_size:,} bytes; {allowed}")
        artifact = Artifact.load(path, where)
        made = _File(stat.st_mtime_ns, stat.st_size, artifact, artifact.version)
        with self._lock:
            self._files.pop(path, None)
            self._files[path] = made
            self._shrink()
        return made[2:]

    def drop(self, path: Path) -> None:
        """Forget a file, or all files of a folder."""
        with self._lock:
            for each in [each for each in self._files if path in (each, each.parent)]:
                del self._files[each]

    def _shrink(self) -> None:
        sizes = {path: file.size for path, file in self._files.items() if _is_tenants(path)}
        over = sum(sizes.values()) - self._most
        for path, size in sizes.items():
            if over <= 0:
                return
            del self._files[path]
            over -= size


def _is_tenants(path: Path) -> bool:
    return path.parent.parent.name == TENANTS


@dataclass(slots=True)
class Artifacts:
    """Artifacts of a pool: the files of one folder, read once and again when they change.

    Attributes:
        folder: where they lie; None: there are none.
        kept: what was made of those that the configuration names, by who uses them.
        opened: called with the name, the artifact and its version whenever one that fits is opened.
        tenant: whose own files are found before those of all; "": none.
        files: those that were read.
    """

    folder: Path | None = None
    kept: dict[tuple[str, str], Kept[Any]] = field(default_factory=dict)
    opened: Opened = unheard
    tenant: str = ""
    files: ArtifactFiles = field(default_factory=ArtifactFiles)

    def telling(self, opened: Opened) -> Artifacts:
        """Return the same artifacts with an observer of those that are opened."""
        return replace(self, opened=opened)

    def of_tenant(self, tenant: str) -> Artifacts:
        """Return the same artifacts and, before them, the tenant's own, which no other tenant can open or list."""
        return replace(self, tenant=tenant)

    def forget(self, tenant: str) -> None:
        """Drop from memory what was read of a tenant's own files; the files stay."""
        if self.folder is not None:
            self.files.drop(self.folder / TENANTS / tenant)

    @property
    def folders(self) -> list[Path]:
        """Folders that are searched, in order."""
        if self.folder is None:
            return []
        named = TENANT_PATTERN.fullmatch(self.tenant) is not None
        return [self.folder / TENANTS / self.tenant, self.folder] if named else [self.folder]

    @property
    def names(self) -> list[str]:
        """Names of all artifacts that can be opened, sorted."""
        return sorted({path.stem for folder in self.folders for path in folder.glob(f"*{SUFFIX}")})

    def open(self, name: str, kind: str, models: ModelPool, where: str) -> Artifact:
        """An artifact that fits.

        Args:
            name: file name without its ending.
            kind: what is needed.
            models: the pool it is to be used in.
            where: name of the field that chose it.

        Raises:
            TurnoutError: NOT_FOUND, listing what there is; INVALID_ARGUMENT: unreadable, of another kind, or made
                for other models.
        """
        paths = [folder / f"{name}{SUFFIX}" for folder in self.folders]
        for gone in [each for each in paths if each in self.files and not each.is_file()]:
            self.files.drop(gone)
        path = next((each for each in paths if each.is_file()), None)
        if path is None:
            raise not_found(where, name, self.names)
        artifact, version = self.files.read(path, where)
        artifact.check(kind, models, where)
        self.opened(name, artifact, version)
        return artifact


def weights_digest(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """A name for a model: the same wherever the same configuration and weights are loaded, in whichever precision.

    Of every tensor, its name, its shape and up to `SAMPLED` evenly spaced elements count, rounded to bfloat16: it
    tells models and checkpoints of one training run apart, and is no proof against a change of single weights.

    Args:
        config: the architecture's settings; where it was loaded from, by which software and in which precision is
            left out.
        tensors: weights by name.

    Returns:
        32 hexadecimal digits.
    """
    left_out = {"architectures", "dtype", "torch_dtype", "transformers_version"}
    kept = {key: value for key, value in config.items() if key not in left_out and not key.startswith("_")}
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=16)
    for name in sorted(tensors):
        flat = tensors[name].detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // SAMPLED))]
        digest.update(f"{name}{list(tensors[name].shape)}".encode())
        digest.update(sample.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
