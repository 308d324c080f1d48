"""What a request for speculation may ask and gets refused, or served plainly with a note where it said so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool.local_pool import LocalPool
from tests.engine.harness import ask, pair_config
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.config import MethodChoice
from turnout.errors import Code, TurnoutError

PROMPT = [72, 101, 108, 108, 111]
# Parameters, the field that is named, and what the message says: the reason, and what would be allowed.
WRONG: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "no nodes": ({"nodes": 0}, "nodes", ("greater than or equal to 1", "got 0")),
    "too many nodes": ({"nodes": 10_000}, "nodes", ("less than or equal to 512", "got 10000")),
    "too many nodes of an arm": (
        {"drafter": [{"drafter": "rsd_s", "nodes": 10_000}]},
        "drafter.0.nodes",
        ("less than or equal to 512",),
    ),
    "no depth": ({"draft_length": 0}, "draft_length", ("greater than or equal to 1",)),
    "a sampled tree for one-hot drafts": (
        {"drafter": "rsd_s", "verifier": "typical"},
        "verifier",
        ("'typical' judges fixed drafts, 'rsd_s' makes drawn", "'rsd_s' goes with", "match, rejection"),
    ),
    "a chosen tree for drawn sequences": (
        {"drafter": "model_tree", "verifier": "spectr"},
        "verifier",
        ("'spectr' judges sequences drafts", "'model_tree' goes with", "match"),
    ),
    "a policy that looks at tokens": (
        {"drafter": "copyspec", "length": "svip"},
        "length",
        ("'copyspec' drafts them at once", "fixed", "smartspec"),
    ),
    "an unknown drafter": ({"drafter": "no_such"}, "drafter", ("'no_such' is not known", "copyspec", "model_chain")),
    "an unknown parameter of a part": (
        {"drafter": {"name": "copyspec", "gama": 3}},
        "drafter.gama",
        ("unknown", "gamma", "occurrence"),
    ),
    "a drafter that is none": ({"drafter": 5}, "drafter", ("input should be a valid dictionary",)),
    "a list with something else in it": ({"drafter": ["copyspec", 5]}, "drafter.1", ("valid dictionary",)),
    "an arm without a drafter": ({"drafter": [{"nodes": 5}]}, "drafter.0.drafter", ("field required",)),
    "an unknown field of an arm": (
        {"drafter": [{"drafter": "copyspec", "depth": 5}]},
        "drafter.0.depth",
        ("unknown", "drafter", "length", "nodes"),
    ),
    "an unknown drafter in a list": ({"drafter": ["copyspec", "no_such"]}, "drafter.1", ("'no_such' is not known",)),
    "an unknown drafter of an arm": (
        {"drafter": ["copyspec", {"drafter": "no_such"}]},
        "drafter.1.drafter",
        ("'no_such' is not known",),
    ),
    "an unknown parameter of a part in a list": (
        {"drafter": [{"name": "copyspec", "gama": 3}]},
        "drafter.0.gama",
        ("unknown", "gamma", "occurrence"),
    ),
    "an unknown parameter of an arm's part": (
        {"drafter": [{"drafter": {"name": "copyspec", "gama": 3}}]},
        "drafter.0.drafter.gama",
        ("unknown", "gamma", "occurrence"),
    ),
    "an unknown policy of an arm": (
        {"drafter": ["copyspec", {"drafter": "aded", "length": "no_such"}]},
        "drafter.1.length",
        ("'no_such' is not known", "fixed", "svip"),
    ),
    "a wrong parameter of an arm's policy": (
        {"drafter": [{"drafter": "model_chain", "length": {"name": "svip", "most": 0}}]},
        "drafter.0.length.most",
        ("greater than or equal to 1",),
    ),
    "a policy of an arm that looks at tokens": (
        {"drafter": ["aded", {"drafter": "copyspec", "length": "svip"}]},
        "drafter.1.length",
        ("'copyspec' drafts them at once", "fixed", "smartspec"),
    ),
    "a policy for all arms that looks at tokens": (
        {"drafter": ["model_chain", {"drafter": "copyspec"}], "length": "svip"},
        "length",
        ("'copyspec' drafts them at once",),
    ),
    "more drafters than anybody needs": (
        {"drafter": ["copyspec"] * 17},
        "drafter",
        ("has 17 drafters; at most 16",),
    ),
    "a shape that takes seconds to plan": (
        {"drafter": {"name": "sequoia", "ranks": 32}, "nodes": 512, "draft_length": 64},
        "nodes",
        ("ranks x depth x nodes^2 = 32 x 64 x 512^2", "fewer nodes"),
    ),
    "such a shape in a list": (
        {"drafter": [{"drafter": {"name": "sequoia", "ranks": 32}, "nodes": 512}]},
        "drafter.0.nodes",
        ("32 x 10 x 512^2",),
    ),
    "such a shape in a trimmed vocabulary": (
        {"drafter": {"name": "vocab_trim", "drafter": {"name": "sequoia", "ranks": 32}}, "nodes": 512},
        "nodes",
        ("32 x 10 x 512^2",),
    ),
    "no drafter": ({"drafter": []}, "drafter", ("is empty",)),
    "a missing artifact": ({"drafter": "medusa"}, "drafter.artifact", ("'medusa' is not known; available: none",)),
    "a missing length artifact": ({"length": "disco"}, "length.artifact", ("'disco' is not known",)),
    "a missing artifact in a list": (
        {"drafter": ["copyspec", "medusa"]},
        "drafter.1.artifact",
        ("'medusa' is not known",),
    ),
    "an arm's missing artifact": (
        {"drafter": ["copyspec", {"drafter": {"name": "rasd_heads", "artifact": "gone"}}]},
        "drafter.1.drafter.artifact",
        ("'gone' is not known",),
    ),
    "an arm's missing length artifact": (
        {"drafter": ["copyspec", {"drafter": "model_chain", "length": "disco"}]},
        "drafter.1.length.artifact",
        ("'disco' is not known",),
    ),
    "a trimmed target in a list": (
        {"drafter": ["aded", {"name": "vocab_trim", "drafter": "copyspec"}]},
        "drafter.1.drafter",
        ("'copyspec' does not draft with the small model",),
    ),
    "a trimmed target": (
        {"drafter": {"name": "vocab_trim", "drafter": "copyspec"}},
        "drafter.drafter",
        ("'copyspec' does not draft with the small model",),
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
async def test_a_refusal_names_the_field_and_the_reason(pool: LocalPool, case: str) -> None:
    params, field, says = WRONG[case]
    with pytest.raises(TurnoutError) as caught:
        await ask(pool, PROMPT, "speculative", params)
    assert caught.value.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
    assert caught.value.field == f"method.params.{field}"
    assert caught.value.message.startswith(f"method.params.{field}: ")
    for each in says:
        assert each in caught.value.message


@pytest.mark.parametrize("case", list(WRONG))
async def test_it_is_served_plainly_where_the_request_said_so(pool: LocalPool, case: str) -> None:
    params, field, says = WRONG[case]
    plain = await ask(pool, PROMPT, "plain")
    reply = await ask(pool, PROMPT, "speculative", {**params, "fallback": "plain"})
    assert reply.ids == plain.ids
    assert reply.usage.speculation.rounds == 0
    [note] = reply.usage.notes
    assert note.startswith(f"decoded plainly: method.params.{field}: ")
    for each in says:
        assert each in note
    # Usage does not name parts that nobody asked for and none of which ran.
    assert {reply.usage.params[name] for name in ("drafter", "length", "verifier", "select", "nodes")} == {None}


async def test_a_wrong_fallback_is_no_fallback(pool: LocalPool) -> None:
    with pytest.raises(TurnoutError, match=r"method\.params\.fallback"):
        await ask(pool, PROMPT, "speculative", {"fallback": "plane"})


async def test_a_draft_model_with_a_vocabulary_of_the_same_size_but_other_tokens_does_not_draft_by_ids(
    pair_folder: Path, tmp_path: Path
) -> None:
    """Token maps are compared, not sizes."""
    random_model(llama_config(num_hidden_layers=2), seed=2).save_pretrained(tmp_path / "small")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "small")
    written = (tmp_path / "small" / "tokenizer.json").read_text()
    swapped = written.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    assert swapped != written
    (tmp_path / "small" / "tokenizer.json").write_text(swapped)
    config = pair_config(pair_folder)
    config.models["small"] = config.models["small"].model_copy(update={"path": str(tmp_path / "small")})
    default = {"name": "speculative", "params": {"drafter": "model_chain"}}
    config.pools["pair"] = config.pools["pair"].model_copy(update={"default": MethodChoice.model_validate(default)})
    with pytest.raises(TurnoutError) as caught:
        LocalPool.load("pair", config)
    assert caught.value.field == "pools.pair.default.params.drafter"
    assert "'model_chain' needs one vocabulary, and that of 'small' is not that of 'large'" in caught.value.message
