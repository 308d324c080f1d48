"""An answer before its first token: its sequence, and what will read its text."""

from __future__ import annotations

from decoding.noise import derive_seed
from decoding.sequence import Sequence
from pool.detokenizer import Detokenizer
from pool.prefix_stores import Share
from pool.stop_strings import StopStrings
from pool.text import TextTokenizer
from pool.validation import Prepared


def begin(
    prepared: Prepared, tokenizer: TextTokenizer, share: Share, index: int
) -> tuple[Sequence, StopStrings, Detokenizer]:
    """Sequence of one of a call's answers, its text up to a stop string, and the part that each token has in it.

    Args:
        prepared: the checked call.
        tokenizer: the pool's.
        share: says whose cache the prompt belongs to.
        index: which answer; each has noise of its own.
    """
    call, sampling = prepared.call, prepared.sampling
    spans = tokenizer.detokenizer(prepared.prompt)
    text = StopStrings(spans.clone(), sampling.stop)
    sequence = Sequence(
        prepared.prompt,
        sampling,
        derive_seed(prepared.seed, index),
        tokenizer.eos_ids,
        text,
        share(call.tenant, prepared.prompt, call.sharing),
        prepared.account or call.tenant,
        lossy=call.cache == "lossy",
        patient=call.priority == "batch",
    )
    sequence.owner = call.tenant
    sequence.constraint = prepared.constraint.clone() if prepared.constraint is not None else None
    return sequence, text, spans
