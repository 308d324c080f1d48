"""A pool of the demo pair with what its aggregators and estimators need, trained briefly on other prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.answers.prompts import TASKS, Case, others
from benchmarks.harness import note
from decoding.uncertainty.semantic_entropy import SemanticEntropy, SemanticEntropyParams
from pool.local_pool import LocalPool
from training.continuations import Made, Passage, cut, solve_daemon, train_rank_gen, train_uni_encoder
from training.doubt import Doubts, mine_doubts, train_bottleneck, train_probe
from training.length_data import Source
from turnout.calls import ChatMessage
from turnout.config import TurnoutConfig, artifacts_path
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

POOL = "demo"
SHIPPED = ("reward_model", "samples")
PASSAGE_TOKENS = 12  # of a third of a passage: a question and its worked answer have some forty and more
SAMPLES = 10  # of a prompt, for its semantic entropy

Train = Callable[[LocalPool, str, list[Passage]], Awaitable[Made]]
RANKERS: dict[str, Train] = {
    "uni_encoder": lambda pool, role, passages: train_uni_encoder(pool.model_pool, role, passages, hidden=64),
    "rank_gen": lambda pool, role, passages: train_rank_gen(pool.model_pool, role, passages),
    "daemon": lambda pool, role, passages: solve_daemon(
        pool.model_pool, role, passages, ["diversity", "information"], samples=4
    ),
}


def load(folder: Path) -> LocalPool:
    """Load the demo pair with a folder of artifacts, into which those that ship are copied.

    Args:
        folder: made where it is missing; what was trained into it before is used again.
    """
    config = TurnoutConfig.demo()
    shipped = artifacts_path(config.pools[POOL])
    assert shipped is not None
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(shipped / f"{name}.safetensors", folder / f"{name}.safetensors")
    demo = config.pools[POOL].model_copy(update={"artifacts": str(folder)})
    return LocalPool.load(POOL, config.model_copy(update={"pools": {POOL: demo}}))


async def rankers(pool: LocalPool, folder: Path, role: str, count: int) -> tuple[dict[str, str], dict[str, str]]:
    """Train what chooses among answers from worked answers to other prompts, one passage each.

    Args:
        pool: frozen.
        folder: of its artifacts.
        role: of the model that is read.
        count: passages, of all tasks together.

    Returns:
        Names of the artifacts by aggregator, and by aggregator why it has none.
    """
    made, missing = dict[str, str](), dict[str, str]()
    for name, train in RANKERS.items():

        async def work(train: Train = train) -> Made:
            problems = [problem for task in TASKS for problem in others(task, -(-count // len(TASKS)))]
            texts = [pool.tokenizer.encode(f"{problem.prompt}\n{problem.answer}") for problem in problems]
            return await train(pool, role, cut(texts, PASSAGE_TOKENS, 0))

        await _keep(folder, f"{name}-{role}-{count}", work, name, made, missing)
    return made, missing


async def doubt_readers(
    pool: LocalPool, folder: Path, case: Case, count: int, max_tokens: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Train what reads doubt from hidden states, on semantic entropies of other prompts of a task.

    Args:
        pool: frozen.
        folder: of its artifacts.
        case: the task, and who answers and is read.
        count: prompts.
        max_tokens: of a sample.

    Returns:
        As `rankers`.
    """
    made, missing = dict[str, str](), dict[str, str]()
    mined: list[Doubts] = []

    async def doubts() -> Doubts:
        if not mined:
            note(f"{count} other prompts, {SAMPLES} samples each")
            judge = PartChoice(name="final_answer")
            estimator = SemanticEntropy(SemanticEntropyParams(samples=SAMPLES, temperature=1.0, judge=judge))
            estimator.check(pool.model_pool)
            prompts = [
                pool.tokenizer.encode_chat([ChatMessage("user", each.prompt)]) for each in others(case.task, count)
            ]
            sampling = SamplingParams(temperature=0.1, max_tokens=max_tokens)
            source = Source(prompts, sampling, frozenset(pool.tokenizer.eos_ids))
            mined.append(await mine_doubts(pool.model_pool, case.role, source, estimator))
        return mined[0]

    async def probe() -> Made:
        return train_probe(await doubts(), pool.model_pool.by_role(case.role), case.role)

    async def bottleneck() -> Made:
        return train_bottleneck(await doubts(), pool.model_pool.by_role(case.role), case.role)

    for name, work in (("semantic_entropy_probe", probe), ("key_value_bottleneck", bottleneck)):
        await _keep(folder, f"{name}-{case.task}-{case.role}-{count}", work, name, made, missing)
    return made, missing


async def _keep(
    folder: Path,
    artifact: str,
    work: Callable[[], Awaitable[Made]],
    name: str,
    made: dict[str, str],
    missing: dict[str, str],
) -> None:
    """Do the work where its artifact is not there yet."""
    path = folder / f"{artifact}.safetensors"
    if not path.is_file():
        note(f"training {artifact}")
        try:
            found = await work()
        except TurnoutError as error:
            missing[name] = error.message
            return
        found.artifact.save(path)
        path.with_suffix(".report.json").write_text(json.dumps(found.report, indent=2) + "\n", encoding="utf-8")
    made[name] = artifact
