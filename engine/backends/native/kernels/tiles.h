// Tiles of 64 keys, found in the pool's blocks and packed into the panels that `matrix.h` multiplies with: keys
// transposed, values interleaved. And what is known of a query row after some of its keys.
#pragma once

#include <vector>

#include "batch.h"

namespace turnout {

constexpr Index KEYS = 64;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Where the slots of one tile's keys lie.
template <typename T>
struct Tile {
  const T* slots[KEYS];
  Index count;
};

// Weighted values of some query rows after some keys, not yet divided by the weights' total; the weights are relative
// to e^reference, which is not far below the highest score.
struct Progress {
  float *sums, *reference, *total;  // [rows, width], [rows], [rows]

  Progress from(Index row, Index width) const { return {sums + row * width, reference + row, total + row}; }
};

inline void reset(const Progress& progress, Index rows, Index width) {
  std::fill_n(progress.sums, rows * width, 0.0f);
  std::fill_n(progress.reference, rows, LOWEST);
  std::fill_n(progress.total, rows, 0.0f);
}

// Rows after some keys and the same rows after other keys: the rows after both.
inline void join(const Progress& mine, const Progress& other, Index rows, Index width) {
  for (Index row = 0; row < rows; row++) {
    const float both = std::max(mine.reference[row], other.reference[row]);
    if (both == LOWEST) continue;
    const Floats keep = exp(fill(mine.reference[row] - both));
    const Floats take = exp(fill(other.reference[row] - both));
    mine.reference[row] = both;
    mine.total[row] = mine.total[row] * first_of(keep) + other.total[row] * first_of(take);
    float* to = mine.sums + row * width;
    const float* from = other.sums + row * width;
    for (Index column = 0; column < width; column += LANES)
      store(to + column, fused(load(from + column), take, load(to + column) * keep));
  }
}

template <typename U>
inline void grow(std::vector<U>& buffer, Index size) {
  if (static_cast<Index>(buffer.size()) < size) buffer.resize(size);
}

// Counts what it packs, and adds it to the batch's count when it is done.
template <typename T>
class Packer {
 public:
  Packer(const Batch& batch, const Cache<T>& cache)
      : units(cache.dim / PER_UNIT<T>), width(num_panels(cache.dim) * PANEL), batch_(batch), cache_(cache) {}
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;
  ~Packer() { __atomic_fetch_add(batch_.keys_read, read_, __ATOMIC_RELAXED); }

  const Index units, width;

  // The tile of one sequence's keys from `at` on, before `end`.
  Tile<T> find(Index sequence, Index at, Index end) const {
    Tile<T> tile;
    tile.count = std::min(KEYS, end - at);
    const std::int32_t* block = batch_.blocks + sequence * batch_.block_width + at / batch_.block_size;
    Index inside = at % batch_.block_size;
    for (Index i = 0; i < tile.count; i++) {
      tile.slots[i] = cache_.key(*block * batch_.block_size + inside, 0);
      if (++inside == batch_.block_size) inside = 0, block++;
    }
    return tile;
  }

  // One head's keys: [panels of keys][units][PANEL]. While a key is packed, the same one of the tile after it is
  // fetched: spread out, because the memory system drops fetches that come in a burst.
  void keys(const Tile<T>& tile, const Tile<T>& following, Index head, Unit* out) {
    const Index count = tile.count, offset = head * cache_.dim;
    for (Index group = 0; group * LANES < count; group++)
      for (Index unit = 0; unit < units; unit += LANES) {
        const int lanes = first_lanes(units - unit);
        Units block[LANES];
        for (int i = 0; i < LANES; i++) {
          const Index key = group * LANES + i;
          const Unit* from = reinterpret_cast<const Unit*>(tile.slots[std::min(key, count - 1)] + offset) + unit;
          block[i] = load_units(from, key < count ? lanes : 0);
          if (key < following.count) fetch(following.slots[key] + offset, unit * sizeof(Unit));
        }
        transpose(block);
        Unit* to = out + ((group / 2) * units + unit) * PANEL + (group % 2) * LANES;
        const Index end = std::min<Index>(LANES, units - unit);
        for (Index i = 0; i < end; i++) store_units(to + i * PANEL, block[i]);
      }
    for (Index key = (count + LANES - 1) / LANES * LANES; key < following.count; key++)
      for (Index unit = 0; unit < units; unit += LANES) fetch(following.slots[key] + offset, unit * sizeof(Unit));
    if (count % PANEL != 0 && count % PANEL <= LANES)  // the panel's other half is multiplied too
      for (Index unit = 0; unit < units; unit++)
        store_units(out + (count / PANEL * units + unit) * PANEL + LANES, no_units());
    read_ += count;
  }

  // One head's values: [panels of dimensions][stride units][PANEL]. Returns the units packed: keys, or pairs of keys.
  Index values(const Tile<T>& tile, const Tile<T>& following, Index head, Unit* out, Index stride) const;

 private:
  const Batch& batch_;
  const Cache<T>& cache_;
  Index read_ = 0;

  static void fetch(const T* row, Index byte) {
    _mm_prefetch(reinterpret_cast<const char*>(row) + byte, _MM_HINT_T1);
  }
};

template <>
inline Index Packer<float>::values(const Tile<float>& tile, const Tile<float>& following, Index head, Unit* out,
                                   Index stride) const {
  const Index offset = (cache_.kv_heads + head) * cache_.dim;
  for (Index key = 0; key < tile.count; key++)
    for (Index column = 0; column < width; column += LANES) {
      Unit* to = out + (column / PANEL * stride + key) * PANEL + column % PANEL;
      store_units(to, load_units(reinterpret_cast<const Unit*>(tile.slots[key] + offset + column),
                                 first_lanes(cache_.dim - column)));
      if (key < following.count) fetch(following.slots[key] + offset, column * sizeof(float));
    }
  for (Index key = tile.count; key < following.count; key++)
    for (Index column = 0; column < width; column += LANES)
      fetch(following.slots[key] + offset, column * sizeof(float));
  return tile.count;
}

template <>
inline Index Packer<bf16>::values(const Tile<bf16>& tile, const Tile<bf16>& following, Index head, Unit* out,
                                  Index stride) const {
  const Index offset = (cache_.kv_heads + head) * cache_.dim, pairs = (tile.count + 1) / 2;
  for (Index pair = 0; pair < pairs; pair++) {
    const bool whole = 2 * pair + 1 < tile.count;
    const bf16 *even = tile.slots[2 * pair] + offset, *odd = tile.slots[2 * pair + whole] + offset;
    for (Index column = 0; column < width; column += PANEL) {
      const int columns = static_cast<int>(std::min<Index>(cache_.dim - column, PANEL));
      interleave(&even[column].bits, columns, &odd[column].bits, whole ? columns : 0,
                 out + (column / PANEL * stride + pair) * PANEL);
      for (Index key = 2 * pair; key < std::min(2 * pair + 2, following.count); key++)
        fetch(following.slots[key] + offset, column * sizeof(bf16));
    }
  }
  for (Index key = 2 * pairs; key < following.count; key++)
    for (Index column = 0; column < width; column += PANEL)
      fetch(following.slots[key] + offset, column * sizeof(bf16));
  return pairs;
}

}  // namespace turnout
