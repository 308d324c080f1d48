"""Which tests `make test-cluster` runs, how properties are searched, and that no test slows down those after it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.properties import USUAL
from tests.quick_loading import given_step_time, kept
from tests.telling import told, write_figures

FIGURES = "--figures"
STORE_SERVER = "--store-server"
CLUSTERS = {"ray_cluster", "raylets"}
# Files that share the served application, and so one process.
TOGETHER = ("tests/deployments/test_", "tests/deployments/access/test_idle_connections.py")
# What a property says depends neither on how busy the machine is nor on which cases a run happens to draw. New cases
# are searched by `make search-properties`.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", UNTIMED, derandomize=True, database=None, max_examples=USUAL)
settings.register_profile("search", UNTIMED, derandomize=False, max_examples=10 * USUAL, print_blob=True)
settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All modules and tests are made here, and stay: the collector need not look at them, now or between tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        # Beside the served application that many tests share, a cluster is used for deployments of a test's own.
        own = "cluster" in asked and "server" not in asked and "deployments" in item.path.parts
        if own or asked & CLUSTERS:
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, but what shares the served application to one process: it takes half a minute to start."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER[0] if nodeid.startswith(TOGETHER) else str(super()._split_scope(nodeid))

    return Together(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        STORE_SERVER, default=None, metavar="FILE", help="server of the prefix store's tests, not the one a run takes"
    )
    parser.addoption(FIGURES, default=None, metavar="FILE", help="write the figures that tests tell there, as Markdown")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for each figure that a test has told."""
    if told:
        terminalreporter.write_sep("-", "figures")
        for line in told:
            terminalreporter.write_line(line)
    wanted = config.getoption(FIGURES)
    if wanted is not None:
        arguments = [each for each in config.invocation_params.args if each not in (FIGURES, wanted)]
        outcomes = {each: len(terminalreporter.stats.get(each, [])) for each in ("passed", "failed", "error")}
        write_figures(Path(wanted), [each for each in arguments if not each.startswith(FIGURES)], outcomes)


@pytest.fixture(scope="session", autouse=True)
def store_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let every server of a prefix store be the one that is asked for."""
    chosen = request.config.getoption(STORE_SERVER)
    with pytest.MonkeyPatch.context() as patch:
        if chosen is not None:
            patch.setattr("kvstore.redis.embedded.find_server", lambda: Path(chosen))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A member that is loaded takes all cores for its process, which here is that of the tests that follow as well."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def given_step_times() -> Iterator[None]:
    """Models get step times that are not measured; a module whose subject they are overrides this."""
    model = sys.modules.get("engine.model")
    with pytest.MonkeyPatch.context() as patch:
        if model is not None:
            patch.setattr(model, "profile", given_step_time)
        yield


@pytest.fixture(scope="module", autouse=True)
def kept_checkpoints() -> Iterator[None]:
    """A small checkpoint that many tests load is read once; a module that counts memory overrides this."""
    loading = sys.modules.get("engine.loading")
    with pytest.MonkeyPatch.context() as patch:
        if loading is not None:
            patch.setattr(loading, "read_model", kept(loading.read_model))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_ray_by_accident() -> Iterator[None]:
    """Ray starts a cluster for whoever asks it something unconnected, in the way of the next test that needs one."""
    ray = sys.modules.get("ray")
    with pytest.MonkeyPatch.context() as patch:
        if ray is not None:
            begin = ray.init

            def init(address: str | None = None, **settings: Any) -> Any:
                assert address is not None, "whoever starts Ray or connects to it says where"
                return begin(address, **settings)

            patch.setattr(ray, "init", init)
        yield
