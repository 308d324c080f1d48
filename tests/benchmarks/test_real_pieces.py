"""Pieces are kept, resumed and shown; mismatches, perplexity and agreement are what a hand computes."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness import Report, parse
from benchmarks.peers.plan import GENERATE, INT4, LLAMA_CPP, LLAMA_CPP_SHIPPED, OURS, VLLM
from benchmarks.peers.table import Comparison
from benchmarks.peers.turns import Outcome
from benchmarks.pieces import Pieces, Section, Values
from benchmarks.real import run, speculation, speed
from benchmarks.real.equality import COUNTS, LONG_CHARACTERS, TIE_NATS, compare, prompts, without_end
from benchmarks.real.switching import NAMES, Scores, held_out, rows, score
from training.data import real_text
from turnout.errors import TurnoutError, invalid

VOCABULARY, END = 4, 3


class Planted:
    """Two pieces, of which the second fails while `fails` is set."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.fails = False
        self.section = Section("Planted", ("one", "two"), self.measure, lambda o: {"tokens": o.tokens}, self.write)

    async def measure(self, name: str, options: Namespace) -> Values:
        if self.fails and name == "two":
            raise invalid("two", "needs a draft")
        self.measured.append(name)
        return {"answer": options.tokens}

    def write(self, report: Report, pieces: Mapping[str, Values]) -> None:
        report.text(", ".join(f"{name} has {values['answer']}" for name, values in pieces.items()))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    made = Planted()
    monkeypatch.setattr(run, "SECTIONS", (made.section,))
    return made


def options(out: Path, *arguments: str) -> Namespace:
    return parse(run.parser(), ["--out", str(out), *arguments])


async def test_a_piece_is_measured_once_for_its_setting(planted: Planted, tmp_path: Path) -> None:
    out = tmp_path / "real.md"
    planted.fails = True
    report = await run.measure(options(out))
    assert "one has 96" in report.markdown()
    assert "Not measured: two (two: needs a draft)." in report.markdown()
    planted.fails = False
    report = await run.measure(options(out))  # the first one is there already
    assert planted.measured == ["one", "two"]
    assert "one has 96, two has 96" in report.markdown()
    await run.measure(options(out, "--piece", "one", "--again"))
    await run.measure(options(out, "--piece", "two", "--tokens", "8"))
    assert planted.measured == ["one", "two", "one", "two"]
    assert Pieces.read(out.with_suffix(".json")).values(("one", "two")) == {"one": {"answer": 96}, "two": {"answer": 8}}


async def test_the_page_and_its_json_file_can_be_read_again(planted: Planted, tmp_path: Path) -> None:
    out = tmp_path / "real.md"
    (await run.measure(options(out))).save(out)
    assert set(json.loads(out.with_suffix(".json").read_text())["pieces"]) == {"one", "two"}
    await run.measure(options(out))
    assert planted.measured == ["one", "two"]


async def test_a_piece_that_was_asked_for_and_fails_is_an_error(planted: Planted, tmp_path: Path) -> None:
    planted.fails = True
    with pytest.raises(TurnoutError, match="needs a draft"):
        await run.measure(options(tmp_path / "real.md", "--piece", "two"))


class Chain:
    """A language model whose next token's logits depend on the last token alone."""

    generation_config = SimpleNamespace(eos_token_id=END)

    def __init__(self, logits: list[list[float]]) -> None:
        self.logits = torch.tensor(logits, dtype=torch.float64)

    def __call__(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits[ids])


@pytest.mark.parametrize(("gap", "near"), [(TIE_NATS / 2, True), (2 * TIE_NATS, False)])
def test_a_mismatch_is_a_near_tie_or_a_fault(gap: float, near: bool) -> None:
    model = Chain([[0.0, 5.0, 5.0 - gap, 0.0]] * VOCABULARY)
    assert compare(model, "code", 0, [0], ([1, 1], [1, 1])) is None
    found = compare(model, "code", 7, [0], ([1, 1, 0], [1, 2, 0]))
    assert found is not None
    assert (found.prompt, found.place, found.tokens) == (7, 1, (1, 2))
    assert found.margin == pytest.approx(gap)
    assert found.behind == pytest.approx(gap)
    assert found.is_near_tie is near


def test_an_answer_that_ends_early_is_compared_with_the_end_token() -> None:
    model = Chain([[0.0, 5.0, 0.0, 4.0]] * VOCABULARY)
    found = compare(model, "code", 0, [0], ([1, 1], [1]))
    assert found is not None
    assert (found.place, found.tokens, found.is_near_tie) == (1, (1, END), False)
    assert without_end([1, 2, END, 2], END) == [1, 2]


def test_perplexity_and_agreement_are_of_the_tokens_that_were_written() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    target = Chain([[half, quarter, quarter, -50.0]] * VOCABULARY)
    found = score(target, [[1, 1], [2]], [[0, 1], [0, 0, 0, 0]])
    assert found.nats == pytest.approx([(math.log(2) + math.log(4)) / 2, math.log(2)])
    assert found.agreement.tolist() == [0.5, 1.0]
    assert found.perplexity == pytest.approx(2 ** ((1 + 2 + 4) / 6))


def test_random_switching_is_moved_to_the_share_it_is_compared_at() -> None:
    def arm(name: str, method: str, share: float) -> Any:
        return SimpleNamespace(arm=SimpleNamespace(name=name, method=method), large_share=share, mean_run=4.0)

    def scores(agreement: float) -> Scores:
        return Scores(np.full(3, 1.0 - agreement), np.full(3, agreement), np.full(3, 8.0))

    results = [arm("small only", "plain", 0.0), arm("large only", "plain", 1.0)]
    results += [arm("entropy 1", "entropy_adaptive", 0.5), arm("random for entropy 1", "random_switch", 0.3)]
    made = rows(results, [scores(0.0), scores(1.0), scores(0.75), scores(0.25)])
    assert [row["agreement"] for row in made] == [0.0, 1.0, 0.75, 0.25]
    assert made[2]["agreement_over_random"][0] == pytest.approx(0.75 - (0.25 + 0.2))
    assert made[2]["nats_over_random"][0] == pytest.approx(0.25 - (0.75 - 0.2))
    assert "agreement_over_random" not in made[3]


def test_no_prompt_is_for_thresholds_and_for_scores() -> None:
    held = held_out(12, 16)
    asked, others = ({each.prompt for each in part} for part in (held.asked, held.calibration))
    assert not asked & others
    assert asked | others == {text for kind in real_text.KINDS for text in real_text.prompts(kind)}
    assert set(NAMES.values()) <= set(run.switching.SETTINGS)


def test_equality_is_shown_on_fifty_prompts() -> None:
    asked = [text for kind in COUNTS for text in prompts(kind)]
    assert len(asked) == len(set(asked)) == 50
    assert min(map(len, prompts("long"))) > LONG_CHARACTERS


def test_speeds_are_shown_over_ours_and_what_did_not_run_says_why() -> None:
    outcome = Outcome("real text, batch 8", "tokens/s", OURS, {OURS: [20.0, 30.0], GENERATE: [10.0, 10.0]})
    outcome.values[INT4] = [30.0, 30.0]
    outcome.failures[LLAMA_CPP] = "loading: no memory"
    found = Comparison({"cores": "2"}, {"dtype": "bfloat16", "threads": 2, "rounds": 2})
    found.versions[OURS] = {"torch": "2"}
    found.missing[VLLM] = "make venv-vllm"
    found.subjects["model"] = [outcome]
    report = Report("Speed", "how", machine={"cores": "2"})
    speed.SECTION.write(report, {"speed-8": found.as_dict()})
    text = report.markdown()
    assert "| 8 | turnout, int4 | 30.0 [30.0, 30.0] | 0.83 [0.67, 1.00] |  |" in text
    assert "| 8 | generate | 10.0 [10.0, 10.0] | 2.50 [2.00, 3.00] | 3.00 [3.00, 3.00] |" in text
    assert "| 8 | vLLM | not measured: make venv-vllm |  |  |" in text
    assert "| 8 | llama.cpp | not measured: loading: no memory |  |  |" in text
    assert LLAMA_CPP_SHIPPED not in text  # came after the piece
    assert "turnout: torch 2" in text


def test_a_default_below_its_floor_is_named() -> None:
    def way(ratio: float, equal: int = 2) -> dict[str, Any]:
        spread = [ratio, ratio, ratio]
        return {"ratio": spread, "drafted": 0.5, "accepted": 0.25, "equal": equal, "answers": 2}

    def values(ratio: float) -> Values:
        ways = {"plain": way(1.0), "default": way(ratio), "copyspec": way(1.5, equal=1)}
        return {"rounds": 3, "tokens": 96, "missing": {"swift": "no layers"}, "ways": ways}

    report = Report("Speculation", "how", machine={"cores": "2"})
    speculation.SECTION.write(report, {"speculation-code-1": values(0.9), "speculation-edit-8": values(1.2)})
    text = report.markdown()
    assert "| copyspec | 1.50 [1.50, 1.50] (0.5, 25%) |" in text
    assert "The default: below 0.97: code 0.90." in text
    assert "The default: met." in text
    assert "copyspec (speculation-code-1) 1 of 2" in text
    assert "Did not run: swift: no layers." in text


def test_a_page_of_pieces_names_the_machine_of_the_busiest() -> None:
    loads = {"one": "0.9", "two": "6.9", "three": "1.7"}
    kept = {name: {"machine": {"load average at start": load}} for name, load in loads.items()}
    assert Pieces(None, kept).busiest() == {"load average at start": "6.9"}
    assert Pieces(None).busiest() is None
