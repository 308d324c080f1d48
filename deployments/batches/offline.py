"""A job of many requests without a server: Ray Data over actors, each of which holds a pool of models."""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.checkpoint import CheckpointConfig
from ray.data.checkpoint.checkpoint_writer import PENDING_CHECKPOINT_SUFFIX
from ray.exceptions import RayError

from deployments.batches.answerer import Answerer, Task
from deployments.batches.disk import named
from deployments.batches.eta import ProgressRate, left_s
from deployments.batches.inputs import Defaults, fingerprint, read_input
from deployments.batches.job_cluster import connected, num_processes
from deployments.batches.job_directory import JobDirectory, Staged
from deployments.batches.outputs import check_places, write_outputs
from deployments.batches.spent import Spent
from deployments.pool_options import replica_bundles
from engine.fingerprint import content_digests, speech_digest
from turnout.atomic_files import whole
from turnout.config import TurnoutConfig, artifacts_path, model_path, pinned
from turnout.errors import Code, TurnoutError

if TYPE_CHECKING:
    from router.policies.adaptive_best_of import AdaptiveBestOfParams

AHEAD = 2  # blocks of an actor under way: while the last requests of one are answered, the next one's begin
LOOK_S = 0.5
# Of the engine's settings, those that say how numbers are computed; others may change for a job to fit at last, as may
# the models' memory.
COMPUTES = {"kernels", "shared_attention"}
MEMORY = {"kv_memory_bytes", "memory_limit_bytes"}


@dataclass(frozen=True, slots=True)
class Job:
    """What `turnout batch` is asked for.

    Attributes:
        source: the input, and `target`, the output: paths, or URLs that fsspec knows.
        errors: where failed lines go.
        work: the job's folder.
        config: the models; `pool` of it answers.
        defaults: for what lines leave open.
        seed: from which requests that name none get theirs.
        actors: copies of the pool.
        concurrency: requests that one copy answers at once.
        block_rows: requests of a block.
        limit: lines looked at; None: all.
        best_of: how many samples lines get that name no method; None: such lines are answered by the default method.
        address: of a Ray cluster; None: one is started here.
    """

    source: str
    target: str
    errors: str
    work: Path
    config: TurnoutConfig
    pool: str
    defaults: Defaults
    seed: int = 0
    actors: int = 1
    concurrency: int = 64
    block_rows: int = 256
    limit: int | None = None
    best_of: AdaptiveBestOfParams | None = None
    address: str | None = None

    def described(self) -> dict[str, Any]:
        """What decides about the answers: a folder begun with other values is not gone on with.

        Raises:
            TurnoutError: the input cannot be read.
            OSError: a model's files, or an artifact, cannot be read.
        """
        pool = self.config.pools[self.pool]
        models = {name: self.config.models[name] for name in pool.members}
        paths = {name: model_path(model) for name, model in models.items()}
        artifacts = artifacts_path(pool)
        files = sorted(artifacts.glob("*.safetensors")) if artifacts is not None else []
        return {
            "input": fingerprint(self.source),
            "pool": pool.model_dump(mode="json", exclude={"placement", "replicas", "autoscaling"}),
            "models": {name: model.model_dump(mode="json", exclude=MEMORY) for name, model in models.items()},
            # Their files may have been written anew since.
            "weights": {name: content_digests(path, path) for name, path in paths.items()},
            "speech": {name: speech_digest(path) for name, path in paths.items()},
            "artifacts": {path.stem: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in files},
            "engine": self.config.engine.model_dump(mode="json", include=COMPUTES),
            "defaults": {"chat": self.defaults.chat, "body": self.defaults.body},
            "seed": self.seed,
            "block_rows": self.block_rows,
            "limit": self.limit,
            "best_of": self.best_of.model_dump(mode="json") if self.best_of is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is.

    Attributes:
        rows: lines of the input that will have a result.
        done: those that have one.
        rate: lines a second since the job was begun or gone on with.
        spent: what finished blocks used.
        tries: times the block in hand was begun that was begun most often: above 1, its process has ended.
    """

    rows: int
    done: int
    rate: float
    spent: Spent
    tries: int = 0

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at this rate; None: unknown."""
        return left_s(self.done, self.rows, self.rate)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a finished job did; `seconds` are of this run, as are `rate` and `resumed_rows`, lines done before it."""

    rows: int
    answered: int
    failed: int
    output: str
    errors: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cached_share: float
    cost_of_large: float
    seconds: float
    rate: float
    resumed_rows: int
    redone_rows: int


def run(job: Job, tell: Callable[[Progress], None] = lambda _: None, fresh: bool = False) -> Summary:
    """Do a job, or what is left of it.

    Args:
        job: what is asked for.
        tell: gets the progress, from another thread.
        fresh: forget what an earlier run did.

    Raises:
        TurnoutError: the input cannot be read, the folder holds another job or another run works in it, the disk is
            full, or the models do not load, are lost for long or end each process; what was done is kept.
    """
    place = JobDirectory(job.work)
    job = replace(job, config=pinned(job.config))  # its processes load one revision
    with place.held():
        return _run(job, place, tell, fresh)


def _run(job: Job, place: JobDirectory, tell: Callable[[Progress], None], fresh: bool) -> Summary:
    started = time.monotonic()
    check_places(job.source, job.target, job.errors)
    with named(f"the models of pool {job.pool}"):
        described = job.described()
    place.open(described, fresh)
    # What is looked at before it is cut, and what is answered, on one cluster.
    with connected(job) if place.staged is None and job.best_of is not None else nullcontext():
        staged = place.staged or _stage(job, place, described, tell)
        place.check_blocks(staged)
        before = _Watch(place, staged).look()
        if not all(map(place.is_done, place.blocks())):
            with connected(job), _watched(place, staged, tell):
                _answer(job, place)
    check_done(place)
    answered, failed = write_outputs(
        job.target, job.errors, place.records(answered=True), place.records(answered=False)
    )
    after = _Watch(place, staged).look()
    tell(after)
    seconds = time.monotonic() - started
    return _summary(job, place, before, after, (answered, failed), seconds)


def check_done(place: JobDirectory) -> None:
    """Whether every block has been answered: what is written is the whole job or nothing.

    Raises:
        TurnoutError: UNAVAILABLE, saying how many are left.
    """
    blocks = place.blocks()
    left = [block for block in blocks if not place.is_done(block)]
    if left:
        message = f"{len(left)} of {len(blocks)} blocks were not answered, the first is {left[0]}"
        raise TurnoutError(Code.UNAVAILABLE, f"{message}; what is done is kept: run it again")


def _stage(job: Job, place: JobDirectory, described: dict[str, Any], tell: Callable[[Progress], None]) -> Staged:
    """Cut the input; where samples are to be shared out, look at all lines before, which can be gone on with too."""
    rows = read_input(job.source, job.defaults, job.config.server.max_body_bytes)
    if job.best_of is None:
        return place.stage(rows, job.block_rows, job.limit)
    from deployments.batches import best_of

    looked, params = JobDirectory(job.work / "looked"), job.best_of
    looked.open(described, fresh=False)
    staged = looked.staged or looked.stage(best_of.looks(islice(rows, job.limit)), job.block_rows, None)
    looked.check_blocks(staged)
    if not all(map(looked.is_done, looked.blocks())):
        config = best_of.looking(job.config, job.pool, params)
        with _watched(looked, staged, tell):
            _answer(replace(job, work=looked.folder, config=config), looked)
    check_done(looked)
    counts = best_of.shared_out(best_of.chances_of(looked.records(answered=True), params.model), params)
    again = read_input(job.source, job.defaults, job.config.server.max_body_bytes)
    return place.stage(best_of.with_samples(again, counts, params), job.block_rows, job.limit)


def _summary(
    job: Job, place: JobDirectory, before: Progress, after: Progress, counts: tuple[int, int], seconds: float
) -> Summary:
    answered, failed = counts
    spent = after.spent
    return Summary(
        rows=after.rows,
        answered=answered,
        failed=failed,
        output=job.target,
        errors=job.errors if failed else None,
        prompt_tokens=spent.prompt_tokens,
        cached_tokens=spent.cached_tokens,
        completion_tokens=spent.completion_tokens,
        cached_share=spent.cached_share,
        cost_of_large=spent.cost_of_large or 0.0,
        seconds=seconds,
        rate=(after.done - before.done) / seconds,
        resumed_rows=before.done,
        redone_rows=place.num_redone(),
    )


def _answer(job: Job, place: JobDirectory) -> None:
    """Have the actors answer all blocks; Ray's checkpoint leaves out those that an earlier run has finished."""
    blocks = place.blocks()
    checkpoint = job.work / "checkpoint"
    if _known(checkpoint) - {block for block in blocks if place.is_done(block)}:
        shutil.rmtree(checkpoint)  # it speaks of blocks that are gone: what is done, the actors see themselves
    manifest = job.work / "blocks.parquet"
    with named(str(job.work)), whole(manifest) as part:
        pq.write_table(pa.table({"block": blocks}), part)
    bundle = replica_bundles(job.config, job.config.pools[job.pool])[0]
    task = Task(job.work, job.config, job.pool, job.seed, job.concurrency, job.actors, num_processes(job))
    quiet(checkpoint)
    try:
        (
            ray.data.read_parquet(str(manifest))
            .repartition(target_num_rows_per_block=1)  # else the whole job is one block: nothing is kept before its end
            .map_batches(
                Answerer,
                batch_size=1,
                fn_constructor_kwargs={"task": task},
                compute=ActorPoolStrategy(
                    size=job.actors,
                    max_concurrent_calls_per_actor=AHEAD,
                    max_tasks_in_flight_per_actor=2 * AHEAD,
                    enable_true_multi_threading=True,
                ),
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
            )
            .write_parquet(str(job.work / "written"))
        )
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise _reason(error) from None
    finally:
        with suppress(OSError):
            place.forget_tries()  # the user has seen what ended it, and may have fixed that


def _known(checkpoint: Path) -> set[str]:
    """Blocks that Ray's checkpoint takes for done.

    Ray does not wait until its files are on disk: after a loss of power some are cut short. Those are removed, since
    Ray would end with them; the actors see by themselves what is done.
    """
    found: set[str] = set()
    for path in checkpoint.rglob("*.parquet"):
        if path.stem.endswith(PENDING_CHECKPOINT_SUFFIX):  # Ray removes these unread
            continue
        try:
            found.update(pq.read_table(path, columns=["block"])["block"].to_pylist())
        except (pa.ArrowException, OSError):
            path.unlink()
    return found


def quiet(checkpoint: Path) -> None:
    """Let Ray Data keep its checkpoint there, and its words to itself."""
    context = DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="block", checkpoint_path=str(checkpoint), delete_checkpoint_on_success=False
    )
    context.enable_progress_bars = False
    context.memory_usage_poll_interval_s = None  # else a thread of each actor reads all its maps once a second
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _reason(error: BaseException) -> TurnoutError:
    """Return the error of actors that could not continue."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TurnoutError):
            return TurnoutError(seen.code, f"{seen.message}; what is done is kept: run it again", seen.field)
        cause = getattr(seen, "cause", None)
        seen = cause if isinstance(cause, BaseException) else seen.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named_lines = [line.partition("TurnoutError: ")[2] for line in lines if "TurnoutError: " in line]
    message = (named_lines or lines[-1:] or [type(error).__name__])[-1]
    return TurnoutError(Code.UNAVAILABLE, f"the job stopped: {message}; what is done is kept: run it again")


class _Watch:
    """Looks at a job's folder: what finished blocks used is read once."""

    def __init__(self, place: JobDirectory, staged: Staged) -> None:
        self._place = place
        self._staged = staged
        self._seen: set[str] = set()
        self._spent = Spent()
        self._pace = ProgressRate()

    def look(self) -> Progress:
        """How far it is now."""
        for path in (self._place.folder / "done").glob("*.json"):
            if path.stem not in self._seen and not path.name.startswith(".") and self._place.is_done(path.stem):
                self._seen.add(path.stem)
                self._spent.add(self._place.spent(path.stem))
        rows = self._staged.lines + self._staged.faults
        done = min(self._spent.rows + self._staged.faults + self._place.partly(), rows)
        return Progress(rows, done, self._pace.rate(done), self._spent, self._place.most_begun())


@contextmanager
def _watched(place: JobDirectory, staged: Staged, tell: Callable[[Progress], None]) -> Iterator[None]:
    over, watch = threading.Event(), _Watch(place, staged)

    def report() -> None:
        while not over.wait(LOOK_S):
            tell(watch.look())

    thread = threading.Thread(target=report, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
