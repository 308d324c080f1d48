"""Messages of embed calls, for the Python clients."""

from __future__ import annotations

from collections.abc import Iterable

from turnout.client_messages import Prompt, text_or_ids
from turnout.proto import generation_pb2 as pb


def embed_request(
    inputs: Iterable[Prompt], model: str, pooling: str | None, dimensions: int | None, truncate: int | None
) -> pb.EmbedRequest:
    """The message of an embed call."""
    texts = [text_or_ids(each) for each in inputs]
    made = pb.EmbedRequest(model=model, input=texts, pooling=pooling or "")
    if dimensions is not None:
        made.dimensions = dimensions
    if truncate is not None:
        made.truncate_prompt_tokens = truncate
    return made


def embeddings(message: pb.EmbedResponse) -> list[list[float]]:
    """Vectors, in the order asked for."""
    return [list(each.values) for each in message.embeddings]
