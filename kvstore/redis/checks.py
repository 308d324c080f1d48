"""Checks of a Redis at start; each message names what to change."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass
from typing import Any

import redis

from kvstore.base import StoreFault
from kvstore.redis.executables import ServerVersion, version_in_info
from kvstore.redis.nodes import URL_FIELD, Address, Connector, NodeAddress
from kvstore.redis.resp import Reply
from kvstore.redis.rights import ALL_NEEDED, IN_SCRIPTS, KEY_PATTERN, words_needed
from kvstore.redis.topology import learn
from kvstore.scripts import SCRIPTS
from turnout.errors import invalid

_DENIED = re.compile(r"NOPERM|no permissions|can't run this command|ACL failure", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a start-up check.

    Attributes:
        reachable: whether any server answered.
        warnings: sentences for the log, the most serious first; not reachable is one of them.
        versions: of the servers that answered, as far as they say it: "valkey 9.1.2".
    """

    reachable: bool
    warnings: tuple[str, ...]
    versions: tuple[str, ...] = ()


def check_address(address: Address, timeout_s: float = 2.0) -> Checked:
    """Look at every node of an address: connect, log in, try each command, read how it is set up.

    Args:
        address: from `parse_url`.
        timeout_s: for all of it, about; a node that does not answer takes that long.

    Returns:
        What works and what should be changed. A Redis that is away is a warning: it may come back.

    Raises:
        TurnoutError: what will not mend itself: wrong user, password or right, TLS refused, a version too old, a
            server that is not what the URL says.
    """
    connector = Connector(address.access)
    deadline = time.monotonic() + timeout_s

    def ask(endpoint: NodeAddress, raw: bytes, until: float) -> Reply:
        connection = connector(endpoint, min(until, deadline))
        try:
            connection.send([raw], 1, min(until, deadline))
            return connection.reply(min(until, deadline))
        finally:
            connection.close()

    topology = learn(address, connector, ask)
    try:
        topology.node_of(b"")
    except StoreFault as fault:
        return _away(fault, address)
    warnings: list[str] = []
    versions: list[str] = []
    reached = False
    for endpoint in topology.nodes():
        try:
            connector(endpoint, deadline).close()
            found = _Server(connector, endpoint, max(deadline - time.monotonic(), 0.1), address)
            reached = True
            versions += [str(found.version)] if found.version is not None else []
            warnings += found.warnings()
        except StoreFault as fault:
            warnings.insert(0, _away(fault, address).warnings[0])
    return Checked(reached, tuple(dict.fromkeys(warnings)), tuple(versions))


def _away(fault: StoreFault, address: Address) -> Checked:
    """Classify a fault on the way to a server: refused needs an operator, the rest may pass.

    Raises:
        TurnoutError: refused.
    """
    if fault.kind == "refused":
        hint = f"; {_grant(address)}" if address.kind == "cluster" and _DENIED.search(str(fault)) else ""
        raise invalid(URL_FIELD, f"{fault}{hint}") from fault
    hint = "; if it speaks TLS, write rediss://" if "closed the connection" in str(fault) else ""
    return Checked(
        False,
        (f"{URL_FIELD}: {fault}{hint}; prefixes are shared in host memory only until it answers",),
    )


def _grant(address: Address) -> str:
    """Return the command that completes an access list."""
    rights = " ".join(f"+{each.lower()}" for each in words_needed(address.kind))
    return f"grant it with ACL SETUSER {address.access.user or 'default'} ~{KEY_PATTERN} {rights}"


class _Server:
    """One server under examination.

    Raises:
        TurnoutError: as `check_address`.
        StoreFault: it went away meanwhile.
    """

    def __init__(self, connector: Connector, endpoint: NodeAddress, timeout_s: float, address: Address) -> None:
        self._endpoint = endpoint
        self._address = address
        self._client = connector.client(endpoint, timeout_s)
        try:
            self._info: dict[str, Any] | None = self._read_info()
            self._try_commands()
            self._limits = self._output_limit()
        except redis.AuthenticationError as error:
            raise invalid(
                URL_FIELD, f"{endpoint} refuses {address.access.who}: {error}; see kvstore.password_file"
            ) from error
        except redis.RedisError as error:
            raise StoreFault("unreachable", f"{endpoint} went away during the check: {error}") from error
        finally:
            self._client.close()

    @property
    def version(self) -> ServerVersion | None:
        """As the server says; None when it may not say."""
        return version_in_info(self._info) if self._info is not None else None

    def warnings(self) -> list[str]:
        """List what should be changed."""
        who = self._endpoint
        if self._info is None:
            allowed = f"{self._address.access.who} may not run INFO"
            return [f"{URL_FIELD}: {who}: eviction policy and version are not checked, for {allowed}"]
        found = []
        policy, limit = str(self._info.get("maxmemory_policy", "")), int(self._info.get("maxmemory", 0))
        if policy.startswith("allkeys-"):
            found.append(
                f"{who} has maxmemory-policy {policy}, which also drops what has no expiry: quota counters, pinned and "
                "registered prefixes; set maxmemory-policy volatile-ttl"
            )
        elif limit and policy == "noeviction":
            found.append(
                f"{who} has maxmemory-policy noeviction: once its {limit >> 20} MiB are full, nothing more is stored; "
                "set maxmemory-policy volatile-ttl"
            )
        elif limit and policy and policy != "volatile-ttl":
            found.append(
                f"{who} has maxmemory-policy {policy}: prefixes lose their beginnings first; volatile-ttl keeps about "
                "twice as much of use"
            )
        if not limit:
            found.append(f"{who} has no maxmemory: values only go when they expire; set maxmemory and volatile-ttl")
        if self._limits:
            found.append(self._limits)
        return found

    def _read_info(self) -> dict[str, Any] | None:
        try:
            info: dict[str, Any] = self._client.info()
        except redis.ResponseError as error:
            if _DENIED.search(str(error)):
                return None
            raise invalid(URL_FIELD, f"{self._endpoint} refuses INFO: {error}") from error
        if info.get("cluster_enabled") and self._address.kind != "cluster":
            raise invalid(URL_FIELD, f"{self._endpoint} is a node of a cluster; write redis+cluster://")
        version = tuple(int(part) for part in re.findall(r"\d+", str(info.get("redis_version", "")))[:2])
        for name, since in ALL_NEEDED.items():
            if version and version < since:
                raise self._too_old(name, since, str(version_in_info(info)))
        return info

    def _try_commands(self) -> None:
        """Run each command on a key of our own, as a user may lack a right to any of them."""
        key = f"to1:check:{secrets.token_hex(8)}"
        words: dict[str, tuple[str | int, ...]] = {
            "SET": (key, "", "PX", 1000, "NX"),
            "GETEX": (key, "PX", 1000),
            "EXISTS": (key,),
            "PEXPIRE": (key, 1000),
            "PERSIST": (key,),
            "UNLINK": (key,),
            "EVALSHA": ("0" * 40, 1, key),
        }
        for name, arguments in words.items():
            self._try(name, name, *arguments)
        if not self._has_scripts():
            self._try("EVAL", "EVAL", "return 1", 1, key)
        if self._address.kind == "cluster":
            self._try("ASKING", "ASKING")
        for name, more in IN_SCRIPTS.items():
            # A script may run what its user may. A key of one command's kind only: SET makes another than HSET.
            self._try(name, name, f"{key}:{name[0]}", *more)
        for kind in "HSZ":
            self._try("UNLINK", "UNLINK", f"{key}:{kind}")

    def _has_scripts(self) -> bool:
        """Tell whether all scripts are loaded; False, too, where the user may not ask."""
        digests = [hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for text in SCRIPTS]
        try:
            return all(self._client.execute_command("SCRIPT EXISTS", *digests))
        except redis.ResponseError:
            return False

    def _try(self, name: str, *words: str | int) -> None:
        try:
            self._client.execute_command(*words)
        except redis.ResponseError as error:
            self._judge(name, str(error))

    def _judge(self, name: str, said: str) -> None:
        if _DENIED.search(said):
            who = self._address.access.who
            raise invalid(
                URL_FIELD, f"{who} may not run {name} on keys {KEY_PATTERN} ({said}); {_grant(self._address)}"
            )
        if "unknown command" in said.lower():
            since = ALL_NEEDED.get(name, (2, 6))
            raise self._too_old(name, since, str(self.version or "of unknown version"))

    def _too_old(self, name: str, since: tuple[int, int], version: str) -> Exception:
        needed = f"{name}, which came with Redis {since[0]}.{since[1]}"
        return invalid(URL_FIELD, f"{self._endpoint} is {version} and has no {needed}; use 6.2 or newer")

    def _output_limit(self) -> str:
        """Return a warning if unread replies may grow until values are evicted for them; else an empty string."""
        try:
            limits = {
                **self._client.config_get("client-output-buffer-limit"),
                **self._client.config_get("maxmemory-clients"),
            }
        except redis.ResponseError:
            return ""  # hosted servers hide CONFIG
        words = str(limits.get("client-output-buffer-limit", "")).split()
        unlimited = words[:2] == ["normal", "0"] and str(limits.get("maxmemory-clients", "0")) == "0"
        if not unlimited:
            return ""
        return (
            f"{self._endpoint} lets unread replies grow without limit, and evicts values for them; set "
            "client-output-buffer-limit normal 64mb 32mb 10, or maxmemory-clients 64mb from Redis 7 on"
        )
