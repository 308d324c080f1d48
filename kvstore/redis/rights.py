"""The access list of the store's user: the commands that it runs, on which keys, and nothing else."""

from __future__ import annotations

from kvstore.redis.nodes import Kind

KEY_PATTERN = "to1:*"
# Commands the store uses, and since which version of Redis a server knows them; every Valkey does.
NEEDED = {"GETEX": (6, 2), "SET": (2, 6), "EXISTS": (1, 0), "PEXPIRE": (2, 6), "PERSIST": (2, 2), "UNLINK": (4, 0)}
RUNS_SCRIPTS = {"EVALSHA": (2, 6)}
# Loads a script that the server does not have: a Redis that comes back empty has none of them.
BRINGS_SCRIPTS = {"EVAL": (2, 6)}
ALL_NEEDED = {**NEEDED, **BRINGS_SCRIPTS, **RUNS_SCRIPTS}
# What the store's scripts call, with arguments that do no harm; a server asks for the user's right to these as well.
IN_SCRIPTS: dict[str, tuple[str, ...]] = {
    "GET": (),
    "SET": ("x",),
    "UNLINK": (),
    "HSET": ("f", "1"),
    "HSETNX": ("f", "1"),
    "HGET": ("f",),
    "HGETALL": (),
    "HINCRBY": ("f", "1"),
    "HDEL": ("f",),
    "ZADD": ("1", "m"),
    "ZCARD": (),
    "ZRANGE": ("0", "1"),
    "ZRANGEBYSCORE": ("0", "1"),
    "ZRANDMEMBER": ("1",),
    "ZREM": ("m",),
}
IN_CLUSTERS = ("CLUSTER|SLOTS", "ASKING")  # and where the nodes are, and keys that are just moving
# Without these less is known: which server it is and how it evicts, and whether it answers a probe of some kilobytes.
USEFUL = ("INFO", "ECHO")
# Asked once, by the check at start, and refused without harm.
TOLERATED = ("CONFIG|GET", "CLIENT|SETINFO")


def words_needed(kind: Kind = "single") -> list[str]:
    """List the commands that a user of the store needs."""
    return [*dict.fromkeys([*ALL_NEEDED, *IN_SCRIPTS, *(IN_CLUSTERS if kind == "cluster" else ())])]


def rules(kind: Kind = "single") -> str:
    """Write the access list of the store's user, for `ACL SETUSER`: these commands on the store's keys, no others."""
    return _rules([*words_needed(kind), *USEFUL])


def rules_without_eval() -> str:
    """Write the access list for a server that has the scripts already: no other script is ever run."""
    words = [word for word in words_needed() if word not in BRINGS_SCRIPTS]
    return _rules([*words, *USEFUL, "SCRIPT|EXISTS"])


def _rules(words: list[str]) -> str:
    rights = " ".join(f"+{word.lower()}" for word in words)
    return f"resetkeys ~{KEY_PATTERN} resetchannels -@all {rights}"
