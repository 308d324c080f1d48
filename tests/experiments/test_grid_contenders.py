"""The table of methods is the registry's: nothing is left out, and what stands in it fits together."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.artifacts import Artifacts
from decoding.fakes import ListText, TableModel, markov
from decoding.methods.speculative import SpeculativeParams, make_parts
from decoding.model import ModelPool
from experiments.grid.contenders import PLAIN, Family, artifacts_of, contenders, lacking
from turnout.registry import load, names

TABLE = contenders()


def models() -> ModelPool:
    import torch

    table: Any = {name: TableModel(name, markov(torch.eye(4)), 4) for name in ("small", "large")}
    return ModelPool(table, {"small": "small", "large": "large"}, ListText(list("abcd")), Artifacts())


def test_every_part_of_the_registry_is_tried() -> None:
    parts = [make_parts(SpeculativeParams.model_validate(c.params)) for c in TABLE.values() if c.params is not None]
    drafters = {arm.drafter.name for arms, _, _ in parts for arm in arms if not arm.drafter.name.startswith("_")}
    assert drafters == set(names("decoding.drafters"))
    assert {arm.length.name for arms, _, _ in parts for arm in arms} == set(names("decoding.lengths"))
    assert {selector.name for _, selector, _ in parts} == set(names("decoding.selectors"))
    assert {verifier.name for _, _, verifier in parts} == set(names("decoding.verifiers"))
    assert TABLE[PLAIN].params is None


def test_a_drafter_has_the_verifier_that_suits_what_it_makes() -> None:
    fixed = {"length": "fixed"}
    assert TABLE["copyspec"].params == {"drafter": "copyspec", "verifier": "match", **fixed}
    assert TABLE["rsd_s"].params == {"drafter": "rsd_s", "verifier": "rejection", **fixed}
    assert TABLE["model_sequences"].params == {"drafter": "model_sequences", "verifier": "spectr", **fixed}
    assert TABLE["model_chain+rejection"].sampled_only
    assert "copyspec+rejection" not in TABLE


def test_what_is_promised_about_the_text_is_the_verifiers_promise() -> None:
    for contender in TABLE.values():
        if contender.params is None:
            continue
        verifier = load("decoding.verifiers", contender.params.get("verifier", "match"), "verifier").PART
        assert contender.lossless == verifier.lossless
        assert contender.seeded == (verifier.name == "match")


def test_who_chooses_how_much_to_draft_is_marked() -> None:
    chosen = {name for name, contender in TABLE.items() if contender.automatic}
    assert {"default", "model_chain+thompson", "ucb+smartspec", "exp3+smartspec"} <= chosen
    # A policy that drafts a token at least chooses no more than how long a draft is.
    always = {f"model_chain+{name}" for name in ("svip", "confidence", "disco", "specdecpp")} | {"ucb", "exp3"}
    assert always <= set(TABLE)
    assert not {PLAIN, "model_chain", "first", "copyspec", *always} & chosen
    assert all(TABLE[name].family in (Family.LENGTH, Family.SELECTOR) for name in chosen)


def test_every_drafter_is_tried_where_it_may_be_left_out() -> None:
    for name in names("decoding.drafters"):
        alone, controlled = TABLE[name], TABLE[f"{name}+smartspec"]
        assert controlled.params == {**(alone.params or {}), "length": "smartspec"}
        assert controlled.automatic
        assert not controlled.sampled_only


@pytest.mark.parametrize("name", ["medusa", "model_chain+disco", "model_chain+judge"])
def test_what_needs_an_artifact_says_that_it_is_missing(name: str) -> None:
    why = lacking(TABLE[name], models())
    assert why is not None
    assert f"'{artifacts_of(TABLE[name])[0]}' is not known" in why


def test_what_needs_none_can_run() -> None:
    for name in (PLAIN, "copyspec", "model_chain", "ucb"):
        assert lacking(TABLE[name], models()) is None
        assert artifacts_of(TABLE[name]) == []
