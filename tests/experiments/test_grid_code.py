"""Which code a cell depends on, on a tree of modules made for it and on our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.grid.code import code_digest, modules, reached, words_of
from experiments.grid.energy import EnergyMeter

FILES = {
    "pool/local_pool.py": "import engine.forward",
    "engine/forward.py": "from turnout.types import x",
    "turnout/types.py": "x = 1",
    "decoding/methods/writing.py": "from decoding.steps import y\nDRAFTER = 'copying'",
    "decoding/methods/other.py": "z = 3",
    "decoding/drafters/base.py": "",
    "decoding/drafters/copying.py": "NEXT = 'other_drafter'",
    "decoding/drafters/other_drafter.py": "",
    "decoding/drafters/unused.py": "",
    "decoding/steps.py": "y = 2\nSAID = 'unused'",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root with these modules."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    return tmp_path


def test_a_cell_reaches_what_is_imported_and_parts_that_parts_name(tree: Path) -> None:
    found = reached({"pool.local_pool", "decoding.methods.writing"}, modules(tree))
    assert found == {
        "pool.local_pool",
        "engine.forward",
        "turnout.types",
        "decoding.methods.writing",
        "decoding.steps",
        "decoding.drafters.copying",
        "decoding.drafters.other_drafter",
    }


def test_our_methods_do_not_reach_each_other() -> None:
    known = modules()
    plain = reached({"pool.local_pool", "decoding.methods.plain"}, known)
    assert "engine.scheduler.batcher" in plain
    assert "decoding.methods.entropy_adaptive" not in plain
    assert "decoding.drafters.medusa" not in plain
    assert "decoding.drafters.medusa" in reached({"decoding.drafters.medusa"}, known)
    # The runner, the reports and the command line decide no number.
    assert not {name for name in plain if name.startswith(("experiments.", "cli.", "deployments."))}


def test_digests_differ_by_what_is_run_and_by_nothing_else() -> None:
    digests = {
        code_digest("plain", {}, "exact"),
        code_digest("plain", {}, "numeric"),
        code_digest("entropy_adaptive", {}, "exact"),
        code_digest("speculative", {"drafter": "copyspec"}, "exact"),
        code_digest("speculative", {"drafter": "medusa"}, "exact"),
    }
    assert len(digests) == 5
    assert code_digest("plain", {"model": "small"}, "exact") == code_digest("plain", {}, "exact")


def test_artifacts_a_way_may_open_are_among_its_words() -> None:
    assert "medusa" in words_of("speculative", {"drafter": "medusa"})
    assert "medusa" not in words_of("speculative", {"drafter": "copyspec"})
    assert "mine" in words_of("entropy_adaptive", {"calibration": "mine"})


def counter(folder: Path, name: str, microjoules: int) -> Path:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "max_energy_range_uj").write_text("1000000\n", encoding="ascii")
    (folder / name / "energy_uj").write_text(f"{microjoules}\n", encoding="ascii")
    return folder / name / "energy_uj"


def test_energy_is_what_the_packages_counted_and_a_counter_may_begin_anew(tmp_path: Path) -> None:
    one, two = counter(tmp_path, "intel-rapl:0", 100_000), counter(tmp_path, "intel-rapl:1", 900_000)
    counter(tmp_path, "intel-rapl:0:0", 50_000)  # a part of the first
    meter = EnergyMeter.start(tmp_path)
    assert meter.sources[0] == "processor"
    one.write_text("350000", encoding="ascii")
    two.write_text("150000", encoding="ascii")
    if meter.sources == ("processor",):
        assert meter.joules() == pytest.approx(0.25 + 0.25)


def test_a_machine_without_a_meter_gives_no_figure(tmp_path: Path) -> None:
    meter = EnergyMeter.start(tmp_path)
    assert meter.sources or meter.joules() is None
