"""/v1/score and /v1/rerank: how relevant documents are to a query, in vLLM's, Jina's and Cohere's shapes.

By default the score is the query likelihood (Ponte and Croft, "A language modeling approach to information retrieval",
1998; with language models and a prompt: Sachan et al., "Improving Passage Retrieval with Zero-Shot Question
Generation", 2022): the geometric mean, from 0 to 1, of the probabilities of the query's tokens after the document.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from deployments.access.callers import CallerOf
from deployments.embeddings_http import Truncate
from deployments.faults import respell
from deployments.openapi.extras import Answer
from deployments.read_surface import Asked, ReadAnswer, ReadSurface, TokensRead, usage_of
from deployments.reading import MAX_COMPLETIONS
from deployments.request_fields import BodyPart
from deployments.service import GenerationService
from turnout.calls import ScoreCall, ScoredTokens
from turnout.embed_calls import EmbedCall
from turnout.errors import TurnoutError, invalid

SCORE_PATHS = "/v1/score", "/score"
RERANK_PATHS = "/v1/rerank", "/rerank", "/v2/rerank"
PATHS = frozenset(SCORE_PATHS + RERANK_PATHS)
# After Sachan et al.; the query follows.
BEFORE_DOCUMENT = "Passage: "
AFTER_DOCUMENT = "\nPlease write a question based on this passage.\nQuestion:"

Scoring = Annotated[
    Literal["likelihood", "embedding"],
    Field(
        description="likelihood: geometric mean of the probabilities of the query's tokens after the document;"
        " embedding: (1 + cosine of their embeddings) / 2"
    ),
]
Text = Annotated[str, Field(min_length=1)]
Pair = tuple[str, str]  # a query and a document


class ScoreBody(BodyPart):
    """POST /v1/score: a query (text_1) and documents (text_2), or as many of the one as of the other."""

    model: str = ""
    text_1: Text | Annotated[list[Text], Field(min_length=1)]
    text_2: Text | Annotated[list[Text], Field(min_length=1)]
    scoring: Scoring = "likelihood"
    truncate_prompt_tokens: Truncate = None


class Document(BodyPart):
    """A document as an object."""

    text: Text


class RerankBody(BodyPart):
    """POST /v1/rerank."""

    model: str = ""
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_COMPLETIONS)]
    top_n: Annotated[int | None, Field(ge=1, description="results returned; absent: all")] = None
    return_documents: Annotated[bool, Field(description="whether results hold the documents' texts")] = True
    scoring: Scoring = "likelihood"
    truncate_prompt_tokens: Truncate = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1, description="Cohere's name of truncate_prompt_tokens")] = None


class ScoreObject(Answer):
    """How relevant one pair's texts are to each other, from 0 to 1."""

    object: Literal["score"]
    index: int
    score: float


class ScoresAnswer(Answer):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    data: list[ScoreObject]
    model: str
    usage: TokensRead


class DocumentText(Answer):
    """A document."""

    text: str


class RankedDocument(Answer):
    """A document by its index in the request; its relevance is from 0 to 1."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class RerankAnswer(Answer):
    """The most relevant document first."""

    id: str
    results: list[RankedDocument]
    model: str
    usage: TokensRead


async def scored(service: GenerationService, body: ScoreBody, asked: Asked) -> ReadAnswer:
    """Ask for the scores that a body wants."""
    pairs = paired(body.text_1, body.text_2)
    fields = partial(_field, "text_1", body.text_1), partial(_field, "text_2", body.text_2)
    scores, tokens = await _relevances(service, asked, pairs, body.scoring, body.truncate_prompt_tokens, *fields)
    data: list[ScoreObject] = [{"object": "score", "index": i, "score": each} for i, each in enumerate(scores)]
    made: ScoresAnswer = {
        "id": asked.id, "object": "list", "data": data, "model": asked.model, "usage": usage_of(tokens)
    }  # fmt: skip
    return ReadAnswer(made, tokens)


async def ranked(service: GenerationService, body: RerankBody, asked: Asked) -> ReadAnswer:
    """Ask for the ranking that a body wants."""
    if body.truncate_prompt_tokens is not None and body.max_tokens_per_doc is not None:
        raise invalid("max_tokens_per_doc", "conflicts with truncate_prompt_tokens; give one of them")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    own = body.truncate_prompt_tokens
    truncate = body.max_tokens_per_doc if own is None else own
    fields = partial(_field, "query", body.query), partial(_field, "documents", texts)
    pairs = [(body.query, text) for text in texts]
    scores, tokens = await _relevances(service, asked, pairs, body.scoring, truncate, *fields)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results: list[RankedDocument] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.return_documents:
        for each in results:
            each["document"] = {"text": texts[each["index"]]}
    made: RerankAnswer = {"id": asked.id, "results": results, "model": asked.model, "usage": usage_of(tokens)}
    return ReadAnswer(made, tokens)


SCORE = ReadSurface("score-", ScoreBody, scored)
RERANK = ReadSurface("rerank-", RerankBody, ranked)


def router(service: GenerationService) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    async def score(request: Request, caller: CallerOf) -> Response:
        return await SCORE.respond(service, request, caller)

    async def rerank(request: Request, caller: CallerOf) -> Response:
        return await RERANK.respond(service, request, caller)

    for paths, handler in ((SCORE_PATHS, score), (RERANK_PATHS, rerank)):
        for path in paths:
            routes.add_api_route(path, handler, methods=["POST"])
    return routes


def paired(first: str | list[str], second: str | list[str]) -> list[Pair]:
    """Each text of one side with its text of the other; a single one with all of the other side.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there are too many, or not as many of the one as of the other.
    """
    ones, others = ([side] if isinstance(side, str) else side for side in (first, second))
    if len(ones) == 1:
        ones = ones * len(others)
    elif len(others) != len(ones):
        raise invalid("text_2", f"must have as many texts as text_1 ({len(ones)}), or text_1 one (got {len(others)})")
    if len(ones) > MAX_COMPLETIONS:
        raise invalid("text_2", f"at most {MAX_COMPLETIONS} texts at once (got {len(ones)})")
    return list(zip(ones, others, strict=True))


async def _relevances(
    service: GenerationService,
    asked: Asked,
    pairs: list[Pair],
    scoring: str,
    truncate: int | None,
    query_field: Callable[[int], str],
    document_field: Callable[[int], str],
) -> tuple[list[float], int]:
    """Scores of pairs, from 0 to 1, and the tokens read for them.

    Args:
        service: whom to ask.
        asked: the request.
        pairs: queries with documents.
        scoring: see `Scoring`.
        truncate: see `Truncate`; of documents.
        query_field: name in the body of a pair's query.
        document_field: name of its document.
    """
    with asked.asking():
        try:
            if scoring == "likelihood":
                return await _likelihoods(service, asked, pairs, truncate)
            return await _cosines(service, asked, pairs, truncate)
        except TurnoutError as error:
            spelling: dict[str, str] = {}
            place = _places(pairs)
            for index, (query, document) in enumerate(pairs):
                spelling[f"prompts.{index}"] = document_field(index)
                spelling[f"completions.{index}"] = query_field(index)
                spelling.setdefault(f"input.{place[query]}", query_field(index))
                spelling.setdefault(f"input.{place[document]}", document_field(index))
            spelling["input"] = document_field(0)
            raise respell(error, spelling) from None


def _field(name: str, given: str | list[str], index: int) -> str:
    """Name of one text of a field that may hold one or several."""
    return f"{name}.{index}" if isinstance(given, list) and len(given) > 1 else name


def _places(pairs: list[Pair]) -> dict[str, int]:
    """Each text once, by its place."""
    return {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}


async def _likelihoods(
    service: GenerationService, asked: Asked, pairs: list[Pair], truncate: int | None
) -> tuple[list[float], int]:
    call = ScoreCall(
        request_id=asked.id,
        model=asked.model,
        prompt=(),
        completions=tuple(f" {query}" for query, _ in pairs),
        parse_special=False,  # in what others wrote they never are meant
        prompts=tuple(BEFORE_DOCUMENT + document for _, document in pairs),
        suffix=AFTER_DOCUMENT,
        truncate=truncate,
    )
    scored = await service.score(asked.attributed(call))
    tokens = sum(each.prompt_tokens + len(each.tokens) for each in scored)
    return [likelihood(each) for each in scored], tokens


def likelihood(scored: ScoredTokens) -> float:
    """Geometric mean of the probabilities of a completion's tokens."""
    logprobs = [token.logprob or 0.0 for token in scored.tokens]
    return math.exp(min(sum(logprobs) / len(logprobs), 0.0))


async def _cosines(
    service: GenerationService, asked: Asked, pairs: list[Pair], truncate: int | None
) -> tuple[list[float], int]:
    place = _places(pairs)
    texts = list(place)
    call = EmbedCall(asked.id, asked.model, tuple(texts), truncate=truncate, parse_special=False)
    made = await service.embed(asked.attributed(call))
    vectors: Any = np.frombuffer(made.data, "<f4").reshape(len(texts), made.dimensions)
    cosines = [float(vectors[place[one]] @ vectors[place[other]]) for one, other in pairs]
    return [min(max((1 + each) / 2, 0.0), 1.0) for each in cosines], sum(made.prompt_tokens)
