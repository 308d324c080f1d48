"""Contrasts with a datastore: exact search, laws by hand, whose store it is, and stores that do not fit."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifact
from decoding.contrast._stores import Datastore, StoreContrast
from decoding.contrast.base import RequestContrast, StreamRows
from decoding.contrast.caad import Caad, LogitStore
from decoding.contrast.knn_lm import KnnLm, TokenStore
from decoding.contrasted_model import contrasted, load_contrast
from decoding.model import ModelPool, Request
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from tests.decoding.head_models import StateModel, pool_of
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

CYCLE = [1, 2, 3, 4, 0]  # the token after each
SIZE = len(CYCLE)
BOTH: list[Any] = [(KnnLm, TokenStore), (Caad, LogitStore)]


def close(values: Any) -> Any:
    return pytest.approx(values, abs=1e-5)


def filled(store: Datastore, keys: Any, values: Any) -> Datastore:
    store.keys.copy_(torch.as_tensor(keys, dtype=torch.float32))
    store.get_buffer("values").copy_(torch.as_tensor(values)) if isinstance(store, TokenStore) else (
        store.get_parameter("values").copy_(torch.as_tensor(values))
    )
    return store


def tokens_of(keys: list[list[float]], values: list[int]) -> TokenStore:
    store = TokenStore(len(keys), len(keys[0]))
    filled(store, keys, values)
    return store


def logits_of(keys: list[list[float]], values: list[list[float]]) -> LogitStore:
    store = LogitStore(len(keys), len(keys[0]), len(values[0]))
    filled(store, keys, values)
    return store


def made(kind: type[StoreContrast[Any]], store: Any, state: list[float], logits: list[float], **params: Any) -> Any:
    """The combined row where the main stream has a state."""
    part = kind(kind.Params(**params))
    part.store = store
    rows = StreamRows([RowContext(Sequence([1], SamplingParams(), 0))], {-1: torch.tensor([state])})
    return part.combine(torch.tensor([[logits]]), rows)[0]


def test_the_search_is_exact() -> None:
    """Against brute force in float64, and for more entries than there are."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn((400, 24), generator=draw)
    store = tokens_of(keys.tolist(), [0] * 400)
    for query in torch.randn((20, 24), generator=draw):
        found, distances = store.nearest(query, 30)
        exact = (keys.double() - query.double()).square().sum(-1)
        assert found.tolist() == exact.argsort()[:30].tolist()
        assert torch.allclose(distances.double(), exact.sort().values[:30])
    assert sorted(store.nearest(keys[7], 1000)[0].tolist()) == list(range(400))
    assert store.nearest(keys[7], 1)[0].tolist() == [7]


def test_the_search_is_exact_where_float32_rounds_its_first_pass() -> None:
    """Keys far from the origin: their products are too large for the differences of their distances."""
    draw = torch.Generator().manual_seed(3)
    keys = torch.randn((40, 24), generator=draw) + 3000.0
    store = tokens_of(keys.tolist(), [0] * 40)
    for query in torch.randn((10, 24), generator=draw) + 3000.0:
        exact = (keys.double() - query.double()).square().sum(-1)
        assert store.nearest(query, 24)[0].tolist() == exact.argsort()[:24].tolist()


def test_a_centre_changes_no_distance() -> None:
    store = tokens_of([[1.0, 0.0], [4.0, 0.0]], [2, 3])
    store.centre.copy_(torch.tensor([100.0, -50.0]))
    found, distances = store.nearest(store.key_of(torch.tensor([102.0, -50.0])), 2)
    assert (found.tolist(), distances.tolist()) == ([0, 1], close([1.0, 4.0]))


def test_knn_lm_by_hand() -> None:
    """Neighbours at squared distances 0, 1 and 4, of which the first and the third hold the same token."""
    store = tokens_of([[0.0], [1.0], [2.0], [9.0]], [2, 0, 2, 1])
    weights = [math.exp(-each / 2.0) for each in (0.0, 1.0, 4.0)]
    found = [weights[1] / sum(weights), 0.0, (weights[0] + weights[2]) / sum(weights)]
    main = [0.5, 0.3, 0.2]
    mixed = [0.25 * q + 0.75 * p for q, p in zip(found, main, strict=True)]
    logits = [math.log(each) + 3.0 for each in main]
    row = made(KnnLm, store, [0.0], logits, weight=0.25, neighbours=3, temperature=2.0)
    assert row.exp().tolist() == close(mixed)
    assert float(row.exp().sum()) == close(1.0)
    assert made(KnnLm, store, [0.0], logits, weight=0.0).softmax(-1).tolist() == close(main)
    alone = made(KnnLm, store, [0.0], logits, weight=1.0, neighbours=3, temperature=2.0)
    assert alone.isfinite().all()
    assert alone.softmax(-1).tolist() == close(found)
    one = made(KnnLm, store, [0.0], logits, weight=0.25, neighbours=1)
    assert one.exp().tolist() == close([0.375, 0.225, 0.4])


def test_a_text_that_is_its_own_datastore_is_hardly_surprising() -> None:
    draw = torch.Generator().manual_seed(2)
    states, tokens = torch.randn((50, 8), generator=draw) * 4.0, torch.randint(0, 9, (50,), generator=draw)
    store = tokens_of(states.tolist(), tokens.tolist())
    nll = [
        -float(made(KnnLm, store, state.tolist(), [0.0] * 9, weight=0.99)[token])
        for state, token in zip(states, tokens, strict=True)
    ]
    assert sum(nll) / len(nll) < 0.02 < math.log(9)


def test_caad_by_hand() -> None:
    """Cosines 1 and 0.6; weights softmax(cosine / 0.4): 1 and 1/e."""
    store = logits_of([[1.0, 0.0], [0.6, 0.8]], [[2.0, 0.0, -2.0], [0.0, 4.0, 0.0]])
    near, far = 1.0 / (1.0 + math.exp(-1.0)), math.exp(-1.0) / (1.0 + math.exp(-1.0))
    mean = [2.0 * near, 4.0 * far, -2.0 * near]
    row = made(Caad, store, [5.0, 0.0], [1.0, 1.0, 1.0], weight=2.0, floor=0.25, neighbours=2, temperature=0.4)
    assert row.tolist() == close([1.0 + 2.0 * 0.75 * each for each in mean])
    found, cosines = store.similar(store.key_of(torch.tensor([3.0, 4.0])), 1)
    assert (found.tolist(), cosines.tolist()) == ([1], close([1.0]))
    alone = made(Caad, store, [5.0, 0.0], [0.0, 0.0, 0.0], weight=3.0, floor=0.0, neighbours=1)
    assert (alone / 3.0).tolist() == close([2.0, 0.0, -2.0])


@pytest.mark.parametrize("off", [{"weight": 0.0}, {"weight": 9.0, "floor": 1.0}])
def test_caad_is_off_without_weight_and_where_no_context_is_similar_enough(off: dict[str, float]) -> None:
    store = logits_of([[1.0, 0.0]], [[2.0, 0.0, -2.0]])
    assert made(Caad, store, [0.3, 0.0], [1.0, 2.0, 3.0], **off).tolist() == [1.0, 2.0, 3.0]
    assert made(Caad, store, [0.0, 7.0], [1.0, 2.0, 3.0], weight=9.0, floor=0.0).tolist() == [1.0, 2.0, 3.0]


# A store that says 0 after each token of the cycle, where the model itself would go on with it.
def store_for(network: Any, answer: int) -> Any:
    keys = torch.eye(SIZE).tolist()
    if network is TokenStore:
        return tokens_of(keys, [answer] * SIZE)
    return logits_of(keys, [[100.0 if token == answer else 0.0 for token in range(SIZE)]] * SIZE)


def save(store: Any, path: Path, kind: str, digest: str = "table large", **changes: Any) -> None:
    values = {"settings": {"head": store.settings}, "tensors": dict(store.state_dict()), **changes}
    Artifact(kind, "test", values["settings"], {"large": digest}, values["tensors"]).save(path)


async def written(models: ModelPool, part: Any, tenant: str = "default") -> list[int]:
    seq = Sequence([0], SamplingParams(max_tokens=4, temperature=0.0), 0)
    request, plain = Request("r", seq, tenant, contrast=RequestContrast(part)), get_method("plain")
    with contrasted(request, models, plain.parse({})) as seen:
        async for _ in plain.run(request, seen, plain.parse({})):
            pass
    models.large.release(seq)
    return seq.answer


@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "network"), BOTH)
async def test_a_store_is_its_tenants(tmp_path: Path, kind: Any, network: Any) -> None:
    """A tenant reads its own store, else that of all, and never another tenant's: by name it is not there."""
    models = pool_of(StateModel("large", CYCLE), tmp_path)
    save(store_for(network, 2), tmp_path / f"{kind.name}.safetensors", kind.name)
    save(store_for(network, 3), tmp_path / "tenants" / "acme" / f"{kind.name}.safetensors", kind.name)
    save(store_for(network, 3), tmp_path / "tenants" / "acme" / "secret.safetensors", kind.name)
    part = kind(kind.Params(weight=1.0))
    assert await written(models, part, "acme") == [3] * 4
    assert await written(models, kind(kind.Params(weight=1.0)), "other") == [2] * 4
    assert await written(models, kind(kind.Params(weight=0.0)), "acme") == [1, 2, 3, 4]
    secret = kind(kind.Params(weight=1.0, artifact="secret"))
    assert await written(models, secret, "acme") == [3] * 4
    for tenant in ("other", "default", "../acme", ""):
        with pytest.raises(TurnoutError, match=rf"^contrast\.artifact: 'secret' .* available: {kind.name}$"):
            await written(models, kind(kind.Params(weight=1.0, artifact="secret")), tenant)
    assert models.large.busy().sequences == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "network"), BOTH)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"digest": "table other"}, "was made for the large model with digest table other"),
        ({"kind": "medusa"}, "is of the kind 'medusa'"),
        ({"settings": {}}, "holds no usable datastore"),
        ({"tensors": {}}, "holds no usable datastore"),
        ({"width": SIZE + 1}, f"has keys of width {SIZE + 1}; the model's are {SIZE}"),
        ({"half": True}, "its keys are torch.float16, and must be torch.float32"),
        ({"layer": 3}, "has states of layer 3; 'large' has 0"),
        ({"layer": -3}, "has states of layer -3; 'large' has 0"),
        ({"layer": -2}, "has keys of layer -2, which cannot be read of this model"),
        ({"empty": True}, "it is empty"),
        ({"vocab": True}, "holds no usable datastore: it has"),
    ],
    ids=lambda each: next(iter(each), "fits") if isinstance(each, dict) else "",
)
async def test_a_store_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, kind: Any, network: Any, changes: dict[str, Any], said: str
) -> None:
    store = store_for(network, 2)
    if "width" in changes:
        store = network(*(each for each in (3, SIZE + 1, SIZE) if network is LogitStore or each != SIZE))
    if "empty" in changes:
        store = network(*((0, SIZE, SIZE) if network is LogitStore else (0, SIZE)))
    if "vocab" in changes and network is LogitStore:
        store = LogitStore(2, SIZE, SIZE + 1)
    elif "vocab" in changes:
        store = tokens_of([[0.0] * SIZE], [SIZE])
    store.layer = changes.get("layer", -1)
    if "half" in changes:
        store.keys.data = store.keys.data.half()
    saved = {name: value for name, value in changes.items() if name in ("digest", "settings", "tensors")}
    save(store, tmp_path / f"{kind.name}.safetensors", changes.get("kind", kind.name), **saved)
    models = pool_of(StateModel("large", CYCLE), tmp_path)
    if not said:
        assert await written(models, kind(kind.Params(weight=1.0))) == [2] * 4
        return
    with pytest.raises(TurnoutError) as caught:
        await written(models, kind(kind.Params(weight=1.0)))
    assert caught.value.field == "contrast.artifact"
    assert said in caught.value.message
    models.large.release(next(iter(models.large.cached), Sequence([0], SamplingParams(), 0)))  # type: ignore[attr-defined]


@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "network"), BOTH)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keys": torch.full((SIZE, SIZE), math.nan)}, "its keys are not finite"),
        ({"keys": torch.full((SIZE, SIZE), 1e30)}, "its keys are not finite, or too large"),
        ({"centre": torch.full((SIZE,), math.inf)}, "its keys are not finite"),
        ({"centre": torch.zeros(SIZE, dtype=torch.float64)}, "its centre are torch.float64, and must be torch.float32"),
        ({"values": torch.zeros(SIZE + 1)}, "holds no usable datastore"),
        ({"values": torch.zeros(SIZE, dtype=torch.float64)}, "holds no usable datastore"),
        ({"values": torch.full((SIZE,), -1)}, "holds no usable datastore"),
        ({"values": torch.full((SIZE, SIZE), math.nan)}, "holds no usable datastore"),
        ({"values": torch.zeros((SIZE, SIZE), dtype=torch.int64)}, "holds no usable datastore"),
        ({"count": 10**30}, "holds no usable datastore"),
        ({"count": -1}, "holds no usable datastore"),
        ({"layer": "1"}, "its layer is '1', and must be a number"),
        ({"layer": 0.5}, "its layer is 0.5, and must be a number"),
    ],
)
async def test_a_store_whose_contents_cannot_be_worked_with_is_refused(
    tmp_path: Path, kind: Any, network: Any, changes: dict[str, Any], said: str
) -> None:
    store = store_for(network, 2)
    tensors = {name: changes.get(name, each) for name, each in store.state_dict().items()}
    head = {name: changes.get(name, value) for name, value in store.settings.items()}
    save(store, tmp_path / f"{kind.name}.safetensors", kind.name, settings={"head": head}, tensors=tensors)
    models = pool_of(StateModel("large", CYCLE), tmp_path)
    for _ in range(2):  # a refused one is not taken the second time
        with pytest.raises(TurnoutError) as caught:
            await written(models, kind(kind.Params(weight=1.0)))
        assert caught.value.field == "contrast.artifact"
        assert said in caught.value.message


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e300])
def test_no_temperature_makes_a_row_that_is_not_finite(temperature: float) -> None:
    tokens = tokens_of([[1.0], [1.0], [3.0]], [2, 0, 1])
    row = made(KnnLm, tokens, [0.0], [1.0, 2.0, 3.0], weight=1.0, temperature=temperature)
    want = [0.5, 0.0, 0.5] if temperature < 1.0 else [1 / 3] * 3
    assert row.softmax(-1).tolist() == close(want)
    logits = logits_of([[1.0, 0.0], [0.6, 0.8]], [[2.0, 0.0, -2.0], [0.0, 4.0, 0.0]])
    row = made(Caad, logits, [5.0, 0.0], [0.0] * 3, weight=1.0, floor=0.0, temperature=temperature)
    assert row.tolist() == close([2.0, 0.0, -2.0] if temperature < 1.0 else [1.0, 2.0, -1.0])


@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "network"), BOTH)
async def test_reading_and_searching_a_store_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, network: Any
) -> None:
    """Each waits for something that the event loop does meanwhile."""
    loop, passed = asyncio.get_running_loop(), list[bool]()

    def waits(work: Any) -> Any:
        def waiting(*arguments: Any) -> Any:
            done = threading.Event()
            loop.call_soon_threadsafe(done.set)
            passed.append(done.wait(20.0))
            return work(*arguments)

        return waiting

    models = pool_of(StateModel("large", CYCLE), tmp_path)
    save(store_for(network, 2), tmp_path / f"{kind.name}.safetensors", kind.name)
    part = kind(kind.Params(weight=1.0))
    request = Request("r", Sequence([0], SamplingParams(), 0), contrast=RequestContrast(part))
    monkeypatch.setattr(Artifact, "load", waits(Artifact.load))
    await load_contrast(request, models, get_method("plain").parse({}))
    assert passed == [True]
    monkeypatch.setattr(network, "nearest", waits(network.nearest))
    assert await written(models, part) == [2] * 4
    assert passed == [True] * 5  # the file is not read again


@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "network"), BOTH)
async def test_requests_take_turns_row_by_row_and_rows_are_those_of_one_thread(
    monkeypatch: pytest.MonkeyPatch, kind: Any, network: Any
) -> None:
    """A long draft's rows do not all come before another request's one."""
    parts = [kind(kind.Params(weight=0.5, neighbours=count)) for count in (1, 2)]
    draw, seq = torch.Generator().manual_seed(6), Sequence([1], SamplingParams(), 0)
    rows, logits = list[StreamRows](), list[torch.Tensor]()
    for part, count in zip(parts, (6, 2), strict=True):
        part.store = store_for(network, 2)
        states = torch.randn((count, SIZE), generator=draw)
        rows.append(StreamRows([RowContext(seq)] * count, {-1: states}))
        logits.append(torch.randn((count, 1, SIZE), generator=draw))
    given = list(zip(parts, logits, rows, strict=True))
    alone = [part.combine(row_logits, row) for part, row_logits, row in given]
    searched, nearest = list[int](), network.nearest

    def noted(store: Any, key: torch.Tensor, count: int) -> Any:
        searched.append(count)
        return nearest(store, key, count)

    monkeypatch.setattr(network, "nearest", noted)
    made = await asyncio.gather(*(part.combined(row_logits, row) for part, row_logits, row in given))
    assert all(torch.equal(*each) for each in zip(alone, made, strict=True))
    assert sorted(searched) == [1] * 6 + [2] * 2
    assert searched[-1] == 1  # the longer one's


@pytest.mark.asyncio
async def test_a_store_that_is_not_there_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    models, params = pool_of(StateModel("large", CYCLE), tmp_path), get_method("plain").parse({})
    request = Request("r", Sequence([0], SamplingParams(), 0), contrast=RequestContrast(KnnLm()))
    with pytest.raises(TurnoutError, match=r"^contrast\.artifact: 'knn_lm' is not known"):
        await load_contrast(request, models, params)
    await load_contrast(replace(request, contrast=RequestContrast(KnnLm(KnnLm.Params(weight=0.0)))), models, params)
    await load_contrast(replace(request, contrast=None), models, params)


@pytest.mark.asyncio
async def test_a_store_of_the_large_model_is_refused_where_another_answers(tmp_path: Path) -> None:
    small, large = StateModel("small", CYCLE), StateModel("large", CYCLE)
    models = replace(pool_of(large, tmp_path), models={"small": small, "large": large})
    models = replace(models, roles={"small": "small", "large": "large"})
    save(store_for(TokenStore, 2), tmp_path / "knn_lm.safetensors", "knn_lm")
    seq, plain = Sequence([0], SamplingParams(max_tokens=4), 0), get_method("plain")
    request = Request("r", seq, contrast=RequestContrast(KnnLm()))
    with (
        pytest.raises(TurnoutError, match=r"^contrast\.artifact: 'knn_lm' was made for another model than 'small'"),
        contrasted(request, models, plain.parse({"model": "small"})),
    ):
        pass


def test_answers_of_one_request_read_one_store(tmp_path: Path) -> None:
    """Also where the file is replaced, by one of another layer, before the second answer begins."""
    models = pool_of(StateModel("large", CYCLE), tmp_path)
    part, path = KnnLm(), tmp_path / "knn_lm.safetensors"
    save(store_for(TokenStore, 2), path, "knn_lm")
    part.streams(models, models.large)
    first, other = part.store, store_for(TokenStore, 3)
    other.layer = 0
    save(other, path, "knn_lm")
    part.streams(models, models.large)
    assert part.store is first
    assert part.reads().hidden == {-1}
    fresh = KnnLm()
    fresh.streams(models, models.large)
    assert fresh.reads().hidden == {0}


@pytest.mark.parametrize("name", ["../acme/knn_lm", "tenants/acme/knn_lm", "", "a b"])
def test_a_store_is_named_and_not_a_path(name: str) -> None:
    for kind in (KnnLm, Caad):
        with pytest.raises(ValueError, match="artifact"):
            kind.Params(artifact=name)
