"""Messages of tasks, for the Python clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict

from turnout.proto import generation_pb2 as pb


def task_request(name: str, params: Mapping[str, Any], model: str, deadline_s: float | None) -> pb.RunTaskRequest:
    """The message that asks for a task."""
    request = pb.RunTaskRequest(name=name, model=model)
    request.params.update(dict(params))
    if deadline_s is not None:
        request.deadline_s = deadline_s
    return request


def task_result(message: pb.RunTaskResponse) -> dict[str, Any]:
    """What a task came to; a Struct knows doubles only, so that whole numbers become integers."""
    found: dict[str, Any] = _whole(MessageToDict(message.result))
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
