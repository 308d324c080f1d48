"""Where a model's files are: a folder or file of this machine, a repository of a hub, or a URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from turnout.errors import invalid

DEMO_PREFIX = "demo:"
HUB_PREFIX = "hf:"
GGUF = ".gguf"
LOCAL_SCHEMES = ("file://", "local://")
ALLOWED = (
    "allowed: a folder, a .gguf file, demo:NAME, hf:ORG/NAME[@REVISION], hf:ORG/NAME/FILE.gguf[@REVISION], or a URL"
    " that fsspec knows"
)
_PART = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_])?(?<!\.git)")  # as the hub allows it
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Files of this machine.

    Attributes:
        path: folder of a checkpoint, or a GGUF file.
    """

    path: Path


@dataclass(frozen=True, slots=True)
class HubRepository:
    """Files of a repository of the Hugging Face hub, or of one that speaks its protocol.

    Attributes:
        name: ORG/NAME.
        revision: branch, tag or commit; None: the default branch.
        file: the one GGUF file that is meant; None: the checkpoint at the repository's root.
    """

    name: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"{HUB_PREFIX}{self.name}{file}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which cannot change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubRepository:
        """The same files at a commit."""
        return HubRepository(self.name, commit, self.file)


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Files of a store that fsspec reads.

    Attributes:
        url: of the folder of a checkpoint, or of a GGUF file; without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url


Location = LocalFiles | HubRepository | StoredFiles


def parse_location(text: str, field: str = "model") -> Location:
    """Read a model's path; nothing is looked up.

    Args:
        text: see `ALLOWED`.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: it has none of the allowed forms.
    """
    if text.startswith(DEMO_PREFIX):
        return LocalFiles(Path(__file__).parent / "demo" / text.removeprefix(DEMO_PREFIX))
    if text.startswith(HUB_PREFIX):
        return _hub_repository(text, field)
    if scheme := next((each for each in LOCAL_SCHEMES if text.startswith(each)), None):
        return LocalFiles(Path(text.removeprefix(scheme)))
    if "://" in text:
        return StoredFiles(text.rstrip("/"))
    return LocalFiles(Path(text).expanduser())


def _hub_repository(text: str, field: str) -> HubRepository:
    named, at, revision = text.removeprefix(HUB_PREFIX).removeprefix("//").partition("@")
    organisation, _, rest = named.partition("/")
    name, _, file = rest.partition("/")
    fits = _PART.fullmatch(organisation) and _PART.fullmatch(name)
    misnamed = file and (not file.endswith(GGUF) or {"", ".", ".."} & set(file.split("/")))
    if not fits or (at and not revision) or misnamed:
        raise invalid(field, f"{text!r} names no repository of a hub; {ALLOWED}")
    return HubRepository(f"{organisation}/{name}", revision or None, file or None)
