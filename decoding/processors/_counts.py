"""How often the tokens of a row's answer were written, its hypothetical tokens among them."""

from __future__ import annotations

from collections.abc import Mapping

from decoding.row_context import RowContext


def answer_counts(context: RowContext) -> Mapping[int, int]:
    """Times by token, of the answer and the path; the prompt does not count."""
    counts = context.seq.output_counts
    if not context.path:
        return counts
    counts = dict(counts)
    for token in context.path:
        counts[token] = counts.get(token, 0) + 1
    return counts
