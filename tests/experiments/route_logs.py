"""Route logs made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

Entry = dict[str, Any]


def entry(arm: str, number: int, session: str = "", paper: float = 0.5, status: str = "OK", **more: Any) -> Entry:
    outcome = {"status": status, "completion_tokens": 8, "large_share": 0.5, "paper": paper, "flops": paper,
               "flops_large_only": 1.0, "ttft_s": 0.1, "wall_s": 0.5}  # fmt: skip
    return {"kind": "request", "pool": "demo", "request_id": f"{arm}-{number}", "tenant": "t", "session": session,
            "decision": {"arm": arm, "policy": "split"}, "outcome": outcome, **more}  # fmt: skip


def split(difference: float, count: int = 400, per_session: int = 1) -> list[Entry]:
    """Two arms whose paper cost differs by so much; requests of a session cost alike."""
    rng = np.random.default_rng(11)
    found = []
    for number in range(count):
        for arm, more in (("old", 0.0), ("new", difference)):
            cost = float(np.clip(rng.normal(0.6 + more, 0.1), 0.0, 2.0))
            found += [entry(arm, number * 10 + k, f"s{arm}{number}", cost) for k in range(per_session)]
    return found
