"""Every constraint kind: its examples fit, masks depend on tokens alone, and single tokens are judged as masks do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from decoding.constraints.base import PACKAGE, ConstraintKind, allows
from decoding.structures import check, public_kinds, short_form
from tests.constrained import allowed_ids, byte_compiler, ids_of
from turnout.errors import TurnoutError
from turnout.registry import load, names
from turnout.structure import Structure

KINDS: dict[str, type[ConstraintKind]] = {name: load(PACKAGE, name, "part").PART for name in names(PACKAGE)}
EXAMPLES = [(name, value, text) for name, kind in KINDS.items() for value, text in kind.examples]
IDS = [f"{name}-{place}" for place, (name, _, _) in enumerate(EXAMPLES)]


@pytest.mark.parametrize(("name", "value", "text"), EXAMPLES, ids=IDS)
def test_an_example_fits_and_its_beginnings_do_not_end(name: str, value: str, text: str) -> None:
    made, ids = byte_compiler().compile(Structure(kind=name, value=value)).clone(), ids_of(text)
    assert made.accepts(ids)
    for place, token in enumerate(ids):
        allowed = allowed_ids(made, ids[:place])
        assert allowed is not None
        assert token in allowed
        assert made.accepts(ids[:place]) == bool(made.end_ids & set(allowed))
    [after] = made.masks(ids, [()])
    assert any(allows(after, end) for end in made.end_ids)
    assert made.masks([*ids, next(iter(made.end_ids))], [()]) == [None]


@pytest.mark.parametrize(("name", "value", "text"), EXAMPLES, ids=IDS)
def test_masks_depend_on_tokens_alone(name: str, value: str, text: str) -> None:
    """Drafts that are taken back, clones, and beginnings anew change nothing."""
    compiler, draw, ids = byte_compiler(), random.Random(4), ids_of(text)
    walked = compiler.compile(Structure(kind=name, value=value))
    for _ in range(12):
        answer = ids[: draw.randrange(len(ids) + 1)]
        path = tuple(ids[len(answer) : len(answer) + draw.randrange(4)])
        path = path if draw.random() < 0.7 else (draw.randrange(99),)
        fresh = compiler.compile(Structure(kind=name, value=value))
        wanted = fresh.masks(answer, [path, ()])
        walked = walked.clone() if draw.random() < 0.3 else walked
        for one, other in zip(walked.masks(answer, [path, ()]), wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or np.array_equal(one, other)


@pytest.mark.parametrize(("name", "value", "text"), EXAMPLES, ids=IDS)
def test_a_token_is_permitted_where_the_mask_allows_it(name: str, value: str, text: str) -> None:
    compiler, ids = byte_compiler(), ids_of(text)
    asked, masked = (compiler.compile(Structure(kind=name, value=value)) for _ in range(2))
    for place in range(len(ids) + 1):
        half = place // 2
        for answer, path in ((ids[:place], ()), (ids[:half], tuple(ids[half:place])), (ids[:place], (7,))):
            [mask] = masked.masks(answer, [path])
            tokens = {*ids, *asked.end_ids, *range(0, 300, 41)}
            assert all(asked.permits(answer, path, token) == allows(mask, token) for token in tokens)


@pytest.mark.parametrize("name", KINDS)
def test_values_are_checked_and_written_as_they_were_given(name: str) -> None:
    kind = KINDS[name]
    for value, _ in kind.examples:
        structure = Structure(kind=name, value=value)
        assert check(structure) is kind
        if kind.public:
            again = Structure.model_validate(short_form(structure))
            assert check(again) is kind
            assert short_form(again) == short_form(structure)
    if "" not in dict(kind.examples):
        with pytest.raises(TurnoutError, match="structure"):
            check(Structure(kind=name))
    with pytest.raises(TurnoutError, match="too large"):
        check(Structure.model_construct(kind=name, value="a" * (kind.max_chars + 1)))


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(TurnoutError, match=", ".join(names(PACKAGE))):
        check(Structure(kind="xml", value="a"))
    assert public_kinds() == [name for name in names(PACKAGE) if name != "tools"]
