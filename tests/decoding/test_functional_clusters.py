"""Functional clusters (paper #67): programs that do the same are one cluster, whatever their text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.fakes import ListText, TableModel, pair
from decoding.model import MEASURES, Request
from decoding.program_harness import behaviour, shown, signature
from decoding.program_inputs import KINDS, common_annotations, make_inputs
from decoding.sequence import Sequence
from decoding.uncertainty.base import make_uncertainty
from decoding.uncertainty.functional_clusters import FunctionalClusters, mutual_information
from tests.program_runner import ProgramRunner
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams

LN = math.log


def of(expression: str, params: str = "x: int") -> str:
    return f"Here:\n```python\ndef f({params}):\n    return {expression}\n```\n"


def estimator(**params: Any) -> tuple[FunctionalClusters, ProgramRunner]:
    part, here = make_uncertainty(PartChoice.of("functional_clusters", **params)), ProgramRunner()
    assert isinstance(part, FunctionalClusters)
    model = TableModel("large", lambda tokens: torch.zeros(1), 1)
    models = pair(model, model)
    models.code_executor = here
    part.check(models)
    return part, here


def group(*texts: str, logprobs: list[float] | None = None) -> AnswerSet:
    known = logprobs or [-1.0] * len(texts)
    return AnswerSet([Candidate(text, text, "", (0,), (each,)) for text, each in zip(texts, known, strict=True)])


async def doubt(*texts: str, logprobs: list[float] | None = None, **params: Any) -> float:
    return await estimator(**params)[0].measure(group(*texts, logprobs=logprobs), None)


async def test_what_programs_do_and_not_their_text_makes_clusters() -> None:
    answers = group(of("x + x"), of("2 * x", "x"), of("x * x"))
    part, _ = estimator(estimator="discrete")
    assert await part.measure(answers, None) == pytest.approx(-(2 / 3 * LN(2 / 3) + 1 / 3 * LN(1 / 3)))
    assert answers.measures == {"programs": 3.0, "program_clusters": 2.0}


async def test_the_values_by_hand() -> None:
    same, apart = [of("x + x"), of("2 * x")], [of(f"x + {each}") for each in range(4)]
    for name in ("normalised", "discrete", "share"):
        assert await doubt(*same, estimator=name) == pytest.approx(0.0)
    for name, value in (("normalised", LN(4)), ("discrete", LN(4)), ("share", 0.75)):
        assert await doubt(*apart, estimator=name) == pytest.approx(value)
    three = [of("x + x"), of("2 * x"), of("x * x")]
    weights = [LN(0.5), LN(0.3), LN(0.2)]
    assert await doubt(*three, logprobs=weights) == pytest.approx(0.5004, abs=1e-4)
    uniform = [await doubt(*three, logprobs=each, estimator="discrete") for each in (weights, [-1.0, -9.0, -2.0])]
    assert uniform[0] == uniform[1]


async def test_what_is_not_resolved_counts_as_different_and_what_does_not_parse_not_at_all() -> None:
    fails, cut = of("undefined"), of("x  # cut")
    assert await doubt(fails, of("undefined + 1"), estimator="discrete") == pytest.approx(LN(2))
    assert await doubt(cut, of("x"), estimator="discrete") == pytest.approx(LN(2))
    assert await doubt(cut, cut, fails, fails, estimator="discrete") == pytest.approx(LN(2))  # a text is like itself
    assert await doubt("no program", of("x"), "def f(", of("1 * x"), estimator="discrete") == 0.0
    assert await doubt("no program", "def f(", estimator="discrete") == pytest.approx(LN(2))
    assert await doubt("no program", "def f(", "(" * 200, estimator="share") == pytest.approx(2 / 3)


async def test_what_most_programs_refuse_is_no_input() -> None:
    """Of any type, only texts are what these take; one of them answers for numbers too."""
    takes = ["x.upper()", "str.upper(x)", "x.upper() if isinstance(x, str) else 0"]
    assert await doubt(*(of(each, "x") for each in takes[:2]), generated=16) == 0.0
    assert await doubt(*(of(each, "x") for each in takes), generated=16) == pytest.approx(0.0)
    assert await doubt(*(of(each, "x") for each in takes), inputs=[[1]]) > 0.5  # given, it is one
    fewer = [of(f"dict([(True, x)])[isinstance(x, {kind})]", "x") for kind in ("int", "str", "list")]
    assert await doubt(*fewer, generated=6, estimator="discrete") == pytest.approx(LN(3))  # nothing is left to compare
    assert await doubt(of("x", "x"), "print(1)", "print(int('1'))", estimator="share") == pytest.approx(1 / 3)


async def test_inputs_of_the_request_tell_programs_apart() -> None:
    answers = [of("sorted(x)", "x"), of("sorted(set(x))", "x")]
    assert await doubt(*answers, inputs=[[[2, 1]]], generated=0) == 0.0
    assert await doubt(*answers, inputs=[[[2, 1]], [[1, 1]]], generated=0) > 0.5
    assert await doubt(*answers) > 0.5  # generated ones find it


async def test_scripts_read_and_print_and_changes_of_arguments_are_seen() -> None:
    scripts = ["print(int(input()) * 2)", "n = int(input())\nprint(n + n)\n", "print(input())", "x = 1"]
    part, here = estimator(estimator="discrete", inputs=["4", "5"])
    value = await part.measure(group(*scripts), None)
    assert value == pytest.approx(-(0.5 * LN(0.5) + 0.5 * LN(0.25)))
    main = "def main():\n    print(int(input()) + int({}))\n\nif __name__ == '__main__':\n    main()\n"
    assert await doubt(main.format("'2'"), main.format("2"), inputs=["4"]) == 0.0
    assert {task["name"] for task in here.tasks if "inputs" in task} == {""}
    places = ["def f(a: list[int]):\n    a.sort()\n", "def f(a: list[int]):\n    a[:] = sorted(a)\n"]
    assert await doubt(*places, "def f(a: list[int]):\n    a.reverse()\n", estimator="share") == pytest.approx(1 / 3)


def test_what_is_called() -> None:
    assert signature("def a(x): pass\ndef b(y: int, z=1): pass\ndef _c(): pass", "") == {
        "parses": True, "name": "b", "params": ["int"],
    }  # fmt: skip
    assert signature("def a(x): pass\ndef b(): pass", "a")["name"] == "a"
    assert signature("class S:\n    def go(self, s: 'str', k): pass", "")["params"] == ["'str'", ""]
    assert signature("def main(): pass", "") == {"parses": True, "name": "", "params": []}
    assert signature("def a(x): pass", "b") == {"parses": True, "name": "b", "params": None}
    assert behaviour("class S:\n    def go(self, k): return k", "S.go", [[1]], 5.0) == ["= 1"]
    assert behaviour("def f(x): return 1 / x", "f", [[1], [0]], 5.0) == ["= 1", "! ZeroDivisionError"]
    assert behaviour("def f(x):\n    while x: pass\n    return x", "f", [[1], [0]], 0.05) == ["late", "= 0"]
    assert behaviour("raise KeyError", "f", [[1], [2]], 5.0) == ["! KeyError"] * 2


def test_equal_values_look_the_same() -> None:
    assert shown({"b": 2.0, "a": {3, 1}}) == shown({"a": {1, 3}, "b": 2}) == "{'a': {1, 3}, 'b': 2}"
    assert shown((1, "1")) != shown([1, "1"]) != shown([1, 1])
    assert shown(iter([1, 2])) == "iterator[1, 2]"
    assert shown([1] * 1000) == shown([1.0] * 1000) != shown([1] * 1001)
    deep: list[Any] = []
    deep.append(deep)
    assert len(shown(deep)) < 200


def test_generated_inputs_have_the_named_types() -> None:
    asked = ["int", "List[str]", "dict[str, list[int]]", "Optional[float]", "tuple[int, str]", "int | None", "'bool'"]
    made = make_inputs(asked, 20)
    assert made == make_inputs(asked, 20)
    for number, texts, table, maybe, both, some, flag in made:
        assert type(number) is int
        assert all(isinstance(each, str) for each in texts)
        assert all(isinstance(each, list) for each in table.values())
        assert maybe is None or isinstance(maybe, float)
        assert [type(each) for each in both] == [int, str]
        assert some is None or isinstance(some, int)
        assert isinstance(flag, bool)
    assert len({repr(each) for each in made}) == 20
    untyped = make_inputs(["", ""], 2 * len(KINDS))
    assert len({type(first) for first, _ in untyped}) >= 5
    assert all(type(first) is type(second) for first, second in untyped[::2])
    assert common_annotations([["", "int"], ["str", ""], ["a", "b", "c"]]) == ["str", "int"]
    assert make_inputs(["(" * 300, "numpy.ndarray"], 3)


def test_the_information_that_an_answer_gives_about_the_next() -> None:
    assert mutual_information([(0, 0), (0, 1), (1, 0), (1, 1)]) == pytest.approx(0.0)
    assert mutual_information([(0, 0), (1, 1)]) == pytest.approx(LN(2))
    assert mutual_information([(0, 0)] * 5) == pytest.approx(0.0)


async def test_a_second_answer_is_drawn_with_the_first_in_its_prompt() -> None:
    """Firsts are any of two programs; seconds repeat them, or are drawn as if alone."""
    texts = ["def f(x): return x", "def f(x): return -x", "", "?", "\n"]
    codec = Programs(texts)

    for repeats, value in ((True, LN(2)), (False, 0.0)):

        def logits(tokens: list[int], repeats: bool = repeats) -> torch.Tensor:
            row = torch.full((5,), -50.0)
            if tokens[-1] in (0, 1):
                row[2] = 0.0  # the end
            elif repeats and len(tokens) > 1:
                row[tokens[-2]] = 0.0
            else:
                row[:2] = 0.0
            return row

        model = TableModel("large", logits, 5)
        models = pair(model, model, codec)
        models.code_executor = ProgramRunner()
        part = make_uncertainty(PartChoice.of("functional_clusters", estimator="mutual_information", samples=60))
        part.check(models)
        seq = Sequence([3], SamplingParams(max_tokens=4), 7, (2,))
        drawn = await part.samples(seq, model, models)
        found = await part.measure(AnswerSet(drawn, seq.seed, seq, model, models), None)
        assert found == pytest.approx(value, abs=0.05)
        assert set(model.cached) <= {seq}
        assert seq.meter.models["large"].discarded_tokens == 2 * 60 * 2


class Programs(ListText):
    """Knows its texts, and a question that holds one of them, which ends with it and a blank line."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [*[place for place in (0, 1) if self.texts[place] in text][:1], 4] if text else []


# What is done with it.

TEXTS = [
    "def f(x: int): return x",
    "\n\n",
    "def f(x: int): return 1 * x",
    "def f(x: int): return -x",
    "broken sandbox",
    "",
]


def writing(*chances: float) -> TableModel:
    """Writes one text of `TEXTS`, each with its chance, then ends (5)."""
    first = torch.tensor([*chances, *[0.0] * (6 - len(chances))]).clamp_min(1e-20).log()
    last = torch.full((6,), -50.0)
    last[5] = 0.0
    return TableModel("large", lambda tokens: first if len(tokens) == 1 else last, 6)


async def told(model: TableModel, executor: Any, **params: Any) -> Request:
    models = pair(model, model, ListText(TEXTS))
    models.code_executor = executor
    request = Request("r", Sequence([1], SamplingParams(max_tokens=4), 3, (5,)))
    info = get_method("abstain")
    choice = {"name": "functional_clusters", "samples": 12, "estimator": "share"}
    async for _ in info.run(request, models, info.parse({"uncertainty": choice, "text": "", **params})):
        pass
    return request


@pytest.mark.parametrize(("chances", "abstains"), [((0.5, 0, 0.5), False), ((0.5, 0, 0, 0.5), True)])
async def test_programs_that_differ_in_what_they_do_are_not_answered(chances: Any, abstains: bool) -> None:
    request = await told(writing(*chances), ProgramRunner(), abstain_above=0.2)
    assert request.extra[MEASURES]["abstained"] == float(abstains)
    assert bool(request.sequence.answer) is not abstains
    assert request.extra[MEASURES]["program_clusters"] == 1.0 + abstains


async def test_a_sandbox_that_fails_leaves_the_answer_and_one_that_is_not_there_is_refused() -> None:
    request = await told(writing(0, 0, 0, 0, 1.0), ProgramRunner(), abstain_above=-1.0)
    assert request.sequence.answer
    assert request.notes == ["uncertainty 'functional_clusters' was not measured (the sandbox cannot run here)"]
    with pytest.raises(TurnoutError, match=r"^method\.params\.uncertainty: .* the pool has no sandbox"):
        await told(writing(1.0), None)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"inputs": ["1", [2]]}, "inputs: must be lists of arguments alone, or texts alone"),
        ({"inputs": ["1"], "entry": "f"}, "entry: must be empty"),
        ({"generated": 0}, "generated: must be at least 1"),
        ({"entry": "f; import os"}, "entry: "),
    ],
)
def test_refusals(params: dict[str, Any], said: str) -> None:
    with pytest.raises(TurnoutError, match=r"uncertainty\." + said):
        make_uncertainty(PartChoice.of("functional_clusters", **params))
