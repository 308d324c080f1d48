from __future__ import annotations

import pytest
import torch

from benchmarks import bench_cuda
from benchmarks.bench_cuda import Load, step_bytes
from training.random_models import llama_config, random_model


def test_a_step_reads_all_weights_but_the_embedding_and_the_whole_cache() -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = llama_config(300, **shape, intermediate_size=16, tie_word_embeddings=False)
    model = random_model(config, seed=0).to(torch.bfloat16)
    attention, mlp, norms, head = 8 * (8 + 4 + 4) + 8 * 8, 3 * 8 * 16, 3 * 8, 300 * 8
    cache = 3 * (50 + 10) * 2 * 4  # sequences x keys halfway x (key and value) x head_dim
    assert step_bytes(model, Load(3, 50), 20) == 2 * (attention + mlp + norms + head + cache)


def test_the_whole_script_runs_dry(capsys: pytest.CaptureFixture[str]) -> None:
    bench_cuda.main(["--dry-run"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 | 16 |", "| 2 | 16 |"))]
    assert len(rows) == 2
