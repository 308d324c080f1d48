"""Lossless compression of text, or any bytes, by a model's probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from decoding.tasks._arithmetic import Encoder, ideal_bits, weights_of
from decoding.tasks._container import MOST_FORWARDS, Container, Shape, checksum, model_mark, numerics_mark
from decoding.tasks._lanes import LEAST_LANES, Logits, start_token, tokens_of, walk
from decoding.tasks.base import Base64, Progress, Task, TaskResult, TaskRun, Text, from_base64, to_base64
from turnout.errors import FieldError, invalid, out_of_range
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import ModelPool

MOST_BYTES = 256 << 10
MOST_LANES, MOST_WINDOW = 64, 8192


class CompressParams(MethodParams):
    """Parameters of `compress`."""

    example: ClassVar = {"text": "Two lanes, and a second window: Gr\u00fc\u00dfe.", "window": 16, "overlap": 5}

    text: Annotated[Text | None, Field(description="what is compressed, as text; give this or `data`")] = None
    data: Annotated[Base64 | None, Field(description="what is compressed, as base64; give this or `text`")] = None
    window: Annotated[int, Field(ge=2, le=MOST_WINDOW, description="tokens read before a lane begins anew")] = 512
    overlap: Annotated[int, Field(ge=0, lt=MOST_WINDOW, description="of these, the last ones, read again")] = 128
    lanes: Annotated[
        int, Field(ge=LEAST_LANES, le=MOST_LANES, description="parts of a long text that are read side by side")
    ] = 4

    @model_validator(mode="after")
    def _check(self) -> CompressParams:
        if (self.text is None) == (self.data is None):
            raise FieldError("text", "give either text or data")
        if self.overlap >= self.window:
            raise FieldError("overlap", f"must be less than window, {self.window} (got {self.overlap})")
        return self


class CompressResult(TaskResult):
    """Compressed data, and how much it is."""

    data: Base64
    original_bytes: int
    compressed_bytes: int
    code_bytes: Annotated[int, Field(description="of the compressed bytes, the arithmetic code")]
    tokens: int
    characters: Annotated[int | None, Field(description="of the original; null: it is no UTF-8")]
    bits_per_character: Annotated[float | None, Field(description="of the arithmetic code")]
    bits_per_byte: Annotated[float, Field(description="of the arithmetic code")]
    model_bits: Annotated[float, Field(description="information of the tokens under the model, in bits: the bound")]


class Compress(Task):
    """Arithmetic coding with the model as the predictor.

    Paper #23 (LLMZip), its arithmetic-coding mode. Each token is coded with the probability that the model gives it
    after the tokens before it. Decoding needs the same logits to the last bit, so the model runs in forwards of a fixed
    shape between the steps of other requests (`decoding.fixed_forward`), token by token on both sides. The paper slides
    its window by a token; here a lane begins anew after `window` tokens with its last `overlap` ones, which spares
    reading all of the window for each token. A text longer than a window is cut into up to `lanes` parts, which are
    read together.
    """

    params: CompressParams
    Params = CompressParams
    Result = CompressResult
    papers = (23,)
    file_param: ClassVar[str] = "data"
    file_result: ClassVar[str] = "data"

    async def run(self, run: TaskRun, models: ModelPool, progress: Progress) -> CompressResult:
        """See `Task.run`."""
        params = self.params
        field = "data" if params.text is None else "text"
        data = from_base64(params.data or "", self.field("data")) if params.text is None else params.text.encode()
        if not data:
            raise invalid(self.field(field), "is empty; at least one byte is needed")
        if len(data) > MOST_BYTES:
            raise out_of_range(self.field(field), f"{len(data)} bytes; at most {MOST_BYTES}")
        texts = models.tokenizer
        tokens = await tokens_of(data, run, texts, self.field(field))
        shape = self._shape(run, len(tokens), len(data))
        if shape.forwards > MOST_FORWARDS:
            again = f"{shape.overlap} of {shape.window} tokens are read again each time"
            raise out_of_range(self.field("overlap"), f"{again}: {shape.forwards} forwards; at most {MOST_FORWARDS}")
        parts, begin = list[list[int]](), 0
        for length in shape.lengths:
            parts.append(tokens[begin : begin + length])
            begin += length
        encoder, seen, bits = Encoder(), "", 0.0

        def coded(lane: int, index: int, logits: Logits, numerics: str) -> int:
            nonlocal seen, bits
            seen, token = numerics, parts[lane][index]
            encoder.encode(weights_of(logits), token)
            bits += ideal_bits(logits, token)
            return token

        await walk(run, shape, coded, progress, self.field("window"))
        marks = (model_mark(run.model.digest), numerics_mark(seen))
        made = Container(*marks, shape, checksum(data), encoder.finish())
        return _result(data, made, bits)

    def _shape(self, run: TaskRun, tokens: int, size: int) -> Shape:
        params = self.params
        window = min(params.window, run.model.max_length)
        overlap = min(params.overlap, window - 1)
        lanes = max(min(params.lanes, -(-tokens // window)), LEAST_LANES)
        return Shape(run.model.vocab_size, lanes, window, overlap, start_token(run), tokens, size)


def _result(data: bytes, made: Container, bits: float) -> CompressResult:
    packed, code_bits = made.pack(), 8 * len(made.code)
    try:
        characters = len(data.decode())
    except UnicodeDecodeError:
        characters = None
    return CompressResult(
        data=to_base64(packed),
        original_bytes=len(data),
        compressed_bytes=len(packed),
        code_bytes=len(made.code),
        tokens=made.shape.tokens,
        characters=characters,
        bits_per_character=code_bits / characters if characters else None,
        bits_per_byte=code_bits / len(data),
        model_bits=bits,
    )


PART = Compress
