"""What a request may ask about its tokens beyond their text: entropy, and which drafts were refused."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.fakes import pair
from decoding.model import Request
from decoding.parts import with_parts
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult, with_rejected
from turnout.registry import all_methods, get_method
from turnout.types import SamplingParams, Token, TokenKind

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("speculative", {}),
    ("speculative", {"verifier": "rejection"}),
    ("speculative", {"drafter": "model_tree"}),
    ("pearl", {}),
    ("pearl", {"verifier": "rejection"}),
    ("entropy_adaptive", {"threshold": 1.0, "window": 2, "min_stay": 2}),
]


async def written(method: str, params: dict[str, Any], seed: int, make_model: Any, **sampling: Any) -> list[Token]:
    info = get_method(method)
    seq = Sequence((1, 2), SamplingParams(max_tokens=40, **sampling), seed)
    models = pair(make_model("small", 1), make_model("large", 2, num_parameters=10))
    async for _ in info.run(Request("r", seq), models, info.parse(params)):
        pass
    return seq.generated


@pytest.mark.parametrize(("method", "params"), METHODS)
@pytest.mark.parametrize("seed", range(4))
async def test_asking_changes_no_token_and_tells_all(
    method: str, params: dict[str, Any], seed: int, make_model: Any
) -> None:
    asked = await written(method, params, seed, make_model, token_details=True)
    unasked = await written(method, params, seed, make_model)
    assert [token[:3] for token in asked] == [token[:3] for token in unasked]
    assert all(token.entropy_bits is not None and token.entropy_bits >= 0 for token in asked)
    assert all(token.rejected == () and token.logprob is None for token in unasked)
    assert all(token.id not in token.rejected for token in asked)
    for token in asked:
        if token.kind in (TokenKind.DECODED, TokenKind.BONUS):
            assert token.rejected == ()
        elif token.kind is TokenKind.RECOVERED and params.get("verifier") != "rejection":
            assert token.rejected


async def test_a_chain_shows_what_was_refused_and_not_what_was_never_judged() -> None:
    draft = DraftTree.chain([3, 4, 5, 6], "small")
    tokens = (Token(3, "small", TokenKind.ACCEPTED), Token(9, "large", TokenKind.RECOVERED))
    assert [token.rejected for token in with_rejected(draft, VerifyResult((0,), tokens))] == [(), (4,)]


async def test_a_tree_shows_each_place_its_siblings_in_the_order_they_were_drawn() -> None:
    draft = DraftTree((3, 4, 3, 7, 8, 7), (-1, -1, -1, 1, 1, 1), "small")
    tokens = (Token(4, "small", TokenKind.ACCEPTED), Token(9, "large", TokenKind.RECOVERED))
    assert [token.rejected for token in with_rejected(draft, VerifyResult((1,), tokens))] == [(3,), (7, 8)]


def test_a_schema_lists_the_parts_its_fields_choose_from() -> None:
    schema = with_parts(get_method("speculative").params.model_json_schema())
    assert set(schema["x-parts"]) == {"drafters", "lengths", "verifiers", "selectors"}
    assert schema["x-parts"]["lengths"]["svip"]["properties"]["threshold"]
    assert schema["properties"]["drafter"]["x-slot"] == "drafters"
    plain = get_method("plain").params.model_json_schema()
    assert with_parts(plain) == plain


@pytest.mark.parametrize("name", [info.name for info in all_methods()])
def test_every_slot_a_schema_names_is_listed(name: str) -> None:
    schema = with_parts(get_method(name).params.model_json_schema())
    named = {field["x-slot"] for field in schema.get("properties", {}).values() if "x-slot" in field}
    by_hand = {field for field, each in schema.get("properties", {}).items() if "PartChoice" in str(each)}
    assert named <= set(schema.get("x-parts", {}))
    assert len(by_hand) == len([each for each in schema.get("properties", {}).values() if "x-slot" in each])
