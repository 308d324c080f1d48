"""OpenAI's Python client asks for embeddings, in its own default encoding and as numbers; a reranker over HTTP."""

from __future__ import annotations

import httpx
import numpy as np
import openai
import pytest

from tests.clients.site import Site
from turnout.client import Client

pytestmark = pytest.mark.clients

TEXTS = ["What is 12+30?", "42", "What is 69*9-32*6+44?"]


def test_openais_client_gets_unit_vectors_in_both_encodings(site: Site) -> None:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.keys["acme"], max_retries=0) as client:
        made = client.embeddings.create(model="demo", input=TEXTS)
        floats = client.embeddings.create(model="large", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="demo", input=TEXTS[0], dimensions=8)
        vectors = np.array([each.embedding for each in made.data])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        np.testing.assert_allclose(vectors, [each.embedding for each in floats.data], atol=1e-4)
        cut = vectors[0][:8] / np.linalg.norm(vectors[0][:8])
        np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-4)
        assert made.usage.prompt_tokens == made.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="demo", input=TEXTS, dimensions=1 << 16)
        assert refused.value.param == "dimensions"
    with Client(site.grpc_address, api_key=site.keys["acme"]) as ours:
        np.testing.assert_allclose(ours.embed(TEXTS, model="demo"), vectors, atol=1e-4)
    site.assert_idle()


@pytest.mark.parametrize("scoring", ["likelihood", "embedding"])
def test_documents_are_ranked_as_their_scores_say(site: Site, scoring: str) -> None:
    with httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {site.keys['acme']}"}) as http:
        body = {"model": "demo", "scoring": scoring}
        ranked = http.post("/v2/rerank", json={**body, "query": TEXTS[0], "documents": TEXTS}).json()["results"]
        scored = http.post("/score", json={**body, "text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    scores = [each["score"] for each in scored]
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
    assert all(0 <= score <= 1 for score in scores)
    if scoring == "embedding":
        assert ranked[0]["index"] == 0
        assert scores[0] == pytest.approx(1, abs=1e-5)
    site.assert_idle()
