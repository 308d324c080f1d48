"""OpenTelemetry's semantic conventions for generative AI: attributes of a request's span, metrics of a model server.

Names and buckets are those of open-telemetry/semantic-conventions-genai (status: development).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from deployments.telemetry import catalogue as of
from deployments.telemetry.catalogue import Metric
from turnout.calls import GenerateCall, Usage
from turnout.embed_calls import AnyCall
from turnout.tracing import Attribute

PROVIDER = "turnout"
# Sampling parameters by the names of the conventions, which have all of them but these as floating point.
PARAMS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "max_tokens", "seed")
WHOLE = ("max_tokens", "seed")


def operation_of(call: AnyCall, kind: str) -> str:
    """Return `gen_ai.operation.name`: chat, text_completion, embeddings, or another kind of request, as score."""
    if not isinstance(call, GenerateCall):
        return "embeddings" if kind == "embed" else kind
    return "chat" if call.messages is not None else "text_completion"


def request_attributes(call: AnyCall, kind: str, model: str) -> dict[str, Attribute]:
    """Return what a request asks for; parameters that it leaves open are missing.

    Args:
        call: as it came.
        kind: stream, generate or score.
        model: that it asks for; "" for unknown names.
    """
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": operation_of(call, kind),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }
    if not isinstance(call, GenerateCall):
        return found
    sampling = call.sampling
    found["gen_ai.request.stream"] = kind == "stream"
    found |= _params({name: getattr(sampling, name) for name in sampling.model_fields_set})
    if sampling.n != 1:
        found["gen_ai.request.choice.count"] = sampling.n
    if sampling.stop:
        found["gen_ai.request.stop_sequences"] = sampling.stop
    if sampling.structure is not None:
        found["gen_ai.output.type"] = "json" if sampling.structure.kind.startswith("json") else "text"
    if call.session:
        found["gen_ai.conversation.id"] = call.session
    return found


def response_attributes(
    call: AnyCall, model: str, usage: Usage | None, finish_reasons: Iterable[str]
) -> dict[str, Attribute]:
    """Return what came of a request.

    Args:
        call: as it was admitted.
        model: that it asked for.
        usage: what it took, and the parameters that tokens were chosen with; None: it was not answered.
        finish_reasons: of the answers that were finished, in order.
    """
    found: dict[str, Attribute] = {}
    if reasons := tuple(map(str, finish_reasons)):
        found["gen_ai.response.finish_reasons"] = reasons
    if usage is None:
        return found
    return found | {
        "gen_ai.response.id": call.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        **_params({name: value for name, value in usage.sampling.items() if name != "seed"}),
    }


def _params(given: Mapping[str, Any]) -> dict[str, Attribute]:
    values = {name: given[name] for name in PARAMS if given.get(name) is not None}
    return {f"gen_ai.request.{name}": int(v) if name in WHOLE else float(v) for name, v in values.items()}


class GenAiMetrics:
    """Histograms of the conventions, by operation and model.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histograms = {
            metric: Histogram(metric.name, metric.meaning, metric.labels, buckets=metric.buckets, registry=registry)
            for metric in of.GEN_AI
        }
        # Looking a series up by its labels takes the library longer than counting in it.
        self._series: dict[tuple[Metric, tuple[str, ...]], Histogram] = {}

    def ended(self, operation: str, model: str, outcome: str, seconds: float) -> None:
        """Observe the duration of a request.

        Args:
            operation: see `operation_of`.
            model: that it asked for; a known name, so that clients cannot make up time series.
            outcome: OK, or the code of the error.
            seconds: from its arrival to its end.
        """
        self._of(of.GEN_AI_REQUEST_S, operation, model, "" if outcome == "OK" else outcome).observe(seconds)

    def answered(self, operation: str, model: str, usage: Usage, first_token_s: float, token_s: float | None) -> None:
        """Observe the tokens and the times of an answer.

        Args:
            operation: see `operation_of`.
            model: that the request asked for; a known name.
            usage: what it took.
            first_token_s: time to the first token, from the request's arrival, in seconds.
            token_s: time per token after it, in seconds; None: there was none.
        """
        self._of(of.GEN_AI_TTFT_S, operation, model).observe(first_token_s)
        if token_s is not None:
            self._of(of.GEN_AI_TPOT_S, operation, model).observe(token_s)
        self._of(of.GEN_AI_TOKENS, operation, model, "input").observe(usage.prompt_tokens)
        self._of(of.GEN_AI_TOKENS, operation, model, "output").observe(usage.completion_tokens)

    def _of(self, metric: Metric, operation: str, model: str, *labels: str) -> Histogram:
        key = (metric, (operation, model, *labels))
        found = self._series.get(key)
        if found is None:
            values = (operation, PROVIDER, model, model, *labels)
            found = self._series[key] = self._histograms[metric].labels(*values)
        return found
