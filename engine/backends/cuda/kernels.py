"""Triton kernels over the block pool: write new keys and values, attend, merge what was attended in parts.

Positions make masks, slots address memory; see `engine.attention.layout`. The cache of a layer is
[slots, 2, kv_heads, dim], a token's keys before its values. Arrays of a batch are int64; see
`engine.backends.cuda.metadata`. The values in capitals are known when a kernel is compiled.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kernel(pairs, cache, slots, row_stride, ROW: tl.constexpr, TILE: tl.constexpr):
    """Copy rows [ROW] of new keys and values into their slots; a row whose slot is negative is padding.

    Grid: (rows, tiles of a row).
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < ROW
    value = tl.load(pairs + row.to(tl.int64) * row_stride + column, mask=inside)
    tl.store(cache + slot * ROW + column, value, mask=inside)


# A kernel is compiled anew for each alignment of its arguments; that of a batch's arrays changes from step to step.
_BATCH = ["positions", "starts", "lengths", "tree_sizes", "tree_masks", "blocks"]


@triton.jit(do_not_specialize=["num_rows", "width", "splits"], do_not_specialize_on_alignment=_BATCH)
def attend_kernel(
    query,  # [num_rows, heads, dim]
    cache,
    out,  # [num_rows, heads, dim], or float32 [splits, num_rows, heads, dim]
    weight,  # float32 [splits, num_rows, heads]: log-sum-exp of each part's scores; unused unless IS_SPLIT
    positions,
    starts,
    lengths,
    tree_sizes,
    tree_masks,
    blocks,
    num_rows,
    width,
    splits,  # parts the keys are cut into
    row_stride,
    head_stride,
    scaling,
    SOFTCAP: tl.constexpr,  # 0: none
    WINDOW: tl.constexpr,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,  # power of two not below DIM
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # query rows of a program: fed tokens x query heads of one KV head, heads fastest
    KEYS: tl.constexpr,  # keys loaded at a time
    IS_SPLIT: tl.constexpr,
):
    """Attention of up to 64 fed tokens of each sequence; grid (sequences, tiles of ROWS x splits, KV heads)."""
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    split, first = tl.program_id(1) % splits, tl.program_id(1) // splits * ROWS
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if first >= count * GROUP:
        return
    length = tl.load(lengths + sequence)
    root = length - tl.load(tree_sizes + sequence)
    token = (first + tl.arange(0, ROWS)) // GROUP
    head = kv_head * GROUP + (first + tl.arange(0, ROWS)) % GROUP
    row, valid = start + token, token < count
    position = tl.load(positions + row, mask=valid, other=length)
    column = tl.arange(0, TILE_DIM)
    stored = valid[:, None] & (column < DIM)[None, :]
    where = row[:, None] * row_stride + head[:, None] * head_stride + column[None, :]
    queries = tl.load(query + where, mask=stored, other=0.0)
    last = tl.minimum((first + ROWS - 1) // GROUP, count - 1)
    begin, end = _part(split, splits, length - count + last, position, root, length, WINDOW, KEYS)
    place = row * (KV_HEADS * GROUP) + head
    attended, size = _attend(
        queries, cache + kv_head * DIM, blocks + sequence * width, begin, end, positions + start - (length - count),
        length - count + token, position, tl.load(tree_masks + row, mask=valid, other=0), root, scaling,
        SOFTCAP, WINDOW, KV_HEADS * DIM, DIM, TILE_DIM, BLOCK_SIZE, ROWS, KEYS,
    )  # fmt: skip
    if IS_SPLIT:
        place += split * num_rows * (KV_HEADS * GROUP)
        tl.store(weight + place, size, mask=valid)
    tl.store(out + place[:, None] * DIM + column[None, :], attended.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _part(split, splits, last, position, root, length, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """First key and end of part `split` of the keys that some row sees; the last row fed stands at index `last`."""
    begin = 0
    end = tl.where(last >= root, length, last + 1)
    if WINDOW > 0:
        begin = tl.maximum(tl.min(position) - WINDOW + 1, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), splits) * KEYS
    begin += split * share
    return begin, tl.minimum(begin + share, end)


@triton.jit
def _attend(
    queries,  # [ROWS, TILE_DIM]
    cache,  # at the KV head
    blocks,  # of the sequence
    begin,
    end,
    positions,  # of the sequence: key k, if fed now, stands at positions[k]
    index,  # [ROWS] place in the sequence
    position,  # [ROWS]
    mask,  # [ROWS] bit i of a node's word: it sees node i
    root,  # index of the tree's first node
    scaling,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SIDE: tl.constexpr,  # from a token's keys to its values
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Online softmax in float32 over keys begin to end: the average value of each row, and its scores' log-sum-exp."""
    column = tl.arange(0, TILE_DIM)
    in_dim = column < DIM
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, TILE_DIM], tl.float32)
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        inside = key < end
        block = tl.load(blocks + key // BLOCK_SIZE, mask=inside, other=0)
        place = (block * BLOCK_SIZE + key % BLOCK_SIZE) * (2 * SIDE)
        keys = tl.load(cache + place[None, :] + column[:, None], mask=inside[None, :] & in_dim[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * scaling
        if SOFTCAP > 0:
            scores = _squash(scores, SOFTCAP)
        seen = _seen(key, inside, at + KEYS > root, positions, index, position, mask, root, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet keeps -inf; 0 in its place keeps the differences defined.
        shift = tl.where(top == float("-inf"), 0.0, top)
        shares = tl.exp(scores - shift[:, None])
        fading = tl.exp(best - shift)
        total = total * fading + tl.sum(shares, 1)
        values = tl.load(
            cache + SIDE + place[:, None] + column[None, :], mask=inside[:, None] & in_dim[None, :], other=0.0
        )
        sums = sums * fading[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        best = top
    divisor = tl.where(total == 0.0, 1.0, total)
    return sums / divisor[:, None], tl.where(total == 0.0, float("-inf"), best + tl.log(divisor))


@triton.jit
def _squash(scores, SOFTCAP: tl.constexpr):
    """Soft cap: SOFTCAP * tanh(scores / SOFTCAP), tanh by one exponential that cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(scores) / SOFTCAP)
    size = SOFTCAP * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scores < 0, -size, size)


@triton.jit
def _seen(key, inside, has_nodes, positions, index, position, mask, root, WINDOW: tl.constexpr):
    """Which rows see which keys, [rows, keys]: those before by index, a tree's own by the bits of its masks."""
    is_node = index >= root
    seen = key[None, :] < tl.where(is_node, root, index + 1)[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > (position - WINDOW)[:, None])
    if has_nodes:
        node = key - root
        in_tree = inside & (node >= 0)
        bit = (mask[:, None] >> tl.minimum(tl.maximum(node, 0), 63)[None, :]) & 1
        shown = (bit != 0) & in_tree[None, :]
        if WINDOW > 0:
            depth = tl.load(positions + key, mask=in_tree, other=0)
            shown = shown & (depth[None, :] > (position - WINDOW)[:, None])
        seen = seen | shown
    return seen & inside[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    parts, weight, out, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr, TILE_DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """Combine parts [SPLITS, rows, heads, dim] by their log-sum-exp [SPLITS, rows, heads] into [rows, heads, dim].

    Grid: (rows, heads). SPLITS is a power of two.
    """
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    part = place + tl.arange(0, SPLITS).to(tl.int64) * num_rows * HEADS
    column = tl.arange(0, TILE_DIM)
    in_dim = column < DIM
    sizes = tl.load(weight + part)
    shares = tl.exp(sizes - tl.max(sizes, 0))
    values = tl.load(parts + part[:, None] * DIM + column[None, :], mask=in_dim[None, :], other=0.0)
    merged = tl.sum(values * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + place * DIM + column, merged.to(out.dtype.element_ty), mask=in_dim)
