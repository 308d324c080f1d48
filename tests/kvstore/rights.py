"""What a server refused to its users."""

from __future__ import annotations

from contextlib import closing

from kvstore.redis.embedded import EmbeddedServer
from kvstore.redis.nodes import Connector, parse_url
from kvstore.redis.rights import TOLERATED


def admin_client(server: EmbeddedServer) -> closing:
    """A client of redis-py with all rights."""
    assert server.admin_url is not None
    address = parse_url(server.admin_url)
    return closing(Connector(address.access).client(address.endpoints[0], 5))


def denied(server: EmbeddedServer) -> set[str]:
    """Commands and keys that were refused, without those whose refusal the store expects. Redis 6.2 names no parts."""
    expected = {word.lower() for word in TOLERATED} | {word.lower().partition("|")[0] for word in TOLERATED}
    with admin_client(server) as client:
        return {entry["object"] for entry in client.acl_log()} - expected
