"""The modules of the running interpreter's standard library, as training text."""

import hashlib
import sysconfig
from pathlib import Path

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings"}
_MAX_FILE_BYTES = 200_000


def _is_wanted(path: Path, root: Path) -> bool:
    folders = set(path.relative_to(root).parts[:-1])
    return not folders & _SKIPPED_FOLDERS and 200 < path.stat().st_size <= _MAX_FILE_BYTES


def is_heldout_file(name: str) -> bool:
    """Whether the module with this path below the library root is kept out of training."""
    return hashlib.sha256(name.encode()).digest()[0] < 16


def read_sources(heldout: bool = False) -> list[str]:
    """Texts of the training (or held-out) modules in path order; files that are not UTF-8 are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if not _is_wanted(path, root) or is_heldout_file(path.relative_to(root).as_posix()) != heldout:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts
