"""What a job without a server is, and what it refuses before anything is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deployments.batches.inputs import Defaults
from deployments.batches.job_cluster import DATA_CPUS, cpus_for, num_processes
from deployments.batches.job_directory import JobDirectory
from deployments.batches.offline import Job, run
from tests.batches.house import jsonl, line
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig, parse_config
from turnout.errors import Code, TurnoutError


def config(folder: Path, **engine: object) -> TurnoutConfig:
    return parse_config(
        {
            "models": {role: {"path": str(folder / role)} for role in ("small", "large")},
            "pools": {"demo": {"small": "small", "large": "large", "artifacts": str(folder / "artifacts")}},
            "engine": engine,
        }
    )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    for name in ("small/model", "large/model", "artifacts/router"):
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir()
        path.write_bytes(b"first")
    (tmp_path / "in.jsonl").write_bytes(jsonl([line("a")]))
    target, errors = str(tmp_path / "out.jsonl"), str(tmp_path / "err.jsonl")
    return Job(str(tmp_path / "in.jsonl"), target, errors, tmp_path / "work", config(tmp_path), "demo", Defaults())


def write(name: str) -> Callable[[Job, Path], Job]:
    def change(job: Job, folder: Path) -> Job:
        (folder / name).write_bytes(b"other")
        return job

    return change


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (write("small/model.safetensors"), "weights"),
        (write("large/chat_template.jinja"), "speech"),
        (write("large/generation_config.json"), "speech"),
        (write("artifacts/router.safetensors"), "artifacts"),
        (lambda job, folder: replace(job, config=config(folder, kernels="torch")), "engine"),
    ],
)
def test_a_job_is_not_gone_on_with_by_other_models(
    job: Job, tmp_path: Path, changed: Callable[[Job, Path], Job], named: str
) -> None:
    place = JobDirectory(job.work)
    place.open(job.described(), fresh=False)
    assert place.open(job.described(), fresh=False)
    with pytest.raises(TurnoutError, match=rf"holds another job \(other: {named}\)"):
        place.open(changed(job, tmp_path).described(), fresh=False)


def test_a_job_that_does_not_fit_is_gone_on_with_by_a_smaller_engine(job: Job, tmp_path: Path) -> None:
    place = JobDirectory(job.work)
    place.open(job.described(), fresh=False)
    assert place.open(replace(job, config=config(tmp_path, max_batch=2)).described(), fresh=False)
    less = {"kv_memory_bytes": 64 << 20, "memory_limit_bytes": 2 << 30}
    models = {name: model.model_copy(update=less) for name, model in job.config.models.items()}
    assert place.open(replace(job, config=job.config.model_copy(update={"models": models})).described(), fresh=False)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("IN", {"source": "nowhere://bucket/in.jsonl"}),
        ("OUT", {"target": "nowhere://bucket/out.jsonl"}),
        ("OUT", {"target": "{folder}"}),
        ("errors", {"errors": "{folder}/absent/err.jsonl"}),
    ],
)
def test_places_that_cannot_be_are_named_before_anything_is_answered(
    job: Job, tmp_path: Path, field: str, given: dict[str, str]
) -> None:
    asked = replace(job, **{name: value.format(folder=tmp_path) for name, value in given.items()})  # type: ignore[arg-type]
    with pytest.raises(TurnoutError) as refused:
        run(asked)
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, field)
    assert not (job.work / "job.json").exists()


def test_a_scheme_whose_package_is_absent_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    known = fsspec.core.url_to_fs

    def absent(path: str) -> Any:
        if path == job.target:
            raise ImportError("Install s3fs to access S3")
        return known(path)

    monkeypatch.setattr("deployments.batches.disk.fsspec.core.url_to_fs", absent)
    with pytest.raises(TurnoutError, match=r"OUT: .*Install s3fs"):
        run(job)


def node(address: str, cpus: float = 4.0, alive: bool = True) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": cpus}}


@pytest.mark.parametrize(
    ("nodes", "shared"),
    [
        ([node("a")], 3),
        ([node("a"), node("a")], 3),  # two of Ray's nodes on one machine
        ([node("a"), node("b")], 2),
        ([node("a"), node("b", cpus=0.0), node("c", alive=False)], 3),
        ([node("a"), node("b"), node("c")], 1),
    ],
)
def test_actors_are_told_how_many_of_them_share_a_machine(
    job: Job, monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], shared: int
) -> None:
    monkeypatch.setattr("deployments.batches.job_cluster.ray.nodes", lambda: nodes)
    assert num_processes(replace(job, actors=3)) == shared
    elsewhere = job.config.pools["demo"].model_copy(update={"placement": PlacementConfig(models="actors")})
    config = job.config.model_copy(update={"pools": {"demo": elsewhere}})
    assert num_processes(replace(job, actors=3, config=config)) == 1


def test_a_ray_of_its_own_has_cpus_for_all_that_copies_consist_of(job: Job) -> None:
    assert cpus_for(replace(job, actors=3)) == 3 + DATA_CPUS
    elsewhere = job.config.pools["demo"].model_copy(update={"placement": PlacementConfig(models="actors", cpus=2.0)})
    config = job.config.model_copy(update={"pools": {"demo": elsewhere}})
    assert cpus_for(replace(job, actors=3, config=config)) == 3 * (1 + 2 * 2) + DATA_CPUS
