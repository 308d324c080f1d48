from __future__ import annotations

from pathlib import Path

import pytest

from turnout.config import TurnoutConfig, load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = [*sorted((ROOT / "ops").glob("*.yaml")), ROOT / "ops" / "cluster" / "one-machine-serve.yaml"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_configuration_is_accepted(path: Path) -> None:
    assert load_config(path).pools


def test_the_demo_file_is_the_demo_configuration() -> None:
    assert load_config(ROOT / "ops" / "demo.yaml") == TurnoutConfig.demo()
