"""Several documents in one row: tokens, positions, targets, and a mask that keeps the documents apart."""

from dataclasses import dataclass

import torch

IGNORED = -100
_PADDING = -1


@dataclass(frozen=True)
class Document:
    """Token ids, and for each token whether the model is taught to produce it."""

    token_ids: list[int]
    learned: list[bool]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.learned):
            raise ValueError(f"learned must have {len(self.token_ids)} entries, got {len(self.learned)}")


@dataclass(frozen=True)
class Batch:
    """Packed rows. A target is the next token of the same document, or IGNORED."""

    token_ids: torch.Tensor  # (rows, row_len)
    position_ids: torch.Tensor  # (rows, row_len), restarting at 0 in every document
    targets: torch.Tensor  # (rows, row_len)
    document_ids: torch.Tensor  # (rows, row_len), _PADDING where nothing stands

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a document."""
        return int((self.document_ids != _PADDING).sum())

    def attention_mask(self) -> torch.Tensor:
        """(rows, 1, row_len, row_len), true where the query row may see the key column."""
        same = self.document_ids[:, :, None] == self.document_ids[:, None, :]
        return same.tril()[:, None]


def fits(row: list[Document], document: Document, row_len: int) -> bool:
    """Whether the document still fits behind the documents of the row."""
    return sum(len(other.token_ids) for other in row) + len(document.token_ids) <= row_len


def pack(rows: list[list[Document]], row_len: int, pad_id: int) -> Batch:
    """Lay the documents of each row end to end.

    Raises:
        ValueError: the documents of a row are longer than `row_len`.
    """
    shape = (len(rows), row_len)
    token_ids = torch.full(shape, pad_id, dtype=torch.long)
    position_ids = torch.zeros(shape, dtype=torch.long)
    targets = torch.full(shape, IGNORED, dtype=torch.long)
    document_ids = torch.full(shape, _PADDING, dtype=torch.long)
    for index, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row):
            end = start + len(document.token_ids)
            if end > row_len:
                raise ValueError(f"row {index} holds more than {row_len} tokens")
            token_ids[index, start:end] = torch.tensor(document.token_ids)
            position_ids[index, start:end] = torch.arange(end - start)
            following = [
                token if learned else IGNORED
                for token, learned in zip(document.token_ids[1:], document.learned[1:], strict=True)
            ]
            targets[index, start : end - 1] = torch.tensor(following, dtype=torch.long)
            document_ids[index, start:end] = number
            start = end
    return Batch(token_ids, position_ids, targets, document_ids)
