from __future__ import annotations

import pytest

from turnout.cost import Meter, ModelMeter, SpeculationMeter, paper_cost, report


def meter_of(small_generated: int, large_generated: int) -> Meter:
    """A request on a model of 10 and one of 40 parameters, its counts worked out by hand below."""
    meter = Meter()
    small, large = meter.of("small", 10), meter.of("large", 40)
    small.generated_tokens, large.generated_tokens = small_generated, large_generated
    small.prompt_tokens, small.decode_tokens = 5, 6
    large.prompt_tokens, large.catchup_tokens, large.decode_tokens, large.draft_tokens = 5, 3, 2, 1
    return meter


def test_processed_tokens_count_each_fed_token_once_and_no_cached_one() -> None:
    model = ModelMeter(
        10, forwards=9, prompt_tokens=5, cached_tokens=100, catchup_tokens=3, decode_tokens=2, draft_tokens=1,
        generated_tokens=7, discarded_tokens=50,
    )  # fmt: skip
    assert model.processed_tokens == 11
    assert model.flops == 2 * 10 * 11


def test_the_three_meters_of_a_mixed_request() -> None:
    """6 tokens by the small model, 2 by the large, after a prompt of 5.

    paper: (6*10 + 2*40) / (8*40) = 140/320; FLOPs: 2*10*11 + 2*40*11 = 1100;
    the large model alone reads 5 prompt tokens and 7 of its own: 2*40*12 = 960, in 8 steps.
    """
    result = report(meter_of(6, 2), "large", 40, num_prompt_tokens=5, wall_s=0.5, large_step_s=0.25)
    assert result.spent.paper == pytest.approx(140 / 320)
    assert result.spent.flops == 1100
    assert result.spent.wall_s == 0.5
    assert (result.large_only.paper, result.large_only.flops, result.large_only.wall_s) == (1.0, 960, 2.0)
    assert result.large_share == 0.25


@pytest.mark.parametrize(("by_small", "by_large"), [(8, 0), (0, 8), (6, 2), (1, 1)])
def test_the_reported_cost_is_the_papers_formula(by_small: int, by_large: int) -> None:
    result = report(meter_of(by_small, by_large), "large", 40, 5, 1.0, 1.0)
    assert result.spent.paper == pytest.approx(paper_cost(by_large / (by_small + by_large), 10, 40))


def test_what_was_written_in_vain_is_paid_for() -> None:
    """An answer of 4 tokens by the large model, after 5 of the small one and 2 of its own that nobody sees."""
    meter = Meter()
    meter.of("small", 10).discarded_tokens = 5
    large = meter.of("large", 40)
    large.generated_tokens, large.discarded_tokens = 4, 2
    result = report(meter, "large", 40, num_prompt_tokens=5, wall_s=0.1, large_step_s=0.25)
    assert result.spent.paper == pytest.approx((5 * 10 + 6 * 40) / (4 * 40))
    assert (result.large_share, result.large_kept_share) == (6 / 4, 1.0)


def test_a_dropped_token_of_the_large_model_counts_in_its_share_and_one_of_the_small_model_does_not() -> None:
    """Of 8 tokens 2 are the large model's; at each of 2 hand-overs it wrote one more, which was dropped."""
    meter = meter_of(6, 2)
    meter.models["small"].discarded_tokens, meter.models["large"].discarded_tokens = 3, 2
    result = report(meter, "large", 40, num_prompt_tokens=5, wall_s=0.5, large_step_s=0.25)
    assert (result.large_share, result.large_kept_share) == (4 / 8, 2 / 8)
    assert (meter.written_by("small"), meter.written_by("nobody")) == (9, 0)
    assert result.spent.paper == pytest.approx((9 * 10 + 4 * 40) / (8 * 40))


def test_nothing_generated_costs_the_prompt_only() -> None:
    meter = Meter()
    meter.of("small", 10).prompt_tokens = 5
    result = report(meter, "large", 40, num_prompt_tokens=5, wall_s=0.1, large_step_s=0.25)
    assert (result.spent.paper, result.spent.flops, result.large_share) == (0.0, 100, 0.0)
    assert (result.large_only.flops, result.large_only.wall_s) == (400, 0.0)


def test_merging_adds_every_counter_and_keeps_the_sizes() -> None:
    one, two = meter_of(6, 2), meter_of(1, 1)
    two.of("third", 7).forwards = 4
    one.speculation.add_round(depths=[0, 0, 1], num_accepted=1, num_emitted=2, draft_s=0.25, verify_s=0.5)
    two.speculation.add_round(depths=[0, 1, 2, 2], num_accepted=2, num_emitted=3, draft_s=0.5, verify_s=0.75)
    one.switches, two.switches = 0, 5
    one.merge(two)
    assert one.models["small"].generated_tokens == 7
    assert one.models["small"].num_parameters == 10
    assert one.models["large"].draft_tokens == 2
    assert one.models["third"].forwards == 4
    assert one.speculation == SpeculationMeter(2, 5, 7, 3, [2, 2, 1], [2, 1], 0.75, 1.25)
    assert one.switches == 5


def test_a_meter_is_made_once_per_model() -> None:
    meter = Meter()
    assert meter.of("m", 3) is meter.of("m", 3)
    assert meter.to_dict()["models"]["m"]["num_parameters"] == 3
