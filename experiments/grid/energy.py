"""Joules that the machine's own meters counted: processor packages (RAPL) and GPUs (NVML), where it has them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class _Package:
    """A counter in microjoules that begins anew at `wrap`."""

    path: Path
    wrap: int

    def read(self) -> int:
        return int(self.path.read_text(encoding="ascii"))


class EnergyMeter:
    """Meter that counts from the moment it is made. Without one there is no figure."""

    def __init__(self, packages: list[_Package], gpus: list[Any]) -> None:
        self._packages, self._gpus = packages, gpus
        self._before = self._read()

    @classmethod
    def start(cls, powercap: Path = POWERCAP) -> Self:
        """With the meters of this machine that this process may read."""
        packages = []
        for path in sorted(powercap.glob("intel-rapl:*/energy_uj")):
            if path.parent.name.count(":") > 1:
                continue  # a part of a package, counted in the whole
            try:
                wrap = int((path.parent / "max_energy_range_uj").read_text(encoding="ascii"))
                int(path.read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue
            packages.append(_Package(path, wrap))
        return cls(packages, _gpus())

    @property
    def sources(self) -> tuple[str, ...]:
        """What is counted."""
        return (*(["processor"] if self._packages else []), *(["gpu"] if self._gpus else []))

    def joules(self) -> float | None:
        """Since the start; None: this machine tells nothing."""
        if not self.sources:
            return None
        now = self._read()
        spent = 0.0
        for index, package in enumerate(self._packages):
            used = now[index] - self._before[index]
            spent += (used + package.wrap if used < 0 else used) / 1e6
        first = len(self._packages)
        return (
            spent + sum(after - before for after, before in zip(now[first:], self._before[first:], strict=True)) / 1e3
        )

    def _read(self) -> list[int]:
        """Microjoules of packages, then millijoules of GPUs."""
        return [package.read() for package in self._packages] + [gpu() for gpu in self._gpus]


def _gpus() -> list[Any]:
    """A function for each GPU that tells its millijoules."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        for handle in handles:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no library, no driver, or a GPU that does not count: each has an error class of its own
        return []
    return [lambda handle=handle: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in handles]
