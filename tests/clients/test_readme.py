"""The `curl` examples of README.md, as they stand there but for the port."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.site import Site

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("curl") is None, reason="no `curl` on the PATH (Debian: apt-get install curl)"),
]
ROOT = Path(__file__).parents[2]
ADDRESS = "http://localhost:8000"
BLOCKS = re.findall(r"^```console\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
EXAMPLES = [part for block in BLOCKS for part in re.split(r"^\$ ", block, flags=re.M) if part.startswith("curl ")]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
    assert all(ADDRESS in example for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: re.sub(r"\W+", "-", text.partition("\n")[0])[:60])
def test_an_example_answers(site: Site, example: str) -> None:
    command = example.replace(ADDRESS, site.url).replace("curl ", "curl --silent --show-error --fail ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    if '"stream": true' in example:
        *events, end = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert end == "[DONE]"
        assert any(choice["text"] for event in events for choice in json.loads(event)["choices"])
    else:
        assert json.loads(done.stdout)
