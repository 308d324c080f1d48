"""Functional clusters: sampled programs are run on inputs, and those that do the same are one cluster (paper #67)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence as Items
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from decoding import program_harness
from decoding.aggregators.base import AnswerSet, Candidate
from decoding.code_execution import CodeExecutor, Execution, code_of
from decoding.model import ModelPool
from decoding.noise import derive_seed
from decoding.other_prompts import write_after
from decoding.program_inputs import common_annotations, make_inputs
from decoding.rollouts import together
from decoding.text import codec_of, continue_with
from decoding.uncertainty.base import FIRST_SAMPLE, SampledParams, SampledUncertainty
from decoding.uncertainty.semantic_entropy import entropy_of_clusters, log_likelihood
from turnout.errors import FieldError, invalid

HARNESS = inspect.getsource(program_harness)
LONGEST = 100_000  # characters of a program that is looked at
SHARE = 0.5  # of a program's processor time that its inputs may take together
SILENT = "= ''"
SECOND = "\n\nOne answer to the question above:\n{answer}\n\nAnother answer to it:\n"

Measure = Literal["normalised", "discrete", "share", "mutual_information"]
CLUSTERS = "entropy of what sampled programs do; 0: all do the same"
MEANINGS: dict[Measure, str] = {
    "normalised": CLUSTERS,
    "discrete": CLUSTERS,
    "share": "sampled programs that do something else than most; 0: all do the same",
    "mutual_information": "how far a program follows another that is shown; 0: not at all",
}


class FunctionalClustersParams(SampledParams):
    """Parameters of `functional_clusters`."""

    samples: Annotated[int, Field(ge=2, le=64, description="programs drawn for the estimate, which are not shown")] = 8
    estimator: Annotated[
        Measure,
        Field(
            description="normalised: entropy of the clusters' probabilities, which sum to 1; discrete: entropy of the"
            " shares of programs; share: the share of programs outside the largest cluster; mutual_information: of a"
            " first program's cluster and of that of a second, drawn for each with the first in its prompt"
        ),
    ] = "normalised"
    by_length: Annotated[
        bool, Field(description="whether a program's log-probability is the mean over its tokens, not the sum")
    ] = True
    entry: Annotated[
        str,
        Field(
            pattern=r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)?)?$",
            max_length=200,
            description="function or Class.method that is called; empty: the last public one, else all of it runs",
        ),
    ] = ""
    inputs: Annotated[
        tuple[list[Any] | str, ...],
        Field(
            max_length=64,
            description="on what programs are compared: lists of arguments, or texts that whole programs read as their"
            " standard input",
        ),
    ] = ()
    generated: Annotated[
        int, Field(ge=0, le=64, description="inputs made in addition, of the types that parameters name")
    ] = 24

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        texts = sum(isinstance(each, str) for each in self.inputs)
        if texts not in (0, len(self.inputs)):
            raise FieldError("inputs", "must be lists of arguments alone, or texts alone")
        if texts and self.entry:
            raise FieldError("entry", "must be empty where inputs are texts, which whole programs read")
        if not self.inputs and not self.generated:
            raise FieldError("generated", "must be at least 1 without inputs")
        return self


class FunctionalClusters(SampledUncertainty):
    """Paper #67: programs that do the same on every input are one cluster; the doubt is the clusters' entropy.

    Those that do not parse are dropped. The rest run on the request's inputs and on generated ones, in the pool's
    sandbox; they are equivalent if they return (or print, or do to their arguments) the same on each. This is
    differential testing in place of the paper's symbolic execution. A comparison that is not resolved counts as
    different: a program that was cut by a limit, or gave nothing but exceptions, is equivalent to the same text alone.
    Generated inputs on which most programs raise an exception are left out.
    The value is 0 where all programs do the same; of n that all differ it is ln n nats, or 1 - 1 / n as a share. Where
    none parses it is as if all differed.

    Mutual information is low where the model draws from one law of programs, however wide, and high where it follows
    an answer that it is shown. It is estimated from as many pairs as there are samples, by counting.
    """

    Params = FunctionalClustersParams
    params: FunctionalClustersParams
    papers = (67,)

    @property
    def unit(self) -> str:  # type: ignore[override]
        """See `Uncertainty.unit`."""
        return "share of the programs" if self.params.estimator == "share" else "nats"

    @property
    def meaning(self) -> str:  # type: ignore[override]
        """See `Uncertainty.meaning`."""
        return MEANINGS[self.params.estimator]

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """See `Uncertainty.bounds`."""
        count = self.params.samples
        return 0.0, 1.0 - 1.0 / count if self.params.estimator == "share" else math.log(count)

    def check(self, models: ModelPool) -> None:
        """See `Part.check`: the pool must have a sandbox."""
        if models.code_executor is None:
            raise invalid(self.where, f"{self.name!r} runs programs, and the pool has no sandbox (pools.NAME.sandbox)")
        self._executor: CodeExecutor = models.code_executor
        if self.params.estimator == "mutual_information":
            self._codec = codec_of(models, self.where)

    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        """See `Uncertainty.measure`."""
        estimator = self.params.estimator
        self._tenant = group.seq.owner if group.seq is not None else ""
        if estimator == "mutual_information":
            return await self._information(group)
        clusters = await self._clusters([code_of(each.text) for each in group.answers])
        _show_clusters(group, clusters)
        kept = [(cluster, each) for cluster, each in zip(clusters, group.answers, strict=True) if cluster is not None]
        found = [cluster for cluster, _ in kept]
        group.measures["programs"] = float(len(found))
        group.measures["program_clusters"] = float(len(set(found)))
        if not found:
            found, kept = list(range(len(group.answers))), list(enumerate(group.answers))
        if estimator == "share":
            return 1.0 - max(map(found.count, found)) / len(found)
        logprobs = [log_likelihood(each, self.params.by_length) for _, each in kept]
        return entropy_of_clusters(found, logprobs, estimator)

    async def _information(self, group: AnswerSet) -> float:
        firsts = list(group.answers)
        seconds = await together([self._second(group, place) for place in range(len(firsts))])
        clusters = await self._clusters([code_of(each.text) for each in (*firsts, *seconds)])
        pairs = [
            (first, second)
            for first, second in zip(clusters[: len(firsts)], clusters[len(firsts) :], strict=True)
            if first is not None and second is not None
        ]
        _show_clusters(group, clusters[: len(firsts)])
        group.measures["programs"] = float(sum(each is not None for each in clusters))
        group.measures["program_clusters"] = float(len({*clusters} - {None}))
        return mutual_information(pairs) if pairs else math.log(len(firsts))

    async def _second(self, group: AnswerSet, place: int) -> Candidate:
        """Draw an answer to the question, and to another answer."""
        seq, params = group.context[0], self.params
        text = SECOND.replace("{answer}", group.answers[place].text.strip())
        tokens = [*seq.tokens, *continue_with(self._codec, text, parse_special=False)]
        temperature = params.temperature or seq.sampling.temperature or 1.0
        seed = derive_seed(seq.seed, FIRST_SAMPLE + params.samples + place)
        return await write_after(group, tokens, seed, temperature, params.longest, params.mark)

    async def _clusters(self, programs: list[str]) -> list[int | None]:
        """The cluster of each program, numbered as they come; None of those that do not parse."""
        texts = list(dict.fromkeys(programs))
        signatures = dict(zip(texts, await together(list(map(self._signature, texts))), strict=True))
        parsed = {text: each for text, each in signatures.items() if each.get("parses")}
        behaviours: dict[str, tuple[str, ...] | None] = {}
        if parsed:
            inputs = self._inputs(list(parsed.values()))
            ran = await together([self._behaviour(text, each, inputs) for text, each in parsed.items()])
            behaviours = within_domain(dict(zip(parsed, ran, strict=True)), len(self.params.inputs))
        return clusters_of_behaviours([(text, behaviours.get(text)) if text in parsed else None for text in programs])

    def _inputs(self, signatures: Items[dict[str, Any]]) -> list[Any]:
        given = list(self.params.inputs)
        if given and isinstance(given[0], str):
            return given
        taken = [each["params"] for each in signatures if each["params"]]
        return given + (make_inputs(common_annotations(taken), self.params.generated) if taken else [])

    async def _signature(self, code: str) -> dict[str, Any]:
        """What is called in a program; one that cannot be looked at does not parse."""
        if len(code) > LONGEST:
            return {"parses": False}
        ended = await self._executor.run(HARNESS, {"code": code, "entry": self.params.entry}, self._tenant)
        return ended.result if isinstance(ended.result, dict) else {"parses": False}

    async def _behaviour(self, code: str, signature: dict[str, Any], inputs: list[Any]) -> tuple[str, ...] | None:
        """What a program does on each input; None where that was not found out."""
        name = signature["name"]
        if inputs and isinstance(inputs[0], str):
            name = program_harness.SCRIPT
        elif not name:
            inputs = [""]
        elif not inputs or signature["params"] is None:
            return None
        seconds = SHARE * self._executor.cpu_s / len(inputs)
        task = {"code": code, "name": name, "inputs": inputs, "seconds": seconds}
        return resolved(await self._executor.run(HARNESS, task, self._tenant), len(inputs))


def _show_clusters(group: AnswerSet, clusters: Items[int | None]) -> None:
    """Leave in the group what each of its programs was found to be."""
    group.scores = group.likelihoods
    group.groups = ["no program" if each is None else f"behaviour {each + 1}" for each in clusters]


def resolved(ended: Execution, count: int) -> tuple[str, ...] | None:
    """Return what a program did on each of `count` inputs; None: it was cut."""
    found = ended.result
    if not (isinstance(found, list) and len(found) == count and all(isinstance(each, str) for each in found)):
        return None
    return None if program_harness.LATE in found else tuple(found)


def within_domain(behaviours: dict[str, tuple[str, ...] | None], given: int) -> dict[str, tuple[str, ...] | None]:
    """Leave out generated inputs that most programs refuse, and programs that gave nothing on the others.

    Args:
        behaviours: by program, what it does on each input; as many inputs for functions, and for scripts.
        given: how many first inputs are the request's, which stay.

    Returns:
        By program, what it does on the inputs that are left; None: that is not known.
    """
    behaviours = {text: _informative(each) for text, each in behaviours.items()}
    found = [each for each in behaviours.values() if each is not None]
    kept: dict[int, list[int]] = {}
    for count in {len(each) for each in found}:
        alike = [each for each in found if len(each) == count]
        raised = [sum(each[place].startswith("!") for each in alike) for place in range(count)]
        kept[count] = [place for place in range(count) if place < given or 2 * raised[place] <= len(alike)]
    left = {text: each and tuple(each[place] for place in kept[len(each)]) for text, each in behaviours.items()}
    return {text: _informative(each) for text, each in left.items()}


def _informative(behaviour: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """What a program does, if that is more than raising exceptions and saying nothing."""
    tells = any(each.startswith("= ") and each != SILENT for each in behaviour or ())
    return behaviour if tells else None


def clusters_of_behaviours(programs: Items[tuple[str, tuple[str, ...] | None] | None]) -> list[int | None]:
    """Number the clusters of programs as they come.

    Args:
        programs: text and behaviour of each; no behaviour: equivalent to the same text alone; None: in no cluster.
    """
    numbers: dict[Any, int] = {}
    return [
        None if each is None else numbers.setdefault(each[0] if each[1] is None else each[1], len(numbers))
        for each in programs
    ]


def mutual_information(pairs: Items[tuple[int, int]]) -> float:
    """Mutual information of two clusters, nats: the divergence of their joint law from the product of its marginals.

    Args:
        pairs: clusters of a first answer, and of one that was drawn with the first in its prompt.
    """
    firsts, seconds = [first for first, _ in pairs], [second for _, second in pairs]
    total = 0.0
    for pair in set(pairs):
        joint = pairs.count(pair) / len(pairs)
        total += joint * math.log(joint * len(pairs) ** 2 / (firsts.count(pair[0]) * seconds.count(pair[1])))
    return total


PART = FunctionalClusters
