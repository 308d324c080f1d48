"""Where to leave a model and how far to draft there: worked examples, and statistics that follow the rounds."""

import pytest

from decoding.exit_choice import ExitChoice, Shadow, tokens_per_layer


def test_tokens_per_layer_by_hand() -> None:
    # 32 layers: one draft layer of 8 and acceptance .8 gives 3.3616 tokens for 64 layers' work.
    assert tokens_per_layer(0.8, 8, 4, 32) == pytest.approx(3.3616 / 64)
    assert tokens_per_layer(0.8, 8, 4, 32) == pytest.approx(0.05253, abs=5e-6)
    assert tokens_per_layer(0.8, 8, 4, 32) * 32 == pytest.approx(1.68, abs=5e-3)
    assert tokens_per_layer(0.8, 8, 6, 32) == pytest.approx(0.04939, abs=5e-6)
    assert tokens_per_layer(0.9, 16, 4, 32) == pytest.approx(0.04266, abs=5e-6)
    assert tokens_per_layer(0.3, 8, 0, 32) == tokens_per_layer(0.9, 30, 0, 32) == 1 / 32
    assert tokens_per_layer(1.0, 8, 4, 32) == pytest.approx(5 / 64)
    assert tokens_per_layer(0.0, 8, 4, 32) == pytest.approx(1 / 64)


def shadows(*matches: bool, sure: float = 0.5) -> list[Shadow]:
    return [Shadow(each, sure) for each in matches]


def choice_with(acceptance: dict[int, float], num_layers: int = 32) -> ExitChoice:
    """Every layer at 0 but those given."""
    choice = ExitChoice(num_layers, 1.0)
    for layer in range(1, num_layers):
        count = round(1000 * acceptance.get(layer, 0.0))
        choice.observe(layer, shadows(*[True] * count, *[False] * (1000 - count)))
    return choice


def test_layer_and_length_are_chosen_together() -> None:
    layer, depth = choice_with({8: 0.8, 16: 0.9}).best(18)
    assert layer == 8
    worth = [tokens_per_layer(choice_with({8: 0.8}).acceptance(8), 8, d, 32) for d in range(19)]
    assert depth == worth.index(max(worth)) == 3
    assert choice_with({8: 0.3, 16: 0.9}).best(18)[0] == 16
    assert choice_with({8: 0.99}).best(18) == (8, 18)
    assert choice_with({8: 0.99}).best(4) == (8, 4)


def test_where_no_layer_pays_nothing_is_drafted() -> None:
    assert choice_with({16: 0.4}).best(18)[1] == 0
    assert choice_with({16: 0.6}).best(18)[1] > 0


def test_before_anything_is_known_every_exit_is_worth_the_same() -> None:
    choice = ExitChoice(8, 0.95)
    assert [choice.acceptance(layer) for layer in (1, 4, 7)] == [1 / 8, 0.5, 7 / 8]
    assert {tokens_per_layer(layer / 8, layer, 1, 8) for layer in range(1, 8)} == {1 / 8}


def test_old_rounds_fade() -> None:
    choice = ExitChoice(4, 0.5)
    choice.observe(2, shadows(True, True, False))
    assert choice.acceptance(2) == pytest.approx((0.25 + 2) / (0.5 + 3))
    choice.observe(2, shadows(False))
    assert choice.acceptance(2) == pytest.approx((0.25 + 2) / 2 / ((0.5 + 3) / 2 + 1))
    assert choice.acceptance(1) == 0.25
    for _ in range(40):
        choice.observe(2, shadows(True))
    assert choice.acceptance(2) == pytest.approx(1.0, abs=1e-9)


def test_the_bound_on_confidence_lies_midway() -> None:
    choice = ExitChoice(4, 1.0)
    assert choice.threshold(1) == 0.0
    choice.observe(1, shadows(True, True, sure=0.9))
    assert choice.threshold(1) == 0.0
    choice.observe(1, [*shadows(False, sure=0.2), *shadows(False, sure=0.4), *shadows(True, sure=0.6)])
    assert choice.threshold(1) == pytest.approx((0.8 + 0.3) / 2)
    assert choice.threshold(2) == 0.0
