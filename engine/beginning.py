"""An answer before its first token: its sequence, and the text that will be read off it."""

from __future__ import annotations

from decoding.noise import derive_seed
from decoding.sequence import Sequence
from engine.prepare import Prepared
from engine.sharing import Share
from engine.text import Detokenizer, StopStrings, TextTokenizer


def begin(prepared: Prepared, tokenizer: TextTokenizer, share: Share, index: int) -> tuple[Sequence, StopStrings]:
    """The prompt's sequence for one of a call's answers.

    Args:
        prepared: the checked call.
        tokenizer: the pool's.
        share: says whose cache the prompt belongs to.
        index: which answer; each has noise of its own.
    """
    call, sampling = prepared.call, prepared.sampling
    text = StopStrings(Detokenizer(tokenizer, prepared.prompt), sampling.stop)
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
    return sequence, text
