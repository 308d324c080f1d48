"""The surfaces by their paths: those that write an answer, and those whose models only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deployments import embeddings_http, relevance_http, tasks_http
from deployments.choices import ChoicesSurface
from deployments.messages import http as messages
from deployments.messages.writer import error_body as message_error
from deployments.messages.writer import message_of
from deployments.openai_format import HTTP_STATUS, ChatFormat, CompletionFormat, error_body
from deployments.read_surface import ReadSurface
from deployments.responses.surface import ResponsesSurface
from deployments.schemas import chat_job, completion_job
from deployments.service import GenerationService
from deployments.surface import Surface
from turnout.errors import TurnoutError

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

WRITING: Mapping[str, Callable[[GenerationService], Surface]] = {
    CHAT: lambda service: ChoicesSurface(service, chat_job, ChatFormat()),
    COMPLETIONS: lambda service: ChoicesSurface(service, completion_job, CompletionFormat()),
    RESPONSES: lambda service: ResponsesSurface(service.responses, service.ignored_tools),
    messages.PATH: lambda _: messages.MessagesSurface(),
}
READING: Mapping[str, ReadSurface[Any]] = {
    embeddings_http.PATH: embeddings_http.EMBEDDINGS,
    relevance_http.SCORE_PATHS[0]: relevance_http.SCORE,
    relevance_http.RERANK_PATHS[0]: relevance_http.RERANK,
    **tasks_http.SURFACES,
}


def refusal(path: str, error: TurnoutError, request_id: str) -> tuple[int, Mapping[str, Any]]:
    """Return the status of HTTP and the body with which an endpoint refuses."""
    status = HTTP_STATUS[error.code]
    if path == messages.PATH:
        return status, message_error(status, message_of(error), request_id)
    return status, error_body(error)
