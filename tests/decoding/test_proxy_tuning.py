from __future__ import annotations

import torch

from decoding.contrast.base import StreamRows
from decoding.contrast.proxy_tuning import ProxyTuning


def test_the_answering_model_moves_as_the_expert_did() -> None:
    streams = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]])
    assert ProxyTuning(ProxyTuning.Params(alpha=0.5)).combine(streams, StreamRows([])).tolist() == [[2.0, -0.5]]
    same = torch.tensor([[[1.0, 0.0], [2.0, 5.0], [2.0, 5.0]]])  # tuning changed nothing
    assert ProxyTuning().combine(same, StreamRows([])).tolist() == [[1.0, 0.0]]
