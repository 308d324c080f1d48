"""The next token of the same rows, step after step: what their parameters ask for is worked out once."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from decoding.best_tokens import best_tokens
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_keys, seed_keys
from decoding.processor_chain import apply, chain_of
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence

PLAIN = ReadSpec()


class TokenRows(Items[list[Readout]]):
    """Rows of which nothing but the token was read: the outcome of a forward, as `Runner.run` has it.

    Args:
        tokens: [rows].
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> list[Readout]:  # type: ignore[override]  # it is not sliced
        return [Readout(self.tokens[place])]


def reads_ahead(seq: Sequence, want: ReadSpec) -> bool:
    """Return whether a row can be read while the sequence is as it was some tokens before.

    So it is where logits depend on the tokens before them through the model alone: without penalties, processors of
    the request's own, structures, bans, and states of layers.
    """
    sampling = seq.sampling
    own = chain_of(seq).before or sampling.processors or sampling.bans_tokens or seq.constraint is not None
    kept = want.hidden or want.before or want.mean or want.probs or want.logits or want.among is not None
    return want.draw is NoiseKind.SAMPLE and not own and not kept


class TokenReader:
    """Reader of rows for which `reads_ahead` holds.

    Args:
        seqs: [rows].
        wants: [rows].
    """

    def __init__(self, seqs: list[Sequence], wants: list[ReadSpec]) -> None:
        self._seqs, self._wants = seqs, wants
        self._plain = all(want is PLAIN or want == PLAIN for want in wants)
        self._sampled = [place for place, seq in enumerate(seqs) if not seq.sampling.greedy]
        self._contexts = [RowContext(seqs[place]) for place in self._sampled]
        self._links = [chain_of(seqs[place]).after for place in self._sampled]
        self._seeds = seed_keys(seqs[place].seed for place in self._sampled)

    def read(self, logits: torch.Tensor, positions: npt.NDArray[np.int64]) -> Items[list[Readout]]:
        """Read as `decoding.readout.read` does: the same tokens, and the same of what is read with them.

        Args:
            logits: float32 [rows, vocab], raw; not modified.
            positions: [rows], of the tokens that the rows choose.
        """
        if not self._plain:
            histories = [RowContext(seq, at=at) for seq, at in zip(self._seqs, positions.tolist(), strict=True)]
            return [[row] for row in read(logits, histories, self._wants)]
        if len(self._sampled) == len(self._seqs):
            return TokenRows(self._drawn(logits, positions).tolist())
        tokens = best_tokens(logits)
        if self._sampled:
            tokens[self._sampled] = self._drawn(logits[self._sampled], positions[self._sampled])
        return TokenRows(tokens.tolist())

    def _drawn(self, logits: torch.Tensor, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        keys = noise_keys(self._seeds, positions, Purpose.SAMPLE)
        scores = apply(logits, logits, self._contexts, self._links)
        return best_tokens(scores + gumbel(keys, logits.shape[1], logits.device))
