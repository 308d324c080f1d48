"""What the task `compress` made, as it was before; by the same model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from decoding.tasks._arithmetic import Decoder, weights_of
from decoding.tasks._container import MOST_FORWARDS, Container, checksum, model_mark, numerics_mark, unpack
from decoding.tasks._lanes import LEAST_LANES, Logits, bytes_of, walk
from decoding.tasks.base import Base64, Progress, Task, TaskResult, TaskRun, from_base64, to_base64
from decoding.tasks.compress import MOST_BYTES, MOST_LANES, MOST_WINDOW, Compress, CompressParams
from turnout.errors import Code, TurnoutError, invalid, out_of_range
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import ModelPool


class DecompressParams(MethodParams):
    """Parameters of `decompress`."""

    data: Annotated[Base64, Field(description="what `compress` returned as its `data`")]


class DecompressResult(TaskResult):
    """The original."""

    data: Base64
    text: Annotated[str | None, Field(description="the same as text; null: it is no UTF-8")]
    original_bytes: int
    tokens: int


class Decompress(Task):
    """The other side of `compress`.

    Paper #23 (LLMZip). Damaged data, data of another model, and data that was coded by other kernels or another kind of
    processor, whose logits differ in their last bits, are refused; a checksum says that the original is back.
    """

    params: DecompressParams
    Params = DecompressParams
    Result = DecompressResult
    papers = (23,)
    file_param: ClassVar[str] = "data"
    file_result: ClassVar[str] = "data"

    @classmethod
    async def sample(cls, run: TaskRun, models: ModelPool) -> dict[str, Any]:
        """See `Task.sample`."""
        made = await Compress(CompressParams(text="short", window=8, overlap=2)).run(run, models, Progress())
        return {"data": made.data}

    async def run(self, run: TaskRun, models: ModelPool, progress: Progress) -> DecompressResult:
        """See `Task.run`."""
        field = self.field("data")
        found = unpack(from_base64(self.params.data, field), field)
        _check(found, run, field)
        decoder = Decoder(found.code)

        def decoded(lane: int, index: int, logits: Logits, numerics: str) -> int:
            if numerics_mark(numerics) != found.numerics:
                raise invalid(field, f"was coded by other kernels, or on another kind of processor, than {numerics!r}")
            return decoder.decode(weights_of(logits))

        lanes = await walk(run, found.shape, decoded, progress, field)
        data = bytes_of([token for lane in lanes for token in lane], models.tokenizer)
        if checksum(data) != found.checksum or len(data) != found.shape.size:
            message = f"{field}: the model's numbers are not those it was coded with: its checksum does not fit"
            raise TurnoutError(Code.INTERNAL, message, field)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
        size, tokens = len(data), found.shape.tokens
        return DecompressResult(data=to_base64(data), text=text, original_bytes=size, tokens=tokens)


def _check(found: Container, run: TaskRun, field: str) -> None:
    """Refuse, before anything is computed, what this model did not code.

    Raises:
        TurnoutError: INVALID_ARGUMENT or OUT_OF_RANGE.
    """
    shape = found.shape
    if found.model != model_mark(run.model.digest) or shape.vocab_size != run.model.vocab_size:
        raise invalid(field, f"was coded by another model than {run.model.name!r}: the digests differ")
    if not 0 < shape.size <= MOST_BYTES or not 0 < shape.tokens <= shape.size:
        raise out_of_range(field, f"says that it holds {shape.size} bytes, {shape.tokens} tokens; at most {MOST_BYTES}")
    fits = LEAST_LANES <= shape.lanes <= MOST_LANES and 2 <= shape.window <= min(MOST_WINDOW, run.model.max_length)
    if not fits or not shape.overlap < shape.window or not shape.start < shape.vocab_size:
        raise invalid(field, f"was not made by the task compress: {shape.lanes} lanes, a window of {shape.window}")
    if shape.forwards > MOST_FORWARDS:
        raise out_of_range(field, f"needs {shape.forwards} forwards; at most {MOST_FORWARDS}")


PART = Decompress
