"""lm-evaluation-harness with its own Hugging Face backend, and with its clients of a served endpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.foreign.program import run_module

TASKS = Path(__file__).parent / "tasks"
METRICS = {"worked": "exact_match", "chosen": "acc"}
FILTERS = {"worked": "number", "chosen": "none"}
CONCURRENT = 8
BATCH = 16


@dataclass(frozen=True, slots=True)
class Backend:
    """Backend of lm-evaluation-harness.

    Attributes:
        name: as the page calls it.
        kind: the harness's name of it.
        options: its `--model_args`.
        tasks: that it can do.
        batch: prompts that it gets at once.
    """

    name: str
    kind: str
    options: dict[str, Any]
    tasks: tuple[str, ...] = tuple(METRICS)
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task with one backend.

    Attributes:
        score: share of right answers.
        stderr: of the score.
        texts: what was written, by problem; empty where nothing is.
        logprobs: of every text that was to be scored, by problem.
    """

    score: float
    stderr: float
    texts: dict[int, str]
    logprobs: dict[int, tuple[float, ...]]


def hugging_face(folder: Path) -> Backend:
    """The reference: the harness loads the model itself."""
    return Backend("Hugging Face", "hf", {"pretrained": folder, "dtype": "float32"}, batch=BATCH)


def completions(url: str, model: str, folder: Path) -> Backend:
    """/v1/completions: prompts in token ids, continuations scored by `echo` and `logprobs`."""
    options = {"model": model, "base_url": f"{url}/v1/completions", "tokenizer": folder, "num_concurrent": CONCURRENT}
    return Backend("/v1/completions", "local-completions", {**options, "tokenizer_backend": "huggingface"})


def chat(url: str, model: str) -> Backend:
    """/v1/chat/completions: messages, which cannot be scored."""
    options = {"model": model, "base_url": f"{url}/v1/chat/completions", "num_concurrent": CONCURRENT}
    return Backend("/v1/chat/completions", "local-chat-completions", options, ("worked",))


def evaluate(python: Path, folder: Path, backend: Backend, threads: int) -> dict[str, Outcome]:
    """All tasks of a backend, by name; `folder` holds the problems, and is left with what the harness writes."""
    kept = folder / f"{backend.kind}-{len(list(folder.glob(f'{backend.kind}-*')))}"
    options = ",".join(f"{name}={value}" for name, value in backend.options.items())
    run_module(
        python,
        folder,
        threads,
        ["lm_eval", "run", "--model", backend.kind, "--model_args", options, "--tasks", ",".join(backend.tasks),
         "--include_path", str(TASKS), "--apply_chat_template", "--device", "cpu", "--log_samples",
         "--batch_size", str(backend.batch), "--output_path", str(kept)],
    )  # fmt: skip
    [results] = kept.rglob("results_*.json")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]
    return {task: _outcome(task, scores[task], next(kept.rglob(f"samples_{task}_*.jsonl"))) for task in backend.tasks}


def _outcome(task: str, scores: dict[str, Any], samples: Path) -> Outcome:
    texts: dict[int, str] = {}
    logprobs: dict[int, tuple[float, ...]] = {}
    for line in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        answers = list(chain.from_iterable(sample["resps"]))
        if task == "worked":
            texts[sample["doc_id"]] = answers[0]
        else:
            logprobs[sample["doc_id"]] = tuple(float(logprob) for logprob, _ in answers)
    name, kind = METRICS[task], FILTERS[task]
    return Outcome(scores[f"{name},{kind}"], scores[f"{name}_stderr,{kind}"], texts, logprobs)
