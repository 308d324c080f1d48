"""The engines that need no extra package, on one small checkpoint: in float32 they must write the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import hf_continuous, hf_generate, turnout_engine, turnout_host
from benchmarks.peers.base import Peer, Setup
from experiments.hf_model import load
from tests.engine.harness import Reference
from tests.engine.margin import assert_same_tokens
from training.random_models import byte_tokenizer, llama_config, random_model

PROMPTS = [[3, 5, 7, 9], [11, 13], [2, 4, 6, 8, 10, 12, 14]]
TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose end token is the third it writes, and another of the same vocabulary to draft for it."""
    root = tmp_path_factory.mktemp("peers")
    for seed, name in enumerate(("large", "small")):
        model = random_model(llama_config(), seed, spread=0.3)
        if name == "large":
            model.generation_config.eos_token_id = _greedy(Reference(model), PROMPTS[0], 3)[-1]
        model.save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return root / "large", root / "small"


def _greedy(reference: Reference, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(
    params=[
        (turnout_engine.Engine, False),
        (turnout_engine.Engine, True),
        (hf_generate.Engine, False),
        (hf_generate.Engine, True),
        (hf_continuous.Engine, False),
    ],
    ids=["turnout", "turnout speculative", "generate", "generate assisted", "generate_batch"],
)
def engine(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Peer]:
    make, draft = request.param
    peer: Peer = make()
    assert peer.missing() is None
    assert "torch" in peer.versions()
    peer.setup(Setup(str(folders[0]), "float32", 1, str(folders[1]) if draft else None))
    yield peer
    peer.close()


def test_every_engine_writes_what_a_plain_forward_says(engine: Peer, folders: tuple[Path, Path]) -> None:
    reference = Reference(load(str(folders[0]), "float32"))
    answers = engine.generate(PROMPTS, TOKENS).answers
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == TOKENS
        scores = reference.logits([*prompt, *answer])[len(prompt) - 1 : -1].log_softmax(-1)
        assert_same_tokens(scores.argmax(-1).tolist(), answer, lambda place, scores=scores: scores[place])


def test_an_end_token_ends_an_answer_only_when_asked_to(engine: Peer) -> None:
    [whole] = engine.generate([PROMPTS[0]], TOKENS).answers
    assert len(whole) == TOKENS
    assert engine.generate([PROMPTS[0]], TOKENS, stop_at_end=True).answers == [whole[:3]]


def test_our_engine_keeps_weights_as_it_is_told(folders: tuple[Path, Path]) -> None:
    digests = set()
    for weights in ("dense", "int4"):
        peer = turnout_engine.Engine()
        peer.setup(Setup(str(folders[0]), "float32", 1, weights=weights))
        [answer] = peer.generate([PROMPTS[0]], TOKENS).answers
        assert len(answer) == TOKENS
        digests.add(peer._pool.engines["large"].digest)
        peer.close()
    assert len(digests) == 2


def test_without_layers_the_host_gets_the_same_state_after_every_token(folders: tuple[Path, Path]) -> None:
    peer = turnout_host.Engine()
    peer.setup(Setup(str(folders[0]), "float32", 1))
    made = peer.generate(PROMPTS, TOKENS)
    peer.close()
    assert [len(answer) for answer in made.answers] == [TOKENS] * len(PROMPTS)
    assert len({token for answer in made.answers for token in answer}) == 1
    assert made.seconds > 0
