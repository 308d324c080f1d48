"""The comparison itself: which engines do which work on which models, and what is asked of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.harness import Goal
from benchmarks.peers.workloads import Answers, Decode, Mixed, OneByOne, Overhead, Prefill, SharedPrefix, Workload

OURS = "turnout"
GENERATE = "generate"
CONTINUOUS = "generate_batch"
OPENVINO = "OpenVINO"
OPENVINO_BATCHING = "OpenVINO batching"
LLAMA_CPP = "llama.cpp"
LLAMA_CPP_SHIPPED = "llama.cpp, GGUF as shipped"
VLLM = "vLLM"
VLLM_FLOAT32 = "vLLM, float32"  # the faster one on a processor without instructions for bfloat16
THROUGHPUT = "turnout, whole prompts"
SPECULATIVE = "turnout, speculative"
INT4 = "turnout, int4"
ASSISTED = "generate, assisted"


@dataclass(frozen=True, slots=True)
class Side:
    """One engine in one role.

    Attributes:
        module: holds it, in this package.
        environment: "own" is the project's; "peers" and "vllm" are those of `make venv-peers` and `make venv-vllm`.
        draft: whether it decodes speculatively, with the subject's small model.
        packed: whether it runs on the subject's GGUF file, with the weights packed in it.
        dtype: of weights and arithmetic; None: that of the run.
        weights: how our engine keeps linear weights, as `models.NAME.weights` has it.
    """

    module: str
    environment: Literal["own", "peers", "vllm"]
    draft: bool = False
    packed: bool = False
    dtype: str | None = None
    weights: str = "dense"

    @property
    def install(self) -> str:
        """How to get what is missing."""
        return "make venv" if self.environment == "own" else f"make venv-{self.environment}"


SIDES = {
    OURS: Side("turnout_engine", "own"),
    THROUGHPUT: Side("turnout_throughput", "own"),
    SPECULATIVE: Side("turnout_engine", "own", draft=True),
    INT4: Side("turnout_engine", "own", weights="int4"),
    GENERATE: Side("hf_generate", "own"),
    ASSISTED: Side("hf_generate", "own", draft=True),
    CONTINUOUS: Side("hf_continuous", "own"),
    OPENVINO: Side("openvino_pipeline", "peers"),
    OPENVINO_BATCHING: Side("openvino_batching", "peers"),
    LLAMA_CPP: Side("llama_cpp", "peers"),
    LLAMA_CPP_SHIPPED: Side("llama_cpp", "peers", packed=True),
    VLLM: Side("vllm_cpu", "vllm"),
    VLLM_FLOAT32: Side("vllm_cpu", "vllm", dtype="float32"),
}
EQUAL_LENGTHS = (OURS, GENERATE, OPENVINO, OPENVINO_BATCHING, LLAMA_CPP, VLLM)
ANY_LENGTHS = (OURS, THROUGHPUT, GENERATE, CONTINUOUS, OPENVINO_BATCHING, LLAMA_CPP, VLLM)
REAL_TEXT = (OURS, INT4, GENERATE, VLLM, VLLM_FLOAT32, LLAMA_CPP, LLAMA_CPP_SHIPPED, OPENVINO_BATCHING)


def random_model_work() -> dict[Workload, tuple[str, ...]]:
    """Workloads on a model of random weights, and the engines that do them; the first is compared with the others."""
    return {
        Decode(batch=1, tokens=64): EQUAL_LENGTHS,
        Decode(batch=8, tokens=64): EQUAL_LENGTHS,
        Prefill(tokens=2000): EQUAL_LENGTHS,
        Mixed(requests=32, shortest=32, longest=256, tokens=64): ANY_LENGTHS,
        SharedPrefix(shared=1500, own=32): (OURS, OPENVINO_BATCHING, LLAMA_CPP, VLLM),
        Overhead(batch=32, tokens=64): (OURS,),
    }


def pair_work(prompts: list[list[int]], per_round: int) -> dict[Workload, tuple[str, ...]]:
    """Speculative decoding on a trained pair, and the large model alone; the first is compared with the others."""
    work = OneByOne(tuple(tuple(prompt) for prompt in prompts), per_round, tokens=160)
    return {work: (SPECULATIVE, ASSISTED, OURS, GENERATE)}


def real_text_work(
    prompts: Mapping[int, list[list[int]]], per_round: Mapping[int, int], tokens: int
) -> dict[Workload, tuple[str, ...]]:
    """Answers to real prompts, on a real model alone; the first engine is compared with the others.

    Args:
        prompts: by the number that is submitted together.
        per_round: prompts of a round, likewise.
        tokens: of each answer.
    """
    return {
        Answers(tuple(map(tuple, asked)), per_round[batch], batch, tokens): REAL_TEXT
        for batch, asked in prompts.items()
    }


@dataclass(frozen=True, slots=True)
class Target:
    """A goal of our engine on one workload: for its ratio to a peer, or for its own figure where `against` is None."""

    subject: str
    workload: str
    goal: Goal
    against: str | None = None

    def applies_to(self, subject: str, workload: str) -> bool:
        """Whether it is about this work."""
        return (subject, workload) == (self.subject, self.workload)


def _targets(subject: str, over_generate: float) -> list[Target]:
    decode = ("decode, batch 1", "decode, batch 8")
    return [
        *(Target(subject, work, Goal(1.0), OPENVINO) for work in decode),
        *(Target(subject, work, Goal(over_generate), GENERATE) for work in decode),
        Target(subject, "prefill of 2000", Goal(0.9), OPENVINO),
        Target(subject, "32 mixed requests", Goal(1.0), OPENVINO_BATCHING),
        Target(subject, "TTFT after a shared prefix of 1500", Goal(0.15, at_most=True)),
        Target(subject, "time outside forwards, 32 concurrent", Goal(0.1, at_most=True)),
    ]


TARGETS = [*_targets("35 M", over_generate=2.5), *_targets("220 M", over_generate=1.5)]
