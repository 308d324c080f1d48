"""Opening of what the configuration names: the root key, and the Redis."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from kvstore.keys import ROOT_KEY_BYTES, Keyring, load_root_key
from kvstore.redis.checks import check_address
from kvstore.redis.nodes import Address, TlsFiles, parse_url
from kvstore.redis.redis_store import RedisStore

if TYPE_CHECKING:
    from turnout.kvstore_config import KVStoreConfig

log = logging.getLogger(__name__)

CHECK_S = 2.0


def open_keyring(config: KVStoreConfig) -> Keyring:
    """Open the keys of the configured file; without one, make random keys.

    Raises:
        TurnoutError: the file holds no key.
    """
    if config.root_key_file is None:
        return Keyring(secrets.token_bytes(ROOT_KEY_BYTES))
    return Keyring(load_root_key(config.root_key_file), config.epoch)


def open_store(config: KVStoreConfig) -> RedisStore:
    """Open the configured Redis, and log what should be changed there.

    Raises:
        TurnoutError: it cannot be used as it is.
    """
    checked = check_address(address_of(config), CHECK_S)
    for warning in checked.warnings:
        log.warning("prefix store: %s", warning)
    return connect_store(config)


def connect_store(config: KVStoreConfig) -> RedisStore:
    """Make the store of the configured Redis; nothing is connected before the first call, and nothing is checked.

    Raises:
        TurnoutError: the URL is none, or a TLS file is unusable.
    """
    return RedisStore(
        address_of(config),
        connections=config.connections,
        breaker_errors=config.breaker_errors,
        breaker_cooldown_s=config.breaker_cooldown_s,
    )


def address_of(config: KVStoreConfig) -> Address:
    """Parse the address of the configured Redis.

    Raises:
        TurnoutError: the URL is none.
    """
    tls = TlsFiles(config.tls_ca_file, config.tls_cert_file, config.tls_key_file)
    return parse_url(config.url, password_file=config.password_file, tls=tls)
