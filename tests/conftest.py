"""Which tests start processes of their own on a Ray cluster: `make test-cluster` runs them."""

import pytest

CLUSTERS = {"ray_cluster", "raylets"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        # Beside the served application that many tests share, a cluster is used for deployments of a test's own.
        own = "cluster" in asked and "server" not in asked and "deployments" in item.path.parts
        if own or asked & CLUSTERS:
            item.add_marker(pytest.mark.cluster)
