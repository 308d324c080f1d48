"""Description of the machine, for reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe(device: str = "cpu") -> dict[str, str]:
    """Processor, cores, memory, Python, how busy the machine was at this moment, and the GPU of a torch device."""
    return {
        **({} if device == "cpu" else {"device": _gpu(device)}),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_memory_bytes() / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "load average at start": f"{os.getloadavg()[0]:.1f}",
    }


def one_line(machine: dict[str, str]) -> str:
    """As a line of a report."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _processor() -> str:
    return f"{_cpuinfo().get('model name', platform.machine())} ({instruction_set()})"


def instruction_set() -> str:
    """Return what this machine's processor multiplies with, see `vectors`."""
    return vectors(_cpuinfo().get("flags", ""))


def _cpuinfo() -> dict[str, str]:
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    return {name.strip(): value.strip() for name, _, value in lines}


def _gpu(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def vectors(flags: str) -> str:
    """What a processor multiplies with, by its flags: virtual machines give the same name to processors that differ
    in speed by a factor.
    """
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in known.items() if flag in flags.split()), "no AVX2")


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16."""
    return instruction_set() in ("AMX", "AVX-512 BF16")


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
