"""JSON on one line, for server-sent events and files of JSON lines."""

from __future__ import annotations

import json
from typing import Any

# Line separators of Unicode that JSON permits inside strings, and at which `str.splitlines` and some readers of events
# cut. Those below U+0020 are always escaped.
SEPARATORS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
ENCODER = json.JSONEncoder(ensure_ascii=False)  # `json.dumps` would make one each time


def json_line(value: Any, **options: Any) -> str:
    """Return a value as JSON in UTF-8 that every reader of lines takes for one line; without the line's end.

    Args:
        value: anything that `json.dumps` accepts.
        options: of `json.dumps`.
    """
    text = json.dumps(value, ensure_ascii=False, **options) if options else ENCODER.encode(value)
    if not text.isascii():
        for separator, escape in SEPARATORS.items():
            text = text.replace(separator, escape)
    return text
