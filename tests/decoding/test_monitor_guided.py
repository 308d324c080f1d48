"""Names after a dot are those that a provider knows; without a dot answers are plain; what was applied is repeated."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch

from decoding.calibration import RAN
from decoding.fakes import ListText, TableModel, pair
from decoding.identifier_automaton import NameAutomaton, code_tokens
from decoding.identifiers.base import PACKAGE, IdentifierProvider
from decoding.identifiers.listed import Listed
from decoding.model import Request
from decoding.sequence import Sequence
from decoding.token_trie import DEAD
from turnout.errors import TurnoutError
from turnout.registry import get_method, names
from turnout.types import SamplingParams, Token

TEXTS = [
    *("", "obj", ".", "get", "X", "Y", "Z", "XY", "X(", "()", " ", "\n", ".get", ".put", "obj.", "Size", "put"),
    *(".getX ", "=", ".\n", "a.b", "_", "1"),
]  # fmt: skip
END = 0
IDS = {text: token for token, text in enumerate(TEXTS)}
NAMES = {"obj": ["getX", "getY", "getSize"], "other": ["put"]}


def model(seed: int, dots: bool = True) -> TableModel:
    """What comes next depends on the last token only, at random; many dots, or none."""
    table = torch.randn((len(TEXTS), len(TEXTS)), generator=torch.Generator().manual_seed(seed)) * 1.5
    has_dot = torch.tensor(["." in text for text in TEXTS])
    table += torch.where(has_dot, 2.0 if dots else -100.0, 0.0)
    table[:, END] -= 3.0
    return TableModel("large", lambda tokens: table[tokens[-1]], len(TEXTS), num_parameters=10)


async def answer(
    seed: int, method: str = "monitor_guided", large: TableModel | None = None, prompt: str = "obj",
    begun: tuple[int, ...] = (), sampling: dict[str, Any] | None = None, **params: Any,
) -> Request:  # fmt: skip
    large, info = large or model(seed % 3), get_method(method)
    seq = Sequence([IDS[prompt]], SamplingParams(max_tokens=24, **(sampling or {})), seed, (END,))
    for token in begun:
        seq.append(Token(token, "large"))
    given = params if method == "plain" else {"provider": {"name": "listed", "names": NAMES}, **params}
    request = Request("r", seq)
    async for segment in info.run(request, pair(large, large, ListText(TEXTS)), info.parse(given)):
        assert segment.tokens
    return request


def text(request: Request) -> str:
    return "".join(TEXTS[token] for token in request.sequence.tokens)


def used_names(code: str) -> list[str]:
    """Identifiers after a dot that stands behind `obj`; the last may have only begun."""
    return re.findall(r"\bobj\.(\w+)", code)


async def test_names_are_those_that_the_provider_knows() -> None:
    several = 0
    for seed in range(30):
        code = text(await answer(seed))
        *whole, last = [*used_names(code), ""]
        last = whole.pop() if not last and whole and code.endswith(whole[-1]) else last
        assert set(whole) <= set(NAMES["obj"]), code
        assert any(name.startswith(last) for name in NAMES["obj"]), code
        several += len(whole)
    assert several > 20
    free = [name for seed in range(30) for name in used_names(text(await answer(seed, "plain")))]
    assert not set(free) <= set(NAMES["obj"]), "the model alone writes other names"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"logprobs": 2}])
async def test_without_a_dot_an_answer_is_that_of_plain(sampling: dict[str, Any]) -> None:
    for seed in range(5):
        one = await answer(seed, large=model(seed, dots=False), sampling=sampling)
        plain = await answer(seed, "plain", model(seed, dots=False), sampling=sampling)
        assert one.sequence.generated == plain.sequence.generated
        assert not one.extra


async def test_where_nothing_is_known_an_answer_is_that_of_plain() -> None:
    for seed in range(8):
        one, plain = await answer(seed, provider="listed"), await answer(seed, "plain")
        assert one.sequence.answer == plain.sequence.answer


@pytest.mark.parametrize(
    ("before", "allowed", "refused"),
    [
        ("", ["get"], ["X", "put", "()", "."]),
        ("get", ["X", "Y", "X(", "Size"], ["Z", "XY", "()", "get"]),
        ("getX", ["()", " ", "\n", ".", "=", ".put"], ["X", "_", "1"]),
        ("getX(", TEXTS[1:], []),
    ],
)
def test_tokens_after_a_dot(before: str, allowed: list[str], refused: list[str]) -> None:
    """The example of the paper's card, with a name that another begins."""
    automaton = NameAutomaton(NAMES["obj"])
    state = automaton.read(before.encode())
    trie = code_tokens(ListText(TEXTS), len(TEXTS)).trie
    found = {TEXTS[token] for token in trie.allowed(automaton, state).tolist()}
    assert found >= set(allowed)
    assert not found & set(refused)


def test_a_name_may_begin_another() -> None:
    automaton = NameAutomaton(["get", "getX"])
    assert automaton.is_final(automaton.read(b"get"))
    assert automaton.read(b"getX") != DEAD
    assert automaton.read(b"get ") == automaton.free
    assert automaton.read("get\u00e9".encode()) == DEAD


async def test_a_name_that_the_prompt_has_begun_is_ended() -> None:
    table = torch.zeros((len(TEXTS), len(TEXTS)))
    table[:, IDS["Z"]] = 5.0  # the model would not
    table[:, END] = -100.0
    large = TableModel("large", lambda tokens: table[tokens[-1]], len(TEXTS))
    found = await answer(1, large=large, begun=(IDS["."], IDS["get"]))
    assert used_names(text(found))[0] in NAMES["obj"]


async def test_an_answer_that_was_begun_elsewhere_goes_the_same_way() -> None:
    for seed in range(6):
        whole = (await answer(seed)).sequence.answer
        for count in range(0, len(whole), 3):
            again = await answer(seed, begun=tuple(whole[:count]))
            assert again.sequence.answer == whole


async def test_a_recorded_answer_is_repeated_without_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [await answer(seed) for seed in range(10)]
    assert any(each.extra for each in found)

    async def fail(self: Listed, code: str) -> list[str]:
        raise AssertionError("it was asked")

    monkeypatch.setattr(Listed, "names", fail)
    for seed, each in enumerate(found):
        recorded = each.extra.get(RAN, {}).get("recorded", {})
        again = await answer(seed, recorded=recorded)
        assert again.sequence.answer == each.sequence.answer
        assert again.extra == each.extra
    with pytest.raises(AssertionError, match="it was asked"):
        await answer(3)


async def test_a_provider_that_hangs_is_cut_and_any_name_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []

    async def hang(self: Listed, code: str) -> list[str]:
        try:
            await asyncio.Event().wait()
        finally:
            cut.append(code)
        return []

    monkeypatch.setattr(Listed, "names", hang)
    found = await answer(3, deadline_s=0.001)
    assert found.sequence.answer == (await answer(3, "plain")).sequence.answer
    recorded = found.extra[RAN]["recorded"]
    [applied] = recorded.values()
    assert [each["names"] for each in applied] == [[]] * len(cut)
    assert [each["at"] for each in applied] == [len(code) for code in cut]
    monkeypatch.undo()
    again = await answer(3, recorded=recorded)
    assert again.sequence.answer == found.sequence.answer, "what was late is late again"


async def test_a_name_that_no_token_continues_frees_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unwritable(self: Listed, code: str) -> list[str]:
        return ["qqq"]

    monkeypatch.setattr(Listed, "names", unwritable)
    found = await answer(3)
    assert "." in text(found)
    assert found.sequence.finished


async def test_every_token_with_a_wrong_name_is_refused_at_last() -> None:
    """All probability is on a token that holds a dot and a wrong name, then on others that do."""
    table = torch.zeros((len(TEXTS), len(TEXTS)))
    table[:, IDS[".put"]] = 50.0
    table[:, IDS["a.b"]] = 40.0
    large = TableModel("large", lambda tokens: table[tokens[-1]], len(TEXTS))
    found = await answer(1, large=large, sampling={"temperature": 0.0})
    assert "obj.put" not in text(found)
    assert "a.b" in text(found), "of what stands before it nothing is known"


async def test_a_structure_is_refused() -> None:
    with pytest.raises(TurnoutError, match="structure: does not go with method 'monitor_guided'"):
        await answer(1, sampling={"structure": {"regex": "a"}})


BAD: list[tuple[str, dict[str, Any]]] = [
    ("deadline_s", {"deadline_s": 0.0}), ("deadline_s", {"deadline_s": float("nan")}),
    ("deadline_s", {"deadline_s": 1e9}),
    ("provider", {"provider": "eslint"}), ("provider", {"provider": {"name": "listed", "name_s": 1}}),
    ("names", {"provider": {"name": "listed", "names": {"a": [""]}}}), ("recorded", {"recorded": {"1": [{"at": -1}]}}),
    ("path", {"provider": {"name": "jedi", "path": "../a.py"}}),
    ("path", {"provider": {"name": "jedi", "path": "/a.py"}}),
    ("files", {"provider": {"name": "jedi", "files": {"a/../../b.py": ""}}}),
    ("files", {"provider": {"name": "jedi", "files": {"a.py": "x" * 300_000}}}),
    ("files", {"provider": {"name": "jedi", "files": {"x" * 300 + ".py": ""}}}),
    ("path", {"provider": {"name": "jedi", "path": "\u00fc" * 150 + ".py"}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "params"), BAD)
def test_bad_parameters_are_refused_by_name(field: str, params: dict[str, Any]) -> None:
    with pytest.raises(TurnoutError, match=field):
        get_method("monitor_guided").parse(params)


def test_a_provider_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.identifiers.jedi.find_spec", lambda name: None)
    large, info = model(0), get_method("monitor_guided")
    params = info.parse({"provider": "jedi"})
    with pytest.raises(TurnoutError, match=r"provider: jedi is not installed: pip install 'turnout\[code\]'"):
        params.check_parts(pair(large, large, ListText(TEXTS)))


def test_every_provider_is_one_file() -> None:
    from turnout.registry import load

    assert "listed" in names(PACKAGE)
    assert all(issubclass(load(PACKAGE, name, "part").PART, IdentifierProvider) for name in names(PACKAGE))
