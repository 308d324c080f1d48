from __future__ import annotations

from pathlib import Path

import pytest

from turnout.proto.generate import OUTPUTS, ROOT, generate


@pytest.mark.parametrize("name", OUTPUTS)
def test_committed_code_equals_a_regeneration(name: str, tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = (tmp_path / "turnout" / "proto" / name).read_text(encoding="utf-8")
    assert (ROOT / "turnout" / "proto" / name).read_text(encoding="utf-8") == fresh
