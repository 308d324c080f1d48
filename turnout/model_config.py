"""One model of the configuration: what is computed here, and how, or which server is asked for it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from turnout.endpoint_config import FREE, EndpointConfig, PriceConfig
from turnout.errors import FieldError
from turnout.pool_config import Section

ELSEWHERE = frozenset({"endpoint", "price", "path"})  # what of a model with an endpoint may be given


class ModelConfig(Section):
    """One causal language model: files that are computed with here, or a server elsewhere."""

    path: Annotated[
        str,
        Field(
            description="needed without an endpoint: folder of a Hugging Face checkpoint; a GGUF file; hf:ORG/NAME,"
            " hf:ORG/NAME/FILE.gguf or either with @REVISION, of the Hugging Face hub; a URL that fsspec knows;"
            " demo:small or demo:large"
        ),
    ] = ""
    endpoint: Annotated[
        EndpointConfig | None,
        Field(description="server that answers for the model; absent: path is computed with here"),
    ] = None
    price: Annotated[PriceConfig, Field(description="of its tokens, for the cost in usd; absent: nothing")] = FREE
    dtype: Annotated[
        Literal["bfloat16", "float32", "float16"],
        Field(
            description="numbers the weights and the cache use; the compiled CPU kernels do not compute in float16, and"
            " some models exceed its range"
        ),
    ] = "bfloat16"
    weights: Annotated[
        Literal["dense", "stored", "int8", "int4"],
        Field(
            description="how the compiled CPU kernels keep the weights of linear layers: dense, as numbers of dtype;"
            " stored, as the integers of a GGUF (Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS), GPTQ, AWQ or"
            " compressed-tensors checkpoint where they can be held exactly; int8 or int4, rounded to integers in groups"
            " of 32 (the head always to int8). Of integers, the layers' inputs are rounded to 8 bits"
        ),
    ] = "dense"
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        Field(
            description="how keys and values are kept: auto, as numbers of dtype; int8, rounded to integers of a byte"
            " with a scale for each token and head, so that the same memory holds about twice the tokens of a bfloat16"
            " model (not by the CUDA kernels: with them engine.kernels has to be torch)"
        ),
    ] = "auto"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")] = "cpu"
    kv_memory_bytes: Annotated[int, Field(ge=1 << 20, description="memory of the block pool, bytes")] = 256 << 20
    memory_limit_bytes: Annotated[
        int | None,
        Field(ge=1, description="most memory for weights and cache, bytes; absent: what machine and cgroup have"),
    ] = None
    max_length: Annotated[
        int | None, Field(ge=16, description="longest sequence, tokens; absent: what the checkpoint allows")
    ] = None
    tensor_parallel: Annotated[
        int, Field(ge=1, le=64, description="processes, each with a device, that one copy is split over")
    ] = 1

    @model_validator(mode="after")
    def _check_place(self) -> ModelConfig:
        if (self.endpoint is None) != bool(self.path):
            message = "field required, or `endpoint` in its place"
            raise FieldError(
                "path", message if self.endpoint is None else "must be absent: `endpoint` says where it is"
            )
        if self.weights != "dense":
            needed = {"device": "cpu", "tensor_parallel": 1}
            for name, value in needed.items():
                if getattr(self, name) != value:
                    raise FieldError("weights", f"{self.weights!r} needs {name} {value}; allowed here: dense")
            if self.dtype == "float16":
                raise FieldError("weights", f"{self.weights!r} needs dtype bfloat16 or float32; allowed here: dense")
        if self.kv_dtype != "auto" and self.tensor_parallel > 1:
            raise FieldError("kv_dtype", f"{self.kv_dtype!r} needs tensor_parallel 1; allowed here: auto")
        usual = type(self).model_fields
        if self.endpoint is not None:
            differing = [name for name in usual if getattr(self, name) != usual[name].default]
            if computed := sorted(set(differing) - ELSEWHERE):
                raise FieldError(computed[0], "must be absent: the model is computed by its endpoint")
        return self
