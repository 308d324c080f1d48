"""The prefix store of a local run: a Valkey (or Redis) server of its own, and a root key that is made for it."""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError
from turnout.kvstore_config import EMBEDDED

if TYPE_CHECKING:
    from kvstore.redis.embedded import EmbeddedServer

KEY_FILE = "root.key"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmbeddedStore:
    """A running server and the folder of what belongs to it, the root key included."""

    server: EmbeddedServer
    folder: Path

    @property
    def url(self) -> str:
        """Where it is, for others on this machine."""
        return self.server.url

    @property
    def root_key_file(self) -> Path:
        """The key of everything in it."""
        return self.folder / KEY_FILE

    def joined(self, config: TurnoutConfig) -> TurnoutConfig:
        """A configuration with the server's address, for replicas; one that wants another store keeps it."""
        if config.kvstore.url != EMBEDDED:
            return config
        settings = config.kvstore.model_copy(update={"url": self.url, "root_key_file": str(self.root_key_file)})
        return config.model_copy(update={"kvstore": settings})

    def stop(self) -> None:
        """End the server and remove its folder."""
        self.server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_store(config: TurnoutConfig) -> tuple[TurnoutConfig, EmbeddedStore | None]:
    """Start the embedded server where the configuration wants one; the replicas must be on this machine.

    A server that does not start is a warning: everything works without one.

    Returns:
        The configuration with the server's address, for replicas; what to stop at the end.
    """
    if config.kvstore.url != EMBEDDED:
        return config, None
    from kvstore.keys import write_root_key
    from kvstore.redis.embedded import EmbeddedServer
    from kvstore.redis.executables import HOLES

    try:
        folder = Path(tempfile.mkdtemp(prefix="turnout-store-"))  # only this user may enter it
    except OSError as error:
        log.warning("without the embedded prefix store: %s", error)
        return config, None
    try:
        write_root_key(folder / KEY_FILE)
        store = EmbeddedStore(EmbeddedServer(folder, config.kvstore.redis_memory_bytes), folder)
    except (TurnoutError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        log.warning("without the embedded prefix store: %s", error)
        return config, None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    version = store.server.version
    if version is not None and not version.patched:
        log.warning(
            "the embedded prefix store runs %s, which lacks the fixes for %s; install a newer valkey-server on PATH",
            version,
            HOLES,
        )
    return store.joined(config), store
