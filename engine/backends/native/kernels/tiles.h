// Tiles of 64 keys, found in the pool's blocks and packed into the panels that `matrix.h` multiplies with: keys
// transposed, values interleaved. And what is known of a query row after some of its keys.
#pragma once

#include <vector>

#include "batch.h"

namespace turnout {

constexpr Index KEYS = 64;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Where the slots of one tile's keys lie, which hold numbers of type S.
template <typename S>
struct Tile {
  const S* slots[KEYS];
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
    if (both == LOWEST) {  // totals are 0, or no numbers
      mine.total[row] += other.total[row];
      continue;
    }
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

// Packs numbers of type S as rows of T are multiplied with them, and counts what it packs; it adds that to the batch's
// count when it is done.
template <typename T, typename S>
class Packer {
 public:
  Packer(const Batch& batch, const Cache<S>& cache)
      : units((cache.dim + UNIT - 1) / UNIT), width(num_panels(cache.dim) * PANEL), batch_(batch), cache_(cache) {}
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;
  ~Packer() { __atomic_fetch_add(batch_.keys_read, read_, __ATOMIC_RELAXED); }

  // Numbers of a packed key in a unit, and keys whose values are in one.
  static constexpr Index UNIT = DIGITS<T, S> ? 4 : PER_UNIT<T>;

  const Index units, width;

  // The tile of one sequence's keys from `at` on, before `end`.
  Tile<S> find(Index sequence, Index at, Index end) const {
    Tile<S> tile;
    tile.count = std::min(KEYS, end - at);
    const std::int32_t* block = batch_.blocks + sequence * batch_.block_width + at / batch_.block_size;
    Index inside = at % batch_.block_size;
    for (Index i = 0; i < tile.count; i++) {
      tile.slots[i] = cache_.key(*block * batch_.block_size + inside, 0);
      if (++inside == batch_.block_size) inside = 0, block++;
    }
    return tile;
  }

  // What one head's keys and values count in, [KEYS] each; 0 beyond the tile.
  void scales(const Tile<S>& tile, Index head, float* of_keys, float* of_values) const {
    const Index key_offset = head * cache_.width(), value_offset = key_offset + cache_.kv_heads * cache_.width();
    for (Index key = 0; key < tile.count; key++) {
      of_keys[key] = scale_of(tile.slots[key] + key_offset, cache_.dim);
      of_values[key] = scale_of(tile.slots[key] + value_offset, cache_.dim);
    }
    std::fill(of_keys + tile.count, of_keys + KEYS, 0.0f);
    std::fill(of_values + tile.count, of_values + KEYS, 0.0f);
  }

  // One head's keys: [panels of keys][units][PANEL]. While a key is packed, the same one of the tile after it is
  // fetched: spread out, because the memory system drops fetches that come in a burst.
  void keys(const Tile<S>& tile, const Tile<S>& following, Index head, Unit* out) {
    const Index count = tile.count, offset = head * cache_.width(), stored = (units + SPREAD - 1) / SPREAD;
    for (Index group = 0; group * LANES < count; group++)
      for (Index unit = 0; unit < stored; unit += LANES) {
        const int lanes = first_lanes(stored - unit);
        Units block[LANES];
        for (int i = 0; i < LANES; i++) {
          const Index key = group * LANES + i;
          const Unit* from = reinterpret_cast<const Unit*>(tile.slots[std::min(key, count - 1)] + offset) + unit;
          block[i] = load_units(from, key < count ? lanes : 0);
          if (key < following.count) {
            fetch(following.slots[key] + offset, unit * sizeof(Unit));
            if (SCALED<S> && unit + LANES >= stored) fetch(following.slots[key] + offset, cache_.dim);
          }
        }
        transpose(block);
        Unit* to = out + ((group / 2) * units + unit * SPREAD) * PANEL + (group % 2) * LANES;
        const Index end = std::min<Index>(LANES * SPREAD, units - unit * SPREAD);
        for (Index i = 0; i < end; i += SPREAD)
          if constexpr (SPREAD > 1)
            spread_bytes(block[i / SPREAD], to + i * PANEL, PANEL, end - i);
          else
            store_units(to + i * PANEL, block[i]);
      }
    for (Index key = (count + LANES - 1) / LANES * LANES; key < following.count; key++)
      for (Index unit = 0; unit < stored; unit += LANES) fetch(following.slots[key] + offset, unit * sizeof(Unit));
    if (count % PANEL != 0 && count % PANEL <= LANES)  // the panel's other half is multiplied too
      for (Index unit = 0; unit < units; unit++)
        store_units(out + (count / PANEL * units + unit) * PANEL + LANES, no_units());
    read_ += count;
  }

  // One head's values: [panels of dimensions][stride units][PANEL]. Returns the units packed, of UNIT keys each.
  // Inlined it is slower: registers run out.
  [[gnu::noinline]] Index values(const Tile<S>& tile, const Tile<S>& following, Index head, Unit* out,
                                 Index stride) const {
    const Index offset = (cache_.kv_heads + head) * cache_.width(), packed = (tile.count + UNIT - 1) / UNIT;
    for (Index place = 0; place < packed; place++) {
      const Index key = place * UNIT, there = std::min(UNIT, tile.count - key);
      const S* rows[UNIT];
      for (Index i = 0; i < UNIT; i++) rows[i] = tile.slots[key + std::min(i, there - 1)] + offset;
      for (Index column = 0; column < width; column += STEP) {
        pack(rows, there == UNIT, column, out + (column / PANEL * stride + place) * PANEL + column % PANEL);
        for (Index next = key; next < key + UNIT; next++)
          if (next < following.count) {
            if (!SCALED<S> || column % LINE == 0) fetch(following.slots[next] + offset, column * sizeof(S));
            if (SCALED<S> && column + STEP >= width) fetch(following.slots[next] + offset, cache_.dim);
          }
      }
    }
    for (Index key = packed * UNIT; key < following.count; key++)
      for (Index column = 0; column < width; column += STEP)
        fetch(following.slots[key] + offset, column * sizeof(S));
    return packed;
  }

 private:
  // Packed units that a unit of the cache makes; columns of values packed at a time.
  static constexpr Index SPREAD = PER_UNIT<S> / UNIT;
  static constexpr Index STEP = sizeof(S) == sizeof(bf16) ? PANEL : LANES, LINE = 64;  // LINE: of the processor's cache

  const Batch& batch_;
  const Cache<S>& cache_;
  Index read_ = 0;

  static void fetch(const S* row, Index byte) {
    _mm_prefetch(reinterpret_cast<const char*>(row) + byte, _MM_HINT_T1);
  }

  // STEP columns of the values of UNIT keys. Those that are not there count nothing: their weights are 0, and bytes are
  // numbers whatever they are; of two numbers that are wider the second one is 0.
  void pack(const S* const rows[UNIT], bool whole, Index column, Unit* to) const {
    const int lanes = first_lanes(cache_.dim - column);
    if constexpr (DIGITS<T, S>) {
      const S* const from[] = {rows[0] + column, rows[1] + column, rows[2] + column, rows[3] + column};
      store_units(to, columns_of(from, lanes));
    } else if constexpr (SCALED<S>) {
      store(reinterpret_cast<float*>(to), load_bytes(rows[0] + column, lanes));
    } else if constexpr (UNIT == 1) {
      store_units(to, load_units(reinterpret_cast<const Unit*>(rows[0] + column), lanes));
    } else {
      const int columns = static_cast<int>(std::min<Index>(cache_.dim - column, PANEL));
      interleave(&rows[0][column].bits, columns, &rows[1][column].bits, whole ? columns : 0, to);
    }
  }
};

}  // namespace turnout
