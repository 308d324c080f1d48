"""The layer behind an early exit: what it computes, its cache, and how it begins."""

import pytest
import torch
import torch.nn.functional as F

from decoding.artifacts import Artifact
from decoding.exit_heads import ExitHead

WIDTH, HEADS, KV_HEADS, DIM = 16, 4, 2, 6


def made(inner: int = 0, seed: int = 0) -> ExitHead:
    torch.manual_seed(seed)
    head = ExitHead(WIDTH, HEADS, KV_HEADS, DIM, inner, theta=100.0)
    for each in head.parameters():
        torch.nn.init.normal_(each, std=0.4)
    return head.requires_grad_(False)


def states_of(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def rms(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return vector / (vector.pow(2).mean() + 1e-6).sqrt() * weight


def turned(vector: torch.Tensor, place: int) -> torch.Tensor:
    """Rotary positions, pair by pair."""
    result = vector.clone()
    for pair in range(DIM // 2):
        angle = torch.tensor(place * 100.0 ** (-2 * pair / DIM))
        one, other = vector[pair], vector[pair + DIM // 2]
        result[pair] = one * angle.cos() - other * angle.sin()
        result[pair + DIM // 2] = other * angle.cos() + one * angle.sin()
    return result


def by_hand(head: ExitHead, states: torch.Tensor, place: int) -> torch.Tensor:
    """The formulas of the card, head by head and place by place."""
    normed = [rms(state, head.before_attention.weight) for state in states[: place + 1]]
    values = head.qkv.weight[(HEADS + KV_HEADS) * DIM :]
    parts = []
    for index in range(HEADS):
        rows = slice(index * DIM, (index + 1) * DIM)
        shared = slice(index // 2 * DIM, (index // 2 + 1) * DIM)
        query = turned(head.qkv.weight[rows] @ normed[place], place)
        keys = [turned(head.qkv.weight[HEADS * DIM :][shared] @ each, at) for at, each in enumerate(normed)]
        weights = torch.stack([query @ key / DIM**0.5 for key in keys]).softmax(0)
        parts.append(sum(weight * (values[shared] @ each) for weight, each in zip(weights, normed, strict=True)))
    state = states[place] + head.attended.weight @ torch.cat(parts)
    if head.settings["inner"]:
        inside = rms(state, head.before_mlp.weight)
        state = state + head.down.weight @ (F.silu(head.gate.weight @ inside) * (head.up.weight @ inside))
    return rms(state, head.norm.weight)


@pytest.mark.parametrize("inner", [0, 20], ids=["adapter", "layer"])
def test_it_is_attention_with_rotary_places_and_perhaps_an_mlp(inner: int) -> None:
    head, states = made(inner), states_of(5)
    whole = head(states[None])[0]
    for place in range(5):
        torch.testing.assert_close(whole[place], by_hand(head, states, place))


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3], [9]], ids=str)
def test_its_cache_gives_what_one_pass_gives(pieces: list[int]) -> None:
    head, states = made(20), states_of(9)
    cache, parts, at = head.cache(0), [], 0
    for count in pieces:
        parts.append(head.extend(states[at : at + count], cache))
        at += count
    torch.testing.assert_close(torch.cat(parts), head(states[None])[0])


def test_what_is_taken_back_leaves_no_trace() -> None:
    head, states = made(), states_of(150)
    cache = head.cache(0)
    head.extend(states[:70], cache)
    head.extend(-states[70:90], cache)
    cache.truncate(70)
    assert cache.end == 70
    torch.testing.assert_close(head.extend(states[70:], cache), head(states[None])[0, 70:])
    cache.truncate(1000)
    assert cache.end == 150


def test_a_cache_that_begins_later_keeps_the_places() -> None:
    """Rotary places are relative: a cache that begins at 40 gives what one that begins at 0 gives of the same rows."""
    head, states = made(), states_of(6)
    late = head.cache(40)
    torch.testing.assert_close(head.extend(states, late), head(states[None])[0], atol=1e-4, rtol=0)
    late.truncate(3)
    assert (late.start, late.end) == (40, 40)


def test_untrained_it_says_what_a_norm_alone_would() -> None:
    torch.manual_seed(0)
    for inner in (0, 20):
        head, states = ExitHead(WIDTH, HEADS, KV_HEADS, DIM, inner), states_of(4)
        expected = torch.stack([rms(state, torch.ones(WIDTH)) for state in states])
        torch.testing.assert_close(head(states[None])[0], expected)


def test_it_is_stored_with_all_that_it_is_built_from() -> None:
    head = made(20)
    artifact = Artifact("eesd", "test", {"head": head.settings}, {}, dict(head.state_dict()))
    again = ExitHead.of(artifact)
    assert torch.equal(again(states_of(4)[None]), head(states_of(4)[None]))
    assert not any(name.startswith(("gate", "up", "down")) for name in made().state_dict())
