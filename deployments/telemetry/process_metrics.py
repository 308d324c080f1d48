"""Metrics of several ingress processes in one text: each series says which process counted it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

LABEL = "process"


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        """Give them as they are."""
        return iter(self._families)


def render(processes: Mapping[str, Iterable[Metric]]) -> bytes:
    """Write families of metrics by the process that counted them, in the text exposition format.

    A counter of a process that has ended is gone, not smaller: rates of what is left stay right.
    """
    whole: dict[str, Metric] = {}
    for process, families in processes.items():
        for family in families:
            found = whole.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found.samples += [each._replace(labels={**each.labels, LABEL: process}) for each in family.samples]
    registry = CollectorRegistry()
    registry.register(_Families(whole.values()))
    return generate_latest(registry)
