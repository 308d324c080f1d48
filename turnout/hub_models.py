"""Models of the Hugging Face hub: resolved to a commit, downloaded to the hub's own cache, checked."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.cache_lock import locked
from turnout.errors import Code, TurnoutError, invalid
from turnout.gguf_files import shard_names
from turnout.model_files import Found, complete, complete_file, lacking, missing, shown_bytes, some
from turnout.model_location import HubRepository

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoFile

TOKEN_SOURCES = "HF_TOKEN, the file of HF_TOKEN_PATH, or `hf auth login`"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass
class Snapshot:
    """The files of a repository at a commit, in the hub's cache; see `model_files.RemoteFiles`.

    Attributes:
        repository: as it was asked for.
        commit: of it.
        listing: its files.
        field: the model's place in the configuration, for messages.
    """

    repository: HubRepository
    commit: str
    listing: Sequence[RepoFile]
    field: str
    cache_setting: str = "HF_HOME"

    @property
    def name(self) -> str:
        """The repository, as a configuration names it."""
        return str(self.repository)

    @property
    def folder(self) -> Path:
        """Its folder in the cache."""
        return _snapshot_folder(self.repository, self.commit)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file."""
        return _sizes(self.listing)

    def begun(self, names: Iterable[str]) -> int:
        """Nothing: the hub's client continues no copy of another process."""
        return 0

    def bring(self, names: Sequence[str]) -> None:
        """Download files and check their contents, where the hub says what these are.

        Raises:
            TurnoutError: the hub refuses, cannot be reached, or sent something else.
        """
        from glob import escape

        from huggingface_hub import HfApi, snapshot_download

        from turnout.download_bar import DownloadBar

        for name in names:
            self._remove(name)  # it is not there, or not whole
        needed = shown_bytes(sum(self.sizes[name] for name in names))
        with _refusals(self.repository, self.field, f"{some(names)} ({needed})"):
            HfApi().model_info(self.repository.name, revision=self.commit)  # fails at once; downloads would try again
            snapshot_download(
                self.repository.name,
                revision=self.commit,
                allow_patterns=[escape(name) for name in names],
                tqdm_class=DownloadBar,
            )
        for name in names:
            self._check_content(name)

    def _check_content(self, name: str) -> None:
        """Refuse, and remove, a file whose contents are not those that the hub announced.

        The cache names contents by what the hub calls them: large files by their SHA-256, others by git's hash.
        """
        path = self.folder / name
        if not path.is_symlink():
            return
        announced, blob_id = path.readlink().name, {file.path: file.blob_id for file in self.listing}[name]
        if _SHA256.fullmatch(announced):
            kind, digest = "SHA-256", hashlib.sha256()
        elif announced == blob_id:
            kind, digest = "git hash", hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        else:
            return
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
        if digest.hexdigest() != announced:
            self._remove(name)
            message = (
                f"{self.name}: {name} has the {kind} {digest.hexdigest()} and not {announced}, as the hub announced:"
                " it was changed on its way, and is removed; try again"
            )
            raise TurnoutError(Code.UNAVAILABLE, f"{self.field}: {message}", self.field)

    def _remove(self, name: str) -> None:
        path = self.folder / name
        if path.is_symlink():
            (path.parent / path.readlink()).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def resolve(repository: HubRepository, field: str) -> str:
    """Ask the hub which commit a revision is; where it cannot be reached, its cache knows the last answer.

    Raises:
        TurnoutError: there is no such repository or revision, access is refused, or nothing is known.
    """
    from huggingface_hub import HfApi

    with _refusals(repository, field, "its files"):
        return str(HfApi().resolve_revision(repository.name, revision=repository.revision).resolved)


def fetch(repository: HubRepository, commit: str, field: str, weights: bool = True) -> Path:
    """Download what is needed of a repository and is not in the hub's cache.

    Where all of it is there, nothing is asked of the hub.

    Args:
        repository: as it was asked for.
        commit: of it, see `resolve`.
        field: the model's place in the configuration, for messages.
        weights: whether weights are needed, too.

    Returns:
        The folder of the checkpoint, or its GGUF file.

    Raises:
        TurnoutError: in one line: access is refused, there is no such repository or revision, it holds nothing that can
            be loaded, the disk has no room, the hub cannot be reached and the cache lacks files, or a file came wrong.
    """
    with locked(repository.name):
        files = _listed(repository, commit, field)
        if files is None:  # the hub cannot be reached, and others filled the cache
            folder = _snapshot_folder(repository, commit)
            return folder / repository.file if repository.file else folder
        snapshot = Snapshot(repository, commit, files, field)
        if repository.file is not None:
            return complete_file(snapshot, repository.file, field)
        return complete(snapshot, field, weights)


def find(repository: HubRepository, weights: bool = True) -> Found:
    """Look for a repository in the hub's cache; nothing is asked of the hub."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, RevisionResolutionError

    try:
        resolved = HfApi().resolve_revision(repository.name, revision=repository.revision, local_files_only=True)
    except RevisionResolutionError:
        return Found(None)
    folder = _snapshot_folder(repository, resolved.resolved)
    path = folder / repository.file if repository.file else folder
    try:
        sizes = _sizes(get_cached_repo_tree(repository.name, revision=resolved))
    except CachedRepoTreeNotFoundError:
        return Found(path if path.exists() else None)
    file = repository.file
    lacks = missing(folder, sizes, shard_names(file)) if file else lacking(folder, sizes, weights)
    return Found(path if path.exists() and not lacks else None, tuple(lacks))


def is_offline() -> bool:
    """Whether the environment forbids to ask the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub.constants import is_offline_mode

    return is_offline_mode()


def _listed(repository: HubRepository, commit: str, field: str) -> list[RepoFile] | None:
    """The files of a commit, from the cache or the hub; None: only the folder of the snapshot is known.

    Raises:
        TurnoutError: as `fetch`.
    """
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    try:
        return get_cached_repo_tree(repository.name, revision=commit)
    except CachedRepoTreeNotFoundError:
        pass
    try:
        with _refusals(repository, field, "its files"):
            listed = HfApi().list_repo_tree(repository.name, recursive=True, revision=commit)
            return [each for each in listed if isinstance(each, RepoFile)]
    except TurnoutError as error:
        folder = _snapshot_folder(repository, commit)
        known = folder / repository.file if repository.file else folder
        if error.code is Code.UNAVAILABLE and known.exists():
            return None
        raise


def _sizes(listing: Sequence[RepoFile]) -> dict[str, int]:
    """Bytes of each file; without names that lead out of a folder, which no repository has."""
    return {file.path: file.size for file in listing if not {"", ".."} & set(file.path.split("/"))}


def _snapshot_folder(repository: HubRepository, commit: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    storage = repo_folder_name(repo_id=repository.name, repo_type="model")
    return Path(constants.HF_HUB_CACHE).expanduser() / storage / "snapshots" / commit


@contextmanager
def _refusals(repository: HubRepository, field: str, lacks: str) -> Iterator[None]:
    """Say in one line what a call of the hub's client raises.

    Args:
        repository: it is about.
        field: the model's place in the configuration.
        lacks: what is not on this machine.

    Raises:
        TurnoutError: in place of the client's errors.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RevisionNotFoundError,
        RevisionResolutionError,
    )

    hub, name = constants.ENDPOINT, repository.name
    try:
        yield
    except RevisionNotFoundError:
        message = f"{name} has no revision {repository.revision!r} at {hub}: name a branch, a tag or a commit of it"
        raise invalid(field, message) from None
    except RemoteEntryNotFoundError as error:
        raise invalid(field, f"{repository}: {_line(error)}") from None
    except HfHubHTTPError as error:
        raise _answered(repository, field, lacks, error) from None
    except (LocalEntryNotFoundError, RevisionResolutionError, OfflineModeIsEnabled) as error:
        reason = f"{hub} cannot be reached: {_line(error.__cause__ or error)}"
        reason = "HF_HUB_OFFLINE is set" if is_offline() else reason
        raise _unreachable(repository, field, lacks, reason) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{repository}: the disk of {constants.HF_HUB_CACHE} is full; free some, or set HF_HOME"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, f"{field}: {message}", field) from None
        raise _unreachable(repository, field, lacks, _line(error)) from None
    except Exception as error:
        # One thread's lost connection closes the client of the others, which then fail with a RuntimeError.
        library = type(error).__module__.partition(".")[0]
        if library not in ("httpx", "httpx2", "huggingface_hub", "hf_xet") and not isinstance(error, RuntimeError):
            raise
        raise _unreachable(repository, field, lacks, f"{hub} cannot be reached: {_line(error)}") from None


def _answered(repository: HubRepository, field: str, lacks: str, error: HfHubHTTPError) -> TurnoutError:
    """The refusal for an answer of the hub that is an error; arguments as of `_refusals`."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    hub, name, status = constants.ENDPOINT, repository.name, error.response.status_code
    sent = "the token that was sent does not suffice" if get_token() else "no token was found"
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        message = (
            f"no repository {name} at {hub}, or it is private, and {sent}: check the name, or give a token that may"
            f" read it by {TOKEN_SOURCES}"
        )
        return TurnoutError(Code.NOT_FOUND, f"{field}: {message}", field)
    if status in (401, 403):
        message = (
            f"{hub} refuses access to {name} ({status}), and {sent}: accept its terms on its page, and give a token of"
            f" that account by {TOKEN_SOURCES}"
        )
        return TurnoutError(Code.PERMISSION_DENIED, f"{field}: {message}", field)
    return _unreachable(repository, field, lacks, f"{hub} answers {status}")


def _unreachable(repository: HubRepository, field: str, lacks: str, reason: str) -> TurnoutError:
    message = (
        f"{repository}: this machine lacks {lacks}, and {reason}; `turnout models pull {repository}` fetches it where"
        " the hub can be reached"
    )
    return TurnoutError(Code.UNAVAILABLE, f"{field}: {message}", field)


def _line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
