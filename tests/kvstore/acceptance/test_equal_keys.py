"""Acceptance test 7: the same prompt has the same keys in every process, whatever its hash seed or Python version."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.keys import Chain, Keyring, fingerprint, redis_key
from turnout.types import Namespace, Sharing

REPOSITORY = Path(__file__).parents[3]
TOKENS = [(i * i * 31 + i) % 150_000 for i in range(64)]
# Prints the keys of one prompt. Where there are no libraries, as under another Python, what names do not depend on is
# replaced; HKDF, which they do depend on, by its definition (RFC 5869).
SCRIPT = """
import hmac, json, sys
from unittest.mock import MagicMock
sys.path.insert(0, sys.argv[1])

class HKDF:
    def __init__(self, hash, length, salt, info):
        assert length == 32
        self.salt, self.info = salt, info
    def derive(self, root):
        return hmac.digest(hmac.digest(self.salt, root, "sha256"), self.info + bytes([1]), "sha256")

if sys.argv[2] == "bare":
    hazmat = "cryptography.hazmat.primitives"
    names = ["ciphers", "ciphers.aead", "hashes", "kdf", "kdf.hkdf"]
    whole = ["cryptography", "cryptography.hazmat", hazmat, *(f"{hazmat}.{name}" for name in names)]
    sys.modules.update({name: MagicMock() for name in ["pydantic", "pydantic_core", *whole]})
    sys.modules["pydantic"].BaseModel = object
    sys.modules[f"{hazmat}.kdf.hkdf"].HKDF = HKDF
from kvstore.keys import Chain, Keyring, fingerprint, redis_key
from turnout.types import Namespace, Sharing
print(json.dumps([sys.flags.hash_randomization, hash("a"), [each.decode() for each in keys()]]))
"""
KEYS = '''
def keys():
    """Of a prompt with a public head and a private rest."""
    keyring = Keyring(bytes(range(32)), 3)
    model = fingerprint({"weights": "w\\u00e4hlen", "dtype": "bfloat16", "layout": 1})
    sharing = Sharing(Namespace("private", "al\\u00efce"), ((20, Namespace("public", "p")),))
    links = Chain(keyring, model, 16, sharing).links(TOKENS, 4)
    codecs, groups = ("raw", "fp8"), (0, 1)
    return [redis_key(keyring, model, link, codec, i) for link in links for codec in codecs for i in groups]
'''


def run(python: str, libraries: str, seed: str | None) -> Any:
    """The keys another process makes."""
    seeded = ["env", "-u", "PYTHONHASHSEED"] if seed is None else ["env", f"PYTHONHASHSEED={seed}"]
    before, _, after = SCRIPT.partition("print(json")
    script = f"{before}\nTOKENS = {TOKENS}\n{KEYS}\nprint(json{after}"
    done = subprocess.run(
        [*seeded, python, "-B", "-c", script, str(REPOSITORY), libraries], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected() -> list[str]:
    scope: dict[str, Any] = {
        "Keyring": Keyring, "Chain": Chain, "fingerprint": fingerprint, "redis_key": redis_key,
        "Namespace": Namespace, "Sharing": Sharing, "TOKENS": TOKENS,
    }  # fmt: skip
    exec(KEYS, scope)
    return [each.decode() for each in scope["keys"]()]


def other_pythons() -> list[str]:
    """Interpreters of other minor versions on this machine that can read our source."""
    found = []
    for minor in range(11, 20):
        path = shutil.which(f"python3.{minor}")
        if minor == sys.version_info.minor or path is None:
            continue
        # A version manager's stand-in refuses to run for versions that are installed and not switched on.
        installed = Path(path).parent.parent.glob(f"versions/3.{minor}*/bin/python3.{minor}")
        found += [each for each in (path, *map(str, installed)) if _runs(each, minor)][:1]
    return found


def _runs(python: str, minor: int) -> bool:
    script = "import sys; print(sys.version_info.minor)"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == str(minor)


def test_hash_seeds_change_nothing() -> None:
    answers = [run(sys.executable, "full", seed) for seed in ("0", "4711", None)]
    assert len({own_hash for _, own_hash, _ in answers}) == 3
    assert answers[2][0] == 1  # hashes of text are random where nothing is said
    assert [keys for _, _, keys in answers] == [expected()] * 3
    assert len(set(expected())) == 16


def test_what_stands_for_the_libraries_changes_nothing() -> None:
    """So that the next test compares Pythons and nothing else."""
    assert run(sys.executable, "bare", "1")[2] == expected()


@pytest.mark.skipif(not other_pythons(), reason="no other Python is installed here")
def test_another_python_makes_the_same_keys() -> None:
    for python in other_pythons():
        assert run(python, "bare", None)[2] == expected()
