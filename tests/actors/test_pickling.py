"""Values between coordinator and actors: what comes back is what was sent, and a store holds what somebody can name."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from actors.packing import pack_result, unpack_result
from actors.pickling import Handles, TensorHandle, dumps, dumps_call, loads
from actors.tensor_store import Key, TensorStore
from decoding.model import Readout
from decoding.operations import Extend
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from turnout.errors import Interrupted
from turnout.types import Token

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
BASE = torch.arange(24, dtype=torch.float32).view(4, 6)
COMPLEX = torch.complex(BASE, -BASE)
LAYOUTS = {
    "dense": BASE,
    "transposed": BASE.t(),
    "strided": BASE[::2, 1::3],
    "expanded": BASE[:1].expand(5, 6),
    "scalar": BASE[2, 3],
    "empty": BASE[:0],
    "no columns": BASE[:, :0],
    "behind an offset": BASE.view(-1)[7:],
    "conjugated": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.resolve_conj().resolve_neg().contiguous(), other.contiguous()
    return not one.numel() or bool(torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)))


def resolved(blob: bytes, handles: list[TensorHandle], store: TensorStore) -> object:
    return loads(blob, {handle.key: store.find(handle.key) for handle in handles})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_inline_in_both_directions(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 2], [3, 1, 0]]).to(dtype)
    assert same(tensor, loads(dumps(tensor, None), Handles()))
    blob, handles = dumps_call({"x": tensor})
    assert handles == []
    assert same(tensor, loads(blob, {})["x"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_travels_inline(layout: str) -> None:
    back = loads(dumps(LAYOUTS[layout], None), Handles())
    assert same(LAYOUTS[layout], back)
    assert back.is_contiguous()


def test_what_travelled_inline_can_be_written_to_and_shares_nothing() -> None:
    tensor = torch.zeros(4)
    back = loads(dumps(tensor, None), Handles())
    back[0] = 1.0
    assert tensor[0] == 0.0


def test_tensors_that_are_not_plain_travel_as_torch_does_it() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    sparse = torch.eye(3).to_sparse()
    back_weight, back_sparse = loads(dumps((weight, sparse), None), Handles())
    assert isinstance(back_weight, torch.nn.Parameter)
    assert back_weight.requires_grad
    assert torch.equal(back_sparse.to_dense(), torch.eye(3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stays_on_the_shelf_is_the_very_tensor_when_it_is_used_there(layout: str) -> None:
    store, handles = TensorStore(3, 0), Handles()
    handle = loads(dumps(LAYOUTS[layout], store, least_bytes=0), handles)
    assert isinstance(handle, TensorHandle)
    assert (handle.owner, handle.life) == (3, 0)
    assert (handle.shape, handle.dtype) == (tuple(LAYOUTS[layout].shape), LAYOUTS[layout].dtype)
    assert handle.nbytes == LAYOUTS[layout].nbytes
    blob, listed = dumps_call([handle])
    assert listed == [handle]
    assert resolved(blob, listed, store) == [store.find(handle.key)]
    assert store.find(handle.key) is LAYOUTS[layout]


def test_only_large_tensors_stay() -> None:
    store = TensorStore(0, 0)
    small, large = loads(dumps((torch.zeros(511), torch.zeros(512)), store, 2048), Handles())
    assert isinstance(small, torch.Tensor)
    assert isinstance(large, TensorHandle)
    assert len(store) == 1


def test_drafts_and_verdicts_travel_whole_and_by_reference() -> None:
    store, handles = TensorStore(1, 0), Handles()
    probs = torch.rand(3, 1000)
    draft = DraftTree.chain([5, 6], "small", [probs[0], None])
    rows = [Readout(5, probs=probs[1]), Readout(6, probs=probs[2], hidden={2: torch.ones(8)})]
    verdict = VerifyResult((0,), (Token(5, "small"), Token(9, "large")), rows)
    there_draft, there_verdict = loads(dumps((draft, verdict), store), handles)
    assert (there_draft.tokens, there_draft.parents, there_draft.source) == (draft.tokens, draft.parents, "small")
    assert there_verdict.tokens == verdict.tokens
    assert torch.equal(there_verdict.rows[1].hidden[2], torch.ones(8))
    blob, listed = dumps_call((there_draft, there_verdict))
    assert len(listed) == 3
    assert len(blob) < 2000
    back_draft, back_verdict = resolved(blob, listed, store)
    assert back_draft.proposals[0] is draft.proposals[0]
    assert back_verdict.rows[1].probs is rows[1].probs


def test_a_tensor_that_stands_twice_stays_and_is_listed_once() -> None:
    store, handles = TensorStore(0, 0), Handles()
    tensor = torch.zeros(1000)
    one, other = loads(dumps([tensor, tensor], store), handles)
    assert one is other
    assert len(store) == 1
    blob, listed = dumps_call((one, {"again": other}))
    assert len(listed) == 1
    first, second = resolved(blob, listed, store)
    assert first is second["again"]


@pytest.mark.usefixtures("_no_collector")
def test_reading_a_call_keeps_no_tensor() -> None:
    store, handles = TensorStore(0, 0), Handles()
    handle = loads(dumps(torch.zeros(1000), store), handles)
    blob, listed = dumps_call(handle)
    tensor = resolved(blob, listed, store)
    assert isinstance(tensor, torch.Tensor)
    gone = weakref.ref(tensor)
    del tensor
    store.clear()
    assert gone() is None


def test_views_of_one_memory_count_it_once() -> None:
    store, probs = TensorStore(0, 0), torch.zeros(4, 1000)
    for row in probs:
        store.put(row)
    assert len(store) == 4
    assert store.nbytes == probs.nbytes


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Only what nothing refers to is freed: what is left in a cycle is not."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_the_shelf_is_empty_when_no_handle_is_left() -> None:
    store, handles = TensorStore(2, 0), Handles()
    kept = loads(dumps([torch.zeros(1000) for _ in range(5)], store), handles)
    copies = [kept[0], copy.copy(kept[0]), copy.deepcopy(kept[0])]
    draft = replace(DraftTree.chain([1], "small", [kept[1]]), source="other")
    assert all(each is kept[0] for each in copies)
    del kept
    store.drop(handles.take_dropped(2, 0))
    assert len(store) == 2
    del copies, draft
    store.drop(handles.take_dropped(2, 0))
    assert len(store) == 0
    assert store.nbytes == 0
    assert handles.take_dropped(2, 0) == []


def test_handles_may_fall_on_any_thread_and_each_is_told_of_once() -> None:
    store, told = TensorStore(0, 0), []
    handles = Handles(lambda: told.append(None))
    batches = [loads(dumps([torch.zeros(600) for _ in range(50)], store), handles) for _ in range(4)]
    dropped: list[int] = []
    threads = [threading.Thread(target=batch.clear) for batch in batches]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        dropped += handles.take_dropped(0, 0)
    dropped += handles.take_dropped(0, 0)
    assert sorted(dropped) == list(range(200))
    assert told


def test_drops_are_told_once_until_they_are_taken() -> None:
    store, told = TensorStore(0, 0), []
    handles = Handles(lambda: told.append(None))
    held = loads(dumps([torch.zeros(600) for _ in range(3)], store), handles)
    held.pop()
    held.pop()
    assert len(told) == 1
    assert handles.take_dropped(0, 0) == [2, 1]
    held.pop()
    assert len(told) == 2


def test_a_reference_to_what_did_not_come_is_interrupted() -> None:
    store, handles = TensorStore(0, 0), Handles()
    handle = loads(dumps(torch.zeros(1000), store), handles)
    blob, _ = dumps_call(handle)
    with pytest.raises(Interrupted, match="did not come"):
        loads(blob, {})
    with pytest.raises(Interrupted, match="did not come"):
        loads(blob, {handle.key: torch.zeros(999)})
    with pytest.raises(Interrupted, match="did not come"):
        loads(blob, {handle.key: torch.zeros(1000, dtype=torch.int32)})


def test_a_dropped_tensor_is_interrupted() -> None:
    store = TensorStore(0, 0)
    number = store.put(torch.zeros(3))
    store.drop([number, 77])
    with pytest.raises(Interrupted, match="no longer"):
        store.find(Key(0, 0, number))


def test_a_handle_of_an_earlier_life_is_never_resolved_by_a_later_one() -> None:
    handles, first, second = Handles(), TensorStore(0, 0), TensorStore(0, 1)
    old = loads(dumps(torch.zeros(1000), first), handles)
    new = loads(dumps(torch.ones(1000), second), handles)
    assert old.id == new.id  # the same number: only the life tells them apart
    assert second.find(new.key)[0] == 1.0
    with pytest.raises(Interrupted, match="of life 0 of actor 0 is gone"):
        second.find(old.key)
    with pytest.raises(Interrupted):
        TensorStore(1, 0).find(old.key)
    blob, _ = dumps_call(old)
    with pytest.raises(Interrupted):
        loads(blob, {new.key: second.find(new.key)})


def test_what_an_earlier_life_could_drop_is_not_dropped_by_a_later_one() -> None:
    handles, first, second = Handles(), TensorStore(0, 0), TensorStore(0, 1)
    old = loads(dumps(torch.zeros(1000), first), handles)
    new = loads(dumps(torch.ones(1000), second), handles)
    del old
    assert handles.take_dropped(0, 1) == []
    assert handles.take_dropped(0, 0) == []  # forgotten with that life
    del new
    assert handles.take_dropped(0, 1) == [0]


def test_a_handle_goes_nowhere_but_to_an_actor() -> None:
    handle = loads(dumps(torch.zeros(1000), TensorStore(0, 0)), Handles())
    with pytest.raises(TypeError, match="dumps_call"):
        pickle.dumps(handle)
    blob, _ = dumps_call(handle)
    with pytest.raises(TypeError, match=r"actors\.pickling"):
        pickle.loads(blob)


def test_rows_without_tensors_keep_what_a_structure_left_them() -> None:
    rows = [Readout(5, 0.0, -2.0, ((5, -2.0),), margin=1.0, forced=True, allowed_logprob=-2.0), Readout(6, 1.5)]
    rows.append(Readout(-1, top_processed=((3, -0.5), (1, -1.0)), processed_of=((7, -9.0),)))
    packed = pack_result(Extend(), rows, TensorStore(1, 1))
    assert unpack_result(Extend(), packed, Handles(), (), {}) == rows
