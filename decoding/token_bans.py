"""Bans of single tokens by a request: `allowed_token_ids`, `bad_words` and `min_tokens`, after any draft path.

They are part of the target's distribution, as a structure is, so every exact method keeps to them. A ban that would
leave no token at all is skipped: a structure comes first, then allowed ids, then bad words, then the least length.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from decoding.sequence import Sequence

NEG_INF = float("-inf")


def banned_ids(seq: Sequence, path: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that would complete a bad word, and those that would end the answer too early.

    Args:
        seq: the answer so far.
        path: hypothetical tokens after it.
    """
    params = seq.sampling
    words: frozenset[int] = frozenset()
    if params.bad_word_ids:
        longest = max(map(len, params.bad_word_ids)) - 1
        written = (*seq.tokens[max(seq.num_prompt_tokens, len(seq) - longest) :], *path) if longest else ()
        words = frozenset(
            word[-1]
            for word in params.bad_word_ids
            if len(word) - 1 <= len(written) and written[len(written) - len(word) + 1 :] == word[:-1]
        )
    early = seq.end_ids if len(seq.generated) + len(path) < params.min_tokens else frozenset()
    return words, early


def is_banned(seq: Sequence, path: tuple[int, ...], token: int) -> bool:
    """Return whether the request bans a token after a draft path; a ban that `ban` would skip counts all the same."""
    params = seq.sampling
    if not params.bans_tokens:
        return False
    if params.allowed_token_ids and token not in params.allowed_token_ids:
        return True
    return any(token in ids for ids in banned_ids(seq, path))


def ban(row: torch.Tensor, seq: Sequence, path: tuple[int, ...]) -> None:
    """Set the logits of banned tokens to -inf, in place.

    Args:
        row: float32 [vocab].
        seq: the answer so far.
        path: hypothetical tokens after it.
    """
    if seq.sampling.allowed_token_ids:
        allowed = _made(seq.sampling.allowed_token_ids, row.device)
        allowed = allowed[allowed < row.numel()]
        _keep(row, torch.full_like(row, NEG_INF).index_copy(0, allowed, row[allowed]))
    for ids in banned_ids(seq, path):
        if ids:
            _keep(row, row.index_fill(0, _tensor((each for each in ids if each < row.numel()), row.device), NEG_INF))


def _keep(row: torch.Tensor, kept: torch.Tensor) -> None:
    """Take over what is kept, unless it is nothing."""
    row.copy_(torch.where(kept.isneginf().all(), row, kept))


def _tensor(ids: Iterable[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _made(ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return _tensor(set(ids), device)
