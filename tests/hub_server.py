"""A hub of our own: as much of the Hugging Face hub's HTTP protocol as its client needs to download models."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

from turnout import model_fetching

LARGE = (".safetensors", ".bin", ".gguf", ".h5")  # kept as large files, which go by their SHA-256


@dataclass
class Hub:
    """Repositories, and what goes wrong with them.

    Attributes:
        repositories: name -> revision -> commit, which is in `commits`.
        commits: commit -> files and their contents.
        gated: repositories whose files are refused.
        announced: file -> the size that listings say it has.
        sent: file -> what is sent in place of its contents.
        cut: file -> bytes after which its connection breaks, the next time it is asked for.
        requests: how often each was asked for: "info", "tree", or method and file.
        ranges: of requests for a part of a file.
        tokens: that were sent.
        url: where it listens.
    """

    repositories: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    announced: dict[str, int] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""

    def push(self, name: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Make a commit of a repository that a revision leads to from now on."""
        contents = "".join(f"{path}{hashlib.sha1(data).hexdigest()}" for path, data in sorted(files.items()))
        commit = hashlib.sha1(f"{name}{contents}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.repositories.setdefault(name, {})[revision] = commit
        return commit

    def push_folder(self, name: str, folder: Path, revision: str = "main") -> str:
        """Make a commit of a folder's files."""
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        return self.push(name, {each: path.read_bytes() for each, path in files.items()}, revision)


def etag(name: str, data: bytes) -> str:
    """The name of a content: SHA-256 of a large file, git's hash of another."""
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.tokens.add(self.headers.get("Authorization"))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], found[3])
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _commit(self, name: str, revision: str) -> str | None:
        """The commit of a revision; None: the request is refused already."""
        revisions = self.hub.repositories.get(name)
        if revisions is None:
            self._refuse(404, "RepoNotFound")
            return None
        commit = revisions.get(revision, revision)
        if commit not in revisions.values():
            self._refuse(404, "RevisionNotFound")
            return None
        return commit

    def _info(self, name: str, revision: str) -> None:
        self.hub.requests["info"] += 1
        if (commit := self._commit(name, revision)) is not None:
            siblings = [{"rfilename": each} for each in self.hub.commits[commit]]
            self._json({"_id": name, "id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _tree(self, name: str, revision: str) -> None:
        self.hub.requests["tree"] += 1
        if (commit := self._commit(name, revision)) is None:
            return
        entries: list[dict[str, Any]] = []
        for path, data in self.hub.commits[commit].items():
            size = self.hub.announced.get(path, len(data))
            entries.append({"type": "file", "path": path, "size": size, "oid": hashlib.sha1(data).hexdigest()})
            if path.endswith(LARGE):
                entries[-1]["lfs"] = {"oid": etag(path, data), "size": size, "pointerSize": 134}
            else:
                entries[-1]["oid"] = etag(path, data)
        self._json(entries)

    def _file(self, name: str, revision: str, path: str) -> None:
        self.hub.requests[f"{self.command} {path}"] += 1
        if (commit := self._commit(name, revision)) is None:
            return
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return
        if path not in self.hub.commits[commit]:
            self._refuse(404, "EntryNotFound")
            return
        data = self.hub.commits[commit][path]
        body = self.hub.sent.get(path, data)
        start = 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(wanted[1])
            self.hub.ranges.append(f"{path} {start}")
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag(path, data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Linked-Etag", f'"{etag(path, data)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if (most := self.hub.cut.pop(path, None)) is not None:
            self.wfile.write(body[start : start + most])
            self.close_connection = True
            return
        self.wfile.write(body[start:])

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"refused: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    """Server whose connections end with it."""

    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def running(hub: Hub | None = None) -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""
    hub = hub or Hub()
    server = _Server(hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client use this hub, as HF_ENDPOINT does in a process that starts with it."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def own_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let downloads go to a folder, without a token; the function makes this process forget what it fetched."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr("turnout.cache_lock.cache_folder", lambda: folder / "cache")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def forget() -> None:
        monkeypatch.setattr(model_fetching, "_fetched", {})
        monkeypatch.setattr(model_fetching, "_commits", {})

    forget()
    return forget
