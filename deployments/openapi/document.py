"""The document itself, from the shapes of bodies and answers: `/openapi.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, TypeAdapter

from deployments.access.callers import KEY_HEADER, PRIORITIES, PRIORITY_HEADER
from deployments.batches import message_batches
from deployments.batches.http import NewBatch
from deployments.batches.message_batches_http import NewMessageBatch
from deployments.embeddings_http import EmbeddingsAnswer, EmbeddingsBody
from deployments.extra_fields import UNSUPPORTED
from deployments.messages import answers as messages
from deployments.messages import bodies as messages_bodies
from deployments.messages.bodies import CountBody, MessagesBody
from deployments.messages.http import BATCHES_PATH
from deployments.openapi import answers, events, extras, responses
from deployments.relevance_http import RERANK_PATHS, SCORE_PATHS, RerankAnswer, RerankBody, ScoreBody, ScoresAnswer
from deployments.request_fields import MAX_PROMPTS, MAX_REQUEST_ID_LENGTH, REQUEST_ID_HEADER
from deployments.responses.body import CHAT_FIELDS, IGNORED, ResponseBody
from deployments.schemas import ABSENT, IGNORED_FIELDS, SAMPLING_FIELDS, ChatBody, CommonBody, CompletionBody
from deployments.tasks_http import TaskBody, TaskList, TaskObject
from deployments.tokens_http import DetokenizeBody, TokenizeBody, Tokens, TokensText
from turnout.types import SamplingParams

if TYPE_CHECKING:
    from deployments.service import GenerationService

PATH = "/openapi.json"
FAULTS: tuple[Any, ...] = (answers.ErrorAnswer, messages.MessageError)
REF = "#/components/schemas/{model}"
VERSION = "1"
ELSEWHERE = "of another endpoint: other values are refused"
INLINE = (CompletionBody, ChatBody, ResponseBody, SamplingParams, CountBody, MessagesBody)
READING = (TokenizeBody, DetokenizeBody, EmbeddingsBody, ScoreBody, RerankBody, TaskBody)
PARSED = (*INLINE, NewBatch, NewMessageBatch, *READING)
STATUSES = {
    "400": "a field is wrong: `param` names it, the message says what is allowed",
    "401": "no key, or none that is known",
    "403": "not allowed to this tenant",
    "404": "no such thing",
    "408": "the body comes too slowly",
    "413": "the body is too large",
    "415": "the body has a Content-Encoding other than identity",
    "429": "a limit is reached, or the server is full: try again after `Retry-After` seconds",
    "503": "a pool cannot answer now",
    "504": "it took longer than `deadline_s` or the server's limit",
    "default": "refused or failed",
}
ALWAYS = ("default",)
KEYED = ("401", "403", "default")
NAMED = ("401", "403", "404", "default")
ASKED = ("400", "401", "403", "404", "408", "413", "415", "429", "503", "504", "default")
KEPT = ("400", "401", "404", "503", "default")
BATCHED = ("400", "401", "404", "415", "429", "default")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        answer: JSON of status 200; a string: another media type.
        body: schema of the request's body by media type.
        query: schemas of query parameters by name.
        headers: schemas of headers by name, without the key's.
        errors: statuses other than 200.
        also: statuses with the same answer as 200.
        chunk: what an event of the answer holds, where the body may ask for a stream.
        fault: body of an error.
        event: the same, of a stream whose events have names.
    """

    method: str
    path: str
    summary: str
    answer: Any
    errors: tuple[str, ...] = KEYED
    body: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    headers: tuple[tuple[str, dict[str, Any]], ...] = ()
    also: tuple[str, ...] = ()
    chunk: Any = None
    fault: Any = answers.ErrorAnswer
    event: Any = None


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Null is the same as leaving a field out."""
    options = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    return {"anyOf": options if {"type": "null"} in options else [*options, {"type": "null"}]}


def _endpoint_body(kind: type[CommonBody], needed: str, more: dict[str, Any], leave: frozenset[str]) -> Any:
    def body(schemas: dict[str, Any]) -> dict[str, Any]:
        own, sampling = schemas[kind.__name__]["properties"], schemas[SamplingParams.__name__]["properties"]
        fields = {name: sampling[name] for name in sorted(SAMPLING_FIELDS - leave)} | own | more
        stop = {"anyOf": [fields["stop"], {"type": "string", "minLength": 1, "maxLength": 256}]}
        bias = {**fields["logit_bias"], "propertyNames": {"pattern": r"^[0-9]{1,9}$"}}
        fields = {**fields, "stop": stop, "logit_bias": bias}
        fields = {name: _nullable(schema) for name, schema in fields.items()}
        fields |= {name: {"description": "accepted and ignored"} for name in sorted(IGNORED_FIELDS)}
        fields |= {
            name: {"enum": [*known.neutral, None], "description": f"other values are refused: {known.why}"}
            for name, known in sorted(UNSUPPORTED.items())
        }
        absent = {name: value for name, value in sorted(ABSENT.items()) if name not in fields and value is not None}
        fields |= {name: {"enum": [value, None], "description": ELSEWHERE} for name, value in absent.items()}
        fields[needed] = ({**own, **more})[needed]
        return _json({"type": "object", "properties": fields, "required": [needed], "additionalProperties": False})

    return body


def _messages_body(kind: type[CountBody], sampling_fields: frozenset[str], *needed: str) -> Any:
    def body(schemas: dict[str, Any]) -> dict[str, Any]:
        own, sampling = schemas[kind.__name__]["properties"], schemas[SamplingParams.__name__]["properties"]
        given = {name: sampling[name] for name in sorted(sampling_fields)} | own
        fields = {name: schema if name in needed else _nullable(schema) for name, schema in given.items()}
        fields |= {name: {"description": "accepted and ignored"} for name in sorted(messages_bodies.IGNORED)}
        wanted = {"type": "object", "properties": fields, "required": list(needed), "additionalProperties": False}
        return _json(wanted)

    return body


def _response_body(schemas: dict[str, Any]) -> dict[str, Any]:
    chat = CHAT(schemas)["application/json"]["schema"]["properties"]
    own = schemas[ResponseBody.__name__]["properties"]
    fields = {name: chat[name] for name in sorted(CHAT_FIELDS)}
    fields |= {name: _nullable(schema) for name, schema in own.items()}
    fields |= {name: {"description": "accepted and ignored"} for name in sorted(IGNORED)}
    fields["input"] = own["input"]
    return _json({"type": "object", "properties": fields, "required": ["input"], "additionalProperties": False})


def _prompt() -> dict[str, Any]:
    text, ids = {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1, "maxItems": MAX_PROMPTS}
    return {"anyOf": [text, ids, several], "description": "a text, texts, token ids, or lists of token ids"}


def _body_of(kind: type[BaseModel]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda _: _json({"$ref": REF.format(model=kind.__name__)})


def _file_body(_: dict[str, Any]) -> dict[str, Any]:
    part = {"purpose": {"const": "batch"}, "file": {"type": "string", "contentMediaType": "application/octet-stream"}}
    form = {"type": "object", "properties": part, "required": ["purpose", "file"]}
    return {"multipart/form-data": {"schema": form}}


def _limit(default: int, most: int = 10_000) -> tuple[str, dict[str, Any]]:
    return "limit", {"type": "integer", "minimum": 1, "maximum": most, "default": default}


AFTER = ("after", {"type": "string"})
ORDER = ("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"})
ASKING = (
    (PRIORITY_HEADER, {"type": "string", "enum": list(PRIORITIES), "description": "absent: the tenant's"}),
    (
        REQUEST_ID_HEADER,
        {"type": "string", "maxLength": MAX_REQUEST_ID_LENGTH, "description": "comes back, and is in logs"},
    ),
    ("traceparent", {"type": "string", "description": "the caller's trace, by W3C Trace Context"}),
)
MOST_TOKENS = {"type": "integer", "minimum": 1, "maximum": 1_000_000, "description": "another name of max_tokens"}
COMPLETION = _endpoint_body(CompletionBody, "prompt", {"prompt": _prompt()}, frozenset())
CHAT = _endpoint_body(ChatBody, "messages", {"max_completion_tokens": MOST_TOKENS}, frozenset({"logprobs"}))

ALL = (
    Operation("get", "/v1/models", "Names that a request may put in `model`.", answers.ModelList),
    Operation("get", "/v1/models/{name}", "One of them.", answers.ModelObject, NAMED),
    Operation("get", "/v1/methods", "Decoding methods and their parameters.", answers.MethodList),
    Operation("post", "/v1/completions", "Continue prompts.", answers.CompletionAnswer, ASKED, COMPLETION,
              headers=ASKING, chunk=events.CompletionChunk),
    Operation("post", "/v1/chat/completions", "Answer a conversation.", answers.ChatAnswer, ASKED, CHAT,
              headers=ASKING, chunk=events.ChatChunk),
    Operation("post", "/v1/messages", "Answer a conversation, as Anthropic's API.", messages.MessageObject, ASKED,
              _messages_body(MessagesBody, messages_bodies.SAMPLING, "messages", "max_tokens"),
              headers=ASKING, event=messages.MessageEvent, fault=messages.MessageError),
    Operation("post", "/v1/messages/count_tokens", "Count the tokens that a model would read.", messages.TokenCount,
              ASKED, _messages_body(CountBody, messages_bodies.SAMPLING, "messages"), fault=messages.MessageError),
    Operation("post", "/v1/responses", "Answer a conversation, by OpenAI's Responses API.", responses.ResponseObject,
              ASKED, _response_body, headers=ASKING, event=responses.AnyEvent),
    Operation("get", "/v1/responses/{response_id}", "A response that is kept.", responses.ResponseObject, KEPT,
              query=(("stream", {"const": False}),)),
    Operation("delete", "/v1/responses/{response_id}", "Delete it.", responses.DeletedResponse, KEPT),
    Operation("get", "/v1/responses/{response_id}/input_items", "The items of its request.", responses.InputItemList,
              KEPT, query=(AFTER, _limit(20, 100), ORDER)),
    Operation("post", "/tokenize", "What a model would read.", Tokens, ASKED, _body_of(TokenizeBody)),
    Operation("post", "/detokenize", "The text of tokens.", TokensText, ASKED, _body_of(DetokenizeBody)),
    Operation("post", "/v1/embeddings", "Embeddings of texts.", EmbeddingsAnswer, ASKED, _body_of(EmbeddingsBody)),
    *(
        Operation("post", path, "How relevant texts are to each other.", ScoresAnswer, ASKED, _body_of(ScoreBody))
        for path in SCORE_PATHS
    ),
    *(
        Operation("post", path, "Documents by relevance to a query.", RerankAnswer, ASKED, _body_of(RerankBody))
        for path in RERANK_PATHS
    ),
    Operation("get", "/v1/tasks", "What a pool can be asked that writes no answer.", TaskList),
    Operation("post", "/v1/tasks/{name}", "Carry out one of these tasks.", TaskObject, ASKED, _body_of(TaskBody),
              headers=ASKING[:2]),
    Operation("get", "/v1/tenant", "The caller's limits and what it used.", answers.TenantObject),
    Operation("get", "/v1/tenants", "Those of all tenants, for operators.", answers.TenantList),
    Operation("get", "/healthz", "Whether every pool answers.", answers.Health, ALWAYS, also=("503",)),
    Operation("get", "/health", "The same, where other servers have it.", answers.Health, ALWAYS, also=("503",)),
    Operation("get", "/ping", "The same without a body.", "text/plain", ALWAYS, also=("503",)),
    Operation("post", "/ping", "The same.", "text/plain", ALWAYS, also=("503",)),
    Operation("get", "/version", "The version of Turnout.", extras.Version, ALWAYS),
    Operation("get", "/load", "Requests in progress.", extras.Load, ALWAYS),
    Operation("get", "/status", "What the replicas of each pool hold right now.", answers.StatusAnswer, ALWAYS),
    Operation("get", "/v1/status", "The same, for operators.", answers.StatusAnswer),
    Operation("get", "/metrics", "Metrics for Prometheus.", "text/plain", ALWAYS),
)  # fmt: skip
BATCHES = (
    Operation("post", "/v1/files", "Upload a file of requests.", answers.FileObject, BATCHED, _file_body),
    Operation("get", "/v1/files", "The caller's files.", answers.FileList, BATCHED,
              query=(("purpose", {"type": "string"}), AFTER, _limit(10_000), ORDER)),
    Operation("get", "/v1/files/{file_id}", "One of them.", answers.FileObject, BATCHED),
    Operation("get", "/v1/files/{file_id}/content", "What is in it.", "application/jsonl", BATCHED),
    Operation("delete", "/v1/files/{file_id}", "Delete it.", answers.DeletedFile, BATCHED),
    Operation("post", "/v1/batches", "Answer the requests of a file.", answers.BatchObject, BATCHED,
              _body_of(NewBatch)),
    Operation("get", "/v1/batches", "The caller's batches.", answers.BatchList, BATCHED, query=(AFTER, _limit(20))),
    Operation("get", "/v1/batches/{batch_id}", "One of them.", answers.BatchObject, BATCHED),
    Operation("post", "/v1/batches/{batch_id}/cancel", "Stop it.", answers.BatchObject, BATCHED),
    Operation("post", BATCHES_PATH, "Answer many messages, as Anthropic's API.", message_batches.MessageBatch,
              (*BATCHED, "413"), _body_of(NewMessageBatch), fault=messages.MessageError),
    Operation("get", BATCHES_PATH, "The caller's batches of messages.", message_batches.MessageBatchList, BATCHED,
              query=(("after_id", {"type": "string"}), ("before_id", {"type": "string"}), _limit(20, 1000)),
              fault=messages.MessageError),
    Operation("get", f"{BATCHES_PATH}/{{batch_id}}", "One of them.", message_batches.MessageBatch, BATCHED,
              fault=messages.MessageError),
    Operation("delete", f"{BATCHES_PATH}/{{batch_id}}", "Delete it.", message_batches.DeletedMessageBatch, BATCHED,
              fault=messages.MessageError),
    Operation("post", f"{BATCHES_PATH}/{{batch_id}}/cancel", "Stop it.", message_batches.MessageBatch, BATCHED,
              fault=messages.MessageError),
    Operation("get", f"{BATCHES_PATH}/{{batch_id}}/results", "What became of each of its requests.",
              "application/x-jsonl", BATCHED, fault=messages.MessageError),
)  # fmt: skip


EXPERIMENTS = (
    Operation("get", "/v1/experiments", "Reports of experiments, which the console plots.", answers.ReportList),
    Operation("get", "/v1/experiments/{name}", "One of them.", answers.ReportObject, NAMED),
)


def document(batches: bool, keys: bool = False, anonymous: bool = True, experiments: bool = False) -> dict[str, Any]:
    """The document, in OpenAPI 3.1.

    Args:
        batches: whether files and batches are served.
        keys: whether requests may carry a key.
        anonymous: whether they may carry none.
        experiments: whether there are reports of some.
    """
    operations = ALL + (BATCHES if batches else ()) + (EXPERIMENTS if experiments else ())
    kinds = [each.answer for each in operations if not isinstance(each.answer, str)]
    kinds += [kind for each in operations for kind in (each.chunk, each.event) if kind is not None]
    wanted: list[Any] = [(kind, "serialization", TypeAdapter(kind)) for kind in (*kinds, *FAULTS)]
    wanted += [(kind, "validation", TypeAdapter(kind)) for kind in PARSED]
    names, made = TypeAdapter.json_schemas(wanted, ref_template=REF)
    schemas = made["$defs"]
    parsed = {kind.__name__: schemas[names[kind, "validation"]["$ref"].rpartition("/")[2]] for kind in PARSED}
    refs = {kind: names[kind, "serialization"] for kind in kinds}
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _operation(each, parsed, refs)
    for kind in INLINE:
        schemas.pop(names[kind, "validation"]["$ref"].rpartition("/")[2])
    _allow_none_finite(schemas)
    components: dict[str, Any] = {"schemas": schemas, "responses": {}}
    for kind in FAULTS:
        components["responses"] |= _responses(kind)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Turnout",
            "version": VERSION,
            "description": "OpenAI's and Anthropic's APIs, and `decoding`.",
        },
        "paths": paths,
        "components": components,
    }
    if keys:
        header = {"type": "apiKey", "in": "header", "name": KEY_HEADER}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, KEY_HEADER: header}
        found["security"] = [{"key": []}, {KEY_HEADER: []}, *([{}] if anonymous else [])]
    return found


def _operation(each: Operation, parsed: dict[str, Any], refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if isinstance(each.answer, str):
        content = {each.answer: {"schema": {"type": "string"}}}
    else:
        content = _json(refs[each.answer])
    if each.chunk is not None:
        fault = {"$ref": REF.format(model=each.fault.__name__)}
        content["text/event-stream"] = {"schema": events.event_schema(refs[each.chunk], fault)}
    if each.event is not None:
        content["text/event-stream"] = {"schema": events.named_event_schema(refs[each.event])}
    responses = {status: {"description": each.summary, "content": content} for status in ("200", *each.also)}
    responses |= {
        status: {"$ref": f"#/components/responses/{_response_name(each.fault, status)}"} for status in each.errors
    }
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for part in each.path.split("/")
        if part.startswith("{")
    ]
    for place, given in (("query", each.query), ("header", each.headers)):
        parameters += [{"name": name, "in": place, "schema": schema} for name, schema in given]
    found: dict[str, Any] = {"summary": each.summary, "parameters": parameters, "responses": responses}
    if each.body is not None:
        found["requestBody"] = {"required": True, "content": each.body(parsed)}
    return found


def _response_name(fault: Any, status: str) -> str:
    return status if fault is answers.ErrorAnswer else f"{fault.__name__}-{status}"


def _responses(fault: Any) -> dict[str, Any]:
    content = _json({"$ref": REF.format(model=fault.__name__)})
    found: dict[str, Any] = {
        _response_name(fault, status): {"description": description, "content": content}
        for status, description in STATUSES.items()
    }
    found[_response_name(fault, "429")]["headers"] = {
        "Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}
    }
    return found


def _allow_none_finite(schemas: dict[str, Any]) -> None:
    """Allow null for numbers of pool statistics: one that is not finite is written as null."""
    for name in ("PoolStats", "MemberStats", "CacheStats"):
        for schema in schemas[name]["properties"].values():
            for each in (schema, schema.get("additionalProperties")):
                if isinstance(each, dict) and each.get("type") == "number":
                    each["type"] = ["number", "null"]


@cache
def _encoded(batches: bool, keys: bool, anonymous: bool, experiments: bool) -> bytes:
    """`document` as JSON, made once for a process: the schemas of all bodies and answers take a while."""
    return bytes(JSONResponse(document(batches, keys, anonymous, experiments)).body)


def router_of(service: GenerationService) -> APIRouter:
    """`/openapi.json` of what a service offers, to anybody: it tells nothing that the source does not."""
    access = service.callers.config
    made = _encoded(
        service.batches is not None,
        access is not None,
        access is None or access.anonymous is not None,
        service.console.experiments is not None,
    )
    routes = APIRouter()

    @routes.get(PATH)
    async def openapi() -> Response:
        return Response(made, media_type="application/json")

    return routes
