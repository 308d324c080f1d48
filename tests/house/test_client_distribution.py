"""`turnout-client`: a wheel of some files of `turnout`, which must be all that the client imports."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "client"
# Everything but the standard library that may be imported: the dependencies and what these import themselves.
ALLOWED = "grpc,google,pydantic,pydantic_core,annotated_types,typing_extensions,typing_inspection"
IMPORTS = """
import sys
from importlib.machinery import PathFinder
site, wheel, allowed = sys.argv[1], sys.argv[2], {*sys.argv[3].split(","), "turnout"}

class Allowed:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and PathFinder.find_spec(top, [site]) is not None:
            raise ModuleNotFoundError(name)

sys.path[:] = [wheel, *sys.path, site]
sys.meta_path.insert(0, Allowed())
from turnout.client import AsyncClient, Client
assert sys.modules["turnout"].__file__.startswith(wheel)
print("imported")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("client")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=CLIENT, check=True, capture_output=True)
    [archive] = folder.glob("turnout_client-*.whl")
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_client_needs_nothing_but_its_dependencies(wheel: Path) -> None:
    import grpc

    site = str(Path(grpc.__file__).parents[1])
    command = [sys.executable, "-S", "-I", "-c", IMPORTS, site, str(wheel), ALLOWED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "imported"), done.stderr


def test_both_distributions_have_one_version() -> None:
    def project(path: Path) -> dict[str, str]:
        return dict(tomllib.loads(path.read_text(encoding="utf-8"))["project"])

    ours, client = project(ROOT / "pyproject.toml"), project(CLIENT / "pyproject.toml")
    assert (client["version"], client["requires-python"]) == (ours["version"], ours["requires-python"])
    assert set(client["dependencies"]) <= set(ours["dependencies"])
