"""Length policies with trained heads: when they stop, and whom they refuse."""

import math
import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.fakes import TableModel, pair
from decoding.length_heads import AcceptanceHead, ContinueHead, Head, features_of
from decoding.lengths._trained import TrainedLength
from decoding.lengths.base import Round, Step
from decoding.lengths.disco import DiscoLength, DiscoParams
from decoding.lengths.specdecpp import SpecDecPlusPlusLength, SpecDecPlusPlusParams
from decoding.model import ModelPool, Readout
from decoding.sequence import Sequence
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

WIDTH = 4


def models(artifact: Artifact | None = None, folder: Path | None = None) -> ModelPool:
    pool = pair(*(TableModel(name, lambda _: torch.zeros(4), 4) for name in ("small", "large")))
    if artifact is not None:
        artifact.save(folder / f"{artifact.kind}.safetensors")
        pool.artifacts = Artifacts(folder)
    return pool


def stored(kind: str, head: Head, **settings) -> Artifact:
    digests = {"small": "table small", "large": "table large"}
    return Artifact(kind, "a test", {"head": head.settings, **settings}, digests, dict(head.state_dict()))


def ready(policy: TrainedLength, artifact: Artifact, folder: Path) -> tuple[TrainedLength, int]:
    """The policy before a round, and the depth it allows."""
    pool = models(artifact, folder)
    policy.check(pool)
    return policy, policy.before_round(a_round(pool))


def always(chance: float, depth: int = 3) -> AcceptanceHead:
    """Says the same of every token."""
    head = AcceptanceHead(WIDTH, depth)
    with torch.no_grad():
        head.last.weight.zero_()
        head.last.bias.copy_(torch.tensor([0.0, math.log(chance / (1 - chance))]))
    return head


def a_round(pool: ModelPool) -> Round:
    return Round(Sequence([0], SamplingParams(), 0), pool.small, pool.large, False, "model_chain")


def states(count: int) -> list[Step]:
    return [Step(0, Readout(hidden={-1: torch.full((WIDTH,), float(i))})) for i in range(count)]


def drafted(policy: TrainedLength, most: int, steps: list[Step]) -> int:
    """How many of these tokens are drafted; each time with the path as it is then."""
    return next((n for n in range(1, most + 1) if not policy.continues(steps[:n])), most)


@pytest.mark.parametrize(
    ("threshold", "length"),
    # .9^4 = .656 is the first below 1 - .3, known at the fifth token; at least 2, at most 20.
    [(0.3, 5), (0.195, 4), (0.05, 2), (0.0, 2), (1.0, 20)],
)
def test_specdecpp_stops_on_the_product_one_token_behind(tmp_path, threshold, length):
    policy = SpecDecPlusPlusLength(SpecDecPlusPlusParams(threshold=threshold))
    policy, most = ready(policy, stored("specdecpp", always(0.9)), tmp_path)
    assert most == 20
    assert drafted(policy, most, states(20)) == length


def test_specdecpp_never_asks_about_the_first_reading_or_the_newest_token(tmp_path):
    """The first row was read at a token that is no draft; the last token has no reading of its own yet."""
    head = AcceptanceHead(WIDTH, 0)
    with torch.no_grad():
        head.last.weight.zero_()
        head.last.weight[1, 0] = -50.0  # a state with a positive first entry is a sure rejection
        head.last.bias.copy_(torch.tensor([0.0, 20.0]))
    policy, most = ready(SpecDecPlusPlusLength(), stored("specdecpp", head), tmp_path)

    def with_bad(place: int) -> list[Step]:
        return [Step(0, Readout(hidden={-1: torch.full((WIDTH,), float(i == place))})) for i in range(20)]

    assert drafted(policy, most, with_bad(0)) == 20
    assert drafted(policy, most, with_bad(1)) == 2
    assert drafted(policy, most, with_bad(6)) == 7


def test_specdecpp_runs_its_head_once_a_token(tmp_path, monkeypatch):
    calls = []
    plain = AcceptanceHead.probability
    monkeypatch.setattr(AcceptanceHead, "probability", lambda self, h: calls.append(1) or plain(self, h))
    policy, most = ready(SpecDecPlusPlusLength(), stored("specdecpp", always(0.999)), tmp_path)
    assert drafted(policy, most, states(20)) == 20
    assert len(calls) == 19


def test_specdecpp_keeps_the_rows_of_one_round(tmp_path):
    """Next to a remote model `before_round`, which is the caller's, never runs on the copy that is asked."""
    policy, most = ready(SpecDecPlusPlusLength(), stored("specdecpp", always(0.999)), tmp_path)
    copy = pickle.loads(pickle.dumps(policy))
    for _ in range(5):
        assert drafted(copy, most, states(8)) == most
        assert len(copy._known) == 7


@pytest.mark.parametrize("make", [SpecDecPlusPlusLength, DiscoLength])
def test_all_requests_share_the_network_of_an_artifact(tmp_path, make):
    """An actor keeps every network that it was sent: one for each request would fill its memory."""
    head = always(0.9) if make is SpecDecPlusPlusLength else ContinueHead(2, 1)
    pool = models(stored(make.name, head, threshold=0.5, most=8), tmp_path)
    policies = [make(), make()]
    for policy in policies:
        policy.check(pool)
    assert policies[0]._head is policies[1]._head


def test_blocks_are_residual_and_shared_only_where_asked():
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    head = AcceptanceHead(WIDTH, 2)
    expected = hidden
    for block in head.blocks:
        expected = expected + torch.nn.functional.silu(expected @ block.weight.T + block.bias)
    assert torch.allclose(head(hidden), head.last(expected), atol=1e-6)
    assert [len(AcceptanceHead(WIDTH, 3, shared).blocks) for shared in (False, True)] == [3, 1]
    shared = AcceptanceHead(WIDTH, 3, shared=True)
    again = AcceptanceHead.of(stored("specdecpp", shared))
    assert torch.equal(again(hidden), shared(hidden))


def sharp_enough(bits: float) -> ContinueHead:
    """Goes on where the entropy is below so many bits, or the token is one of the first two; a rule by hand."""
    head = ContinueHead(2, 1)
    with torch.no_grad():
        head.first.weight.copy_(torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
        head.first.bias.zero_()
        head.last.weight.fill_(-100.0)
        head.last.bias.fill_(100.0 * bits)
    return head


def readings(*entropies: float) -> list[Step]:
    return [Step(0, Readout(entropy_bits=bits, top=((0, -0.1), (1, -2.5)))) for bits in entropies]


def test_disco_stops_below_its_threshold_and_keeps_the_token(tmp_path):
    artifact = stored("disco", sharp_enough(1.0), threshold=0.5, most=6)
    policy, most = ready(DiscoLength(), artifact, tmp_path)
    assert (most, policy.want.entropy, policy.want.top) == (6, True, 2)
    assert drafted(policy, most, readings(0.2, 0.9, 1.1, 0.1, 0.1, 0.1)) == 3
    assert drafted(policy, most, readings(*[0.1] * 6)) == 6
    _, most = ready(DiscoLength(DiscoParams(most=4)), artifact, tmp_path)
    assert most == 4
    # A given threshold stands before the tuned one.
    strict, most = ready(DiscoLength(DiscoParams(threshold=1.0)), artifact, tmp_path)
    assert drafted(strict, most, readings(0.9, 0.9, 0.9)) == 1


def test_disco_sees_probabilities_entropy_and_place():
    row = Readout(entropy_bits=1.5, top=((7, math.log(0.5)), (3, math.log(0.25))))
    assert features_of(row, 4, 3) == pytest.approx([0.5, 0.25, 0.0, 1.5, 4.0])
    with pytest.raises(ValueError, match="must read"):
        features_of(Readout(), 1, 3)


@pytest.mark.parametrize("policy", [DiscoLength, SpecDecPlusPlusLength])
def test_a_head_made_for_other_models_is_refused_before_the_first_token(tmp_path, policy):
    head = sharp_enough(1.0) if policy is DiscoLength else always(0.9)
    pool = models(stored(policy.name, head, threshold=0.5, most=6), tmp_path)
    pool.small.digest = "another"
    with pytest.raises(TurnoutError, match="another") as caught:
        policy().check(pool)
    assert caught.value.field == "method.params.length.artifact"
    with pytest.raises(TurnoutError) as caught:
        policy().check(models())
    assert caught.value.code is Code.NOT_FOUND


def test_a_draft_by_another_model_is_refused(tmp_path):
    pool = models(stored("disco", sharp_enough(1.0), threshold=0.5, most=6), tmp_path)
    policy = DiscoLength()
    policy.check(pool)
    with pytest.raises(TurnoutError, match="'large' drafts"):
        policy.check_draft(pool.large)


async def test_without_its_artifact_a_request_is_refused_or_decoded_plainly(run, make_model):
    small, large = make_model("small", 1), make_model("large", 2)
    with pytest.raises(TurnoutError, match=r"method\.params\.length\.artifact"):
        await run("speculative", small, large, {"length": "disco"})
    plain = await run("plain", small, large)
    fallen = await run("speculative", small, large, {"length": "disco", "fallback": "plain"})
    assert fallen.ids == plain.ids


EASY, SURE, UNSURE = 0.75, 0.98, 0.3  # share of easy tokens; acceptance of these and of the others


def knowing() -> AcceptanceHead:
    """Says of tokens whose state is 1 that they are easy, and of those whose state is 0 that they are not."""
    head, (high, low) = AcceptanceHead(WIDTH, 0), (math.log(each / (1 - each)) for each in (SURE, UNSURE))
    with torch.no_grad():
        head.last.weight.zero_()
        head.last.weight[1, 0] = high - low
        head.last.bias.copy_(torch.tensor([0.0, low]))
    return head


def traded(policy: TrainedLength, most: int) -> tuple[float, float]:
    """Drafted and emitted tokens a round, where the draft's states tell which of its tokens are easy."""
    chance, pool, rounds = random.Random(0), models(), 1_500
    drafted = emitted = 0
    rows = [Readout(hidden={-1: torch.full((WIDTH,), float(state))}) for state in (0, 1)]
    for _ in range(rounds):
        policy.before_round(a_round(pool))
        path, easy = [Step(0, rows[1])], [chance.random() < EASY]
        while len(path) < most and policy.continues(path):
            # What is read at a token stands with the next one.
            path.append(Step(0, rows[easy[-1]]))
            easy.append(chance.random() < EASY)
        lucky = [chance.random() < (SURE if each else UNSURE) for each in easy]
        drafted += len(path)
        emitted += [*lucky, False].index(False) + 1
    return drafted / rounds, emitted / rounds


def test_specdecpp_emits_more_for_what_it_drafts_than_any_fixed_length(tmp_path):
    artifact, curve = stored("specdecpp", knowing()), []
    for threshold in (0.0, 0.03, 0.05, 0.5, 0.75, 0.9):
        params = SpecDecPlusPlusParams(threshold=threshold, least=1)
        curve.append(traded(*ready(SpecDecPlusPlusLength(params), artifact, tmp_path)))
    assert curve == sorted(curve)
    shortest, rate = curve[0][0], EASY * SURE + (1 - EASY) * UNSURE
    assert shortest < 3 < 8 < curve[-1][0]
    for most in range(3, 9):
        emitted = sum(rate**place for place in range(most + 1))
        assert np.interp(most, *zip(*curve, strict=True)) > 1.04 * emitted


def test_a_forced_token_is_drafted_without_asking_the_head(tmp_path: Path):
    head = ContinueHead(1, 2)
    with torch.no_grad():
        head.last.weight.zero_()
        head.last.bias.fill_(-9.0)  # no token will be accepted
    policy, _ = ready(DiscoLength(), stored("disco", head, threshold=0.5, most=5), tmp_path)
    free = Readout(entropy_bits=1.0, top=((0, -1.0),))
    assert not policy.continues([Step(0, free)])
    assert policy.continues([Step(0, replace(free, forced=True))])
