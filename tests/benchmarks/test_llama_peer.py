"""llama.cpp as a peer: the conversion against hand computations, and, where it is installed, its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.peers.base import Setup
from benchmarks.peers.llama_cpp import kernels
from benchmarks.peers.llama_export import gguf_tensors, hyperparameters, rope_order, shipped, token_ids, token_text
from benchmarks.peers.remote import ROOT, RemotePeer
from experiments.hf_model import load
from tests.engine.harness import Reference
from tests.engine.margin import assert_same_tokens
from training.random_models import byte_tokenizer, llama_config, random_model

PEERS_PYTHON = ROOT / ".venv-peers/bin/python"
MODULE = "benchmarks.peers.llama_cpp"
TOKENS = 32


@cache
def lacking() -> str | None:
    """What keeps llama.cpp from running here; None when nothing does."""
    if not PEERS_PYTHON.is_file():
        return "there is no .venv-peers"
    with RemotePeer(MODULE, PEERS_PYTHON, threads=1) as remote:
        return remote.missing()


def test_rows_of_a_head_are_interleaved() -> None:
    # Two heads of four rows; in each, rows 0 and 2 turn together, and 1 and 3, so they become neighbours.
    weight = torch.arange(8.0)[:, None].expand(8, 3)
    assert rope_order(weight, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_turning_neighbours_after_the_new_order_gives_the_same_scores() -> None:
    heads, head_dim, hidden, theta = 2, 6, 5, 100.0
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(heads * head_dim, hidden, generator=draw, dtype=torch.float64) for _ in range(2))
    inputs = torch.randn(2, hidden, generator=draw, dtype=torch.float64)

    def turned(row: torch.Tensor, position: int, pairs: list[tuple[int, int]]) -> torch.Tensor:
        row = row.clone()
        for index, (a, b) in enumerate(pairs):
            angle = position * theta ** (-2 * index / head_dim)
            x, y = float(row[a]), float(row[b])
            row[a] = x * math.cos(angle) - y * math.sin(angle)
            row[b] = x * math.sin(angle) + y * math.cos(angle)
        return row

    def scores(query: torch.Tensor, key: torch.Tensor, pairs: list[tuple[int, int]]) -> list[float]:
        q, k = (query @ inputs[0]).view(heads, head_dim), (key @ inputs[1]).view(heads, head_dim)
        return [float(turned(q[h], 7, pairs) @ turned(k[h], 3, pairs)) for h in range(heads)]

    halves, neighbours = [(0, 3), (1, 4), (2, 5)], [(0, 1), (2, 3), (4, 5)]
    wanted = scores(query, key, halves)
    assert scores(rope_order(query, heads), rope_order(key, heads), neighbours) == pytest.approx(wanted)
    assert scores(query, key, neighbours) != pytest.approx(wanted)


def test_every_tensor_gets_a_name_and_only_queries_and_keys_a_new_order() -> None:
    config = llama_config()
    weights = random_model(config, seed=0).state_dict()
    found = gguf_tensors(config.to_dict(), weights)
    assert sorted(name for name in found if name.startswith("blk.1.")) == [
        "blk.1.attn_k.weight",
        "blk.1.attn_norm.weight",
        "blk.1.attn_output.weight",
        "blk.1.attn_q.weight",
        "blk.1.attn_v.weight",
        "blk.1.ffn_down.weight",
        "blk.1.ffn_gate.weight",
        "blk.1.ffn_norm.weight",
        "blk.1.ffn_up.weight",
    ]
    # The output matrix is tied to the embedding, and llama.cpp takes the embedding where there is none.
    assert {name for name in found if "blk" not in name} == {"token_embd.weight", "output_norm.weight"}
    layer = "model.layers.1.self_attn"
    assert torch.equal(found["blk.1.attn_v.weight"], weights[f"{layer}.v_proj.weight"])
    assert torch.equal(found["blk.1.attn_k.weight"], rope_order(weights[f"{layer}.k_proj.weight"], 2))
    assert torch.equal(found["blk.1.attn_q.weight"], rope_order(weights[f"{layer}.q_proj.weight"], 4))
    untied = gguf_tensors({**config.to_dict(), "tie_word_embeddings": False}, weights)
    assert torch.equal(untied["output.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.extra.weight", "other.weight"]
)
def test_a_tensor_that_would_be_lost_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no tensor of a plain Llama"):
        gguf_tensors(llama_config().to_dict(), {name: torch.zeros(2)})


def test_positions_and_activations_it_would_compute_otherwise_are_refused() -> None:
    plain = llama_config(rope_theta=500.0).to_dict()
    found = hyperparameters(plain)
    assert (found["rope_dimension_count"], found["head_count"], found["head_count_kv"]) == (16, 4, 2)
    assert found["layer_norm_rms_eps"] == plain["rms_norm_eps"]
    for changed in (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        {"hidden_act": "gelu"},
        {"model_type": "mistral"},
    ):
        with pytest.raises(ValueError, match="is converted"):
            hyperparameters({**plain, **changed})


def test_the_base_of_the_rotation_is_found_in_old_and_new_configurations() -> None:
    plain = {key: value for key, value in llama_config().to_dict().items() if not key.startswith("rope_")}
    assert hyperparameters({**plain, "rope_theta": 500.0})["rope_freq_base"] == 500.0
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 600.0}}
    assert hyperparameters({**plain, **new})["rope_freq_base"] == 600.0


def test_every_token_is_a_character_and_back() -> None:
    tokens = [0, 1, 10, 8191, 200_000]
    text = "".join(map(token_text, tokens))
    assert token_ids(text) == tokens
    assert token_ids(json.loads(json.dumps(text).encode("utf-8"))) == tokens


def test_a_packed_file_keeps_its_weights_and_answers_in_token_ids(tmp_path: Path) -> None:
    import gguf

    kinds = gguf.GGMLQuantizationType
    config = llama_config(vocab_size=40)
    (tmp_path / "model").mkdir()
    config.save_pretrained(tmp_path / "model")
    packed = gguf.quants.quantize(torch.randn(8, 64).numpy(), kinds.Q4_1)
    given = {"token_embd.weight": (packed, kinds.Q4_1), "output_norm.weight": (torch.ones(64).numpy(), kinds.F32)}
    writer = gguf.GGUFWriter(tmp_path / "given.gguf", "llama")
    writer.add_token_list(["a", "b"])
    for name, (data, kind) in given.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    copy = gguf.GGUFReader(shipped(str(tmp_path / "model"), str(tmp_path / "given.gguf")))
    found = {tensor.name: (tensor.data.tolist(), tensor.tensor_type) for tensor in copy.tensors}
    assert found == {name: (data.tolist(), kind) for name, (data, kind) in given.items()}
    assert copy.fields["tokenizer.ggml.tokens"].contents() == [token_text(token) for token in range(40)]


def test_kernels_that_leave_the_processor_unused_are_said() -> None:
    portable = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | LLAMAFILE = 1 | "
    assert kernels(portable, "flags: avx2 avx512f") == "AVX+AVX2 (without AVX-512, which the processor has)"
    assert kernels(portable, "flags: avx2") == "AVX+AVX2"
    assert kernels("CPU : AVX2 = 1 | AVX512 = 1 | AVX512_BF16 = 1 | ", "avx512f") == "AVX2+AVX512+AVX512_BF16"


@pytest.fixture(
    params=[{}, {"tie_word_embeddings": False, "head_dim": 32, "num_key_value_heads": 1, "rms_norm_eps": 1e-4}],
    ids=["tied", "untied, wide heads"],
)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose end token is the third it writes after [3, 5, 7, 9]."""
    model = random_model(llama_config(**request.param), seed=0, spread=0.3)
    tokens = [3, 5, 7, 9]
    for _ in range(3):
        tokens.append(int(Reference(model).logits(tokens)[-1].argmax()))
    model.generation_config.eos_token_id = tokens[-1]
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def peer(folder: Path) -> Iterator[RemotePeer]:
    if (reason := lacking()) is not None:
        pytest.skip(f"llama.cpp cannot run here: {reason}")
    with RemotePeer(MODULE, PEERS_PYTHON, threads=1) as remote:
        remote.setup(Setup(str(folder), "float32", 1))
        yield remote


def test_it_writes_what_a_plain_forward_says(peer: RemotePeer, folder: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(256, (4 + 9 * i,), generator=draw).tolist() for i in range(7)] + [[3, 5, 7, 9]]
    reference = Reference(load(str(folder), "float32"))
    answers = peer.generate(prompts, TOKENS).answers
    for prompt, answer in zip(prompts, answers, strict=True):
        scores = reference.logits([*prompt, *answer])[len(prompt) - 1 : -1].log_softmax(-1)
        assert_same_tokens(scores.argmax(-1).tolist(), answer, lambda place, scores=scores: scores[place])
    # The end token, third of the last answer, ends it only when asked to.
    assert peer.generate([prompts[-1]], TOKENS, stop_at_end=True).answers == [answers[-1][:3]]
