"""Python's collector and programs that keep most of what they have loaded."""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_loaded() -> None:
    """Spare what a server has loaded the collector, once in a process.

    Modules, models and compiled code are half a million objects that stay to the end. A full collection looks at them
    all, again and again as requests come and go, and nothing else runs in those 0.3 seconds.
    """
    gc.collect()
    gc.freeze()
