"""The cases with OpenAI's client for Node, as npm installs it from the lock file."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.clients.cases import Case, Result

if TYPE_CHECKING:
    from tests.clients.site import Site

SOURCE = Path(__file__).parent / "node"
FILES = ("package.json", "package-lock.json", "run_cases.mjs")
INSTALL_S, RUN_S = 240, 420


def missing() -> str | None:
    """Why Node cannot be used here; None: it can."""
    absent = [name for name in ("node", "npm") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} on the PATH (Debian: apt-get install nodejs npm)" if absent else None


def install(folder: Path) -> str:
    """Install the client into a folder, with exactly the versions of the lock file; its name and version."""
    for name in FILES:
        shutil.copy(SOURCE / name, folder / name)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stderr
    locked = json.loads((folder / "package-lock.json").read_text(encoding="utf-8"))
    node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return f"openai {locked['packages']['node_modules/openai']['version']} on Node {node}"


def run_cases(site: Site, cases: list[Case], folder: Path) -> dict[str, Result]:
    """What the client makes of each case, by name."""
    asked = []
    for case in cases:
        key = site.keys.get(case.tenant) or site.keys.get(f"{case.tenant}-node", "tk_000000000000_nobody")
        told = {"name": case.name, "call": case.call, "arguments": case.arguments, "then": case.then}
        asked.append({**told, "key": key})
    (folder / "cases.json").write_text(json.dumps({"url": site.url, "cases": asked}), encoding="utf-8")
    command = ["node", "run_cases.mjs", "cases.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Result] = json.loads(done.stdout)
    return results
