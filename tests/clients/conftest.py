"""One served application for all clients, and the report that a whole run of them can write."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from deployments.app import APP_NAME, deploy, start_local_ray, start_serve
from deployments.ending import end_app
from tests.clients.report import write_report
from tests.clients.site import Site, load_pool, make_config

OPTION = "--clients-report"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, default=None, metavar="FILE", help="write what the clients did there, as Markdown")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    keys: dict[str, str] = {}
    config = make_config(tmp_path_factory.mktemp("site"), keys)
    folder = start_local_ray(config)
    try:
        start_serve(config)
        deploy(config, load_pool)
        at = config.server
        made = Site(f"http://{at.http_host}:{at.http_port}", f"127.0.0.1:{at.grpc_port}", config, keys)
        assert len(httpx.get(f"{made.url}/v1/models", timeout=60).json()["data"]) > 4, "each pool is asked"
        made.assert_idle()
        yield made
        wanted = request.config.getoption(OPTION)
        if wanted is not None and not request.session.testsfailed:
            write_report(Path(wanted), made.report)
        end_app(APP_NAME, config.server.shutdown_grace_s)
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder or "", ignore_errors=True)
