"""`make bench-frontier`: runs what is missing of an experiment, then works out its frontier."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from experiments.frontier.figures import figures, kept_at
from experiments.frontier.page import plot, to_markdown
from experiments.frontier.prompts import gather
from experiments.grid.planning import make_plan
from experiments.grid.runner import run_plan
from experiments.grid.spec import read_spec
from experiments.grid.store import Store
from experiments.machine import describe, one_line
from experiments.report import note, publish

SPEC = Path("ops/experiments/frontier.yaml")
SWITCHING = "entropy_adaptive"
SHARES = (0.25, 0.43)  # of tokens, at which seed 2 says what it keeps


def main(spec: Path, root: Path, out: Path) -> int:
    """Run, and write the page, the picture and the numbers; the exit status says whether all cells are there."""
    store = Store(root)
    asked = read_spec(spec)
    plan = make_plan(asked, store)
    ran = run_plan(plan, store, lambda what, done, total: note(f"{done} of {total}: {what}"))
    for name, why in ran.failed.items():
        note(f"{name}: {why}")
    prompts = gather(store.load(asked.name), store)
    found = figures(prompts)
    kept = {share: kept_at(prompts, SWITCHING, share) for share in SHARES}
    machine = describe()
    values = asdict(found)
    values["oracle"] = {m: [each.tolist() for each in curve] for m, curve in found.oracle.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    plot(found, out.with_suffix(".png"))
    kept_values = {str(share): asdict(value) for share, value in kept.items()}
    publish(to_markdown(found, one_line(machine), kept), out, {"machine": machine, "kept": kept_values, **values})
    return 1 if ran.failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--store", type=Path, default=Path(".runs/experiments"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/frontier"))
    chosen = parser.parse_args()
    raise SystemExit(main(chosen.spec, chosen.store, chosen.out))
