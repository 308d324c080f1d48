"""Two models made of tables that agree more often than not."""

from __future__ import annotations

from typing import Any

from decoding.fakes import TableModel


def near(make_model: Any) -> tuple[TableModel, TableModel]:
    """Two models that agree more often than not."""
    one, other = make_model("small", 1), make_model("large", 1, num_parameters=10)
    shift = make_model("shift", 9)
    exact = one.next_logits
    one.next_logits = lambda tokens: exact(tokens) + 0.4 * shift.next_logits(tokens)
    return one, other
