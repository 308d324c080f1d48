// Keys that several sequences have in common, read once for the rows of all of them (seed 75, "Hydragen:
// High-Throughput LLM Inference with Shared Prefixes").
//
// What a node's keys contribute to each row below it is kept apart and joined exactly with the rest of the row's keys
// afterwards. Every row sees every key here, and there are many rows for each key, so that arithmetic is the limit:
// scores are made into weights without a maximum for every tile, by powers of two.
#pragma once

#include "tiles.h"

namespace turnout {

// Keys packed at a time; query rows scored at a time, which fit into the first-level cache; query rows of a piece.
constexpr Index STRETCH = 2 * KEYS;
constexpr Index SCORED = 3 * ROWS;
constexpr Index SHARED_QUERIES = 20 * ROWS;
// How many times 2 a weight may exceed 1 before everything is made relative to a higher reference.
constexpr float SLACK = 8.0f;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

// Room for the progress of every (node, span, key head, row below the node); `partial_rows` * heads rows.
inline Progress partial_progress(float* room, const Batch& batch, Index heads, Index width) {
  const Index rows = batch.partial_rows * heads;
  return {room, room + rows * width, room + rows * (width + 1)};
}

// Where the progress of one node's span stands for one key head: its rows follow each other.
template <typename S>
inline Index partial_row(const Node& node, const Cache<S>& cache, Index group, Index span, Index head) {
  const Index rows = (node.end - node.first) * group;
  return node.before * cache.kv_heads * group + (span * cache.kv_heads + head) * rows;
}

// A bound that ends inside a prefix would need rows of their own: such layers attend as if nothing were shared.
inline bool shares(const Batch& batch, const Scores& scores) {
  return batch.nodes > 0 && scores.scale > 0 && !scores.cut(batch.positions_end);
}

// 2^x, to 1e-7 of it in float and 1e-4 for weights that are rounded to bfloat16; next to 0 for x below -125.
template <typename T>
inline Floats power_of_two(Floats x) {
  x = larger(fill(-125.0f), x);
  const Floats n = rounded(x), r = x - n;
  Floats p;
  if (sizeof(T) == 4) {
    p = fused(fill(1.327645643e-3f), r, fill(9.675541212e-3f));
    p = fused(p, r, fill(5.550713322e-2f));
    p = fused(p, r, fill(2.402211973e-1f));
    p = fused(p, r, fill(6.931469670e-1f));
    p = fused(p, r, fill(1.000000072f));
  } else {
    p = fused(fill(5.517153321e-2f), r, fill(2.426111119e-1f));
    p = fused(p, r, fill(6.932610105e-1f));
    p = fused(p, r, fill(9.999280748e-1f));
  }
  return scaled(p, n);
}

template <typename T, typename S>
class SharedPrefixes {
 public:
  SharedPrefixes(const Worker& worker, const Batch& batch, const Cache<S>& cache, Index heads, const Scores& scores,
                 const Progress& partials)
      : worker_(worker),
        batch_(batch),
        cache_(cache),
        scores_(scores),
        partials_(partials),
        group_(heads / cache.kv_heads),
        tokens_(std::max<Index>(1, SHARED_QUERIES / group_)),
        scale_((scores.softcap > 0 ? 1.0f : scores.scale) * LOG2_E),
        packer_(batch, cache),
        units_(packer_.units * (DIGITS<T, S> ? 2 : 1)),
        width_(packer_.width),
        buffers_(prepare()) {
    for (Index node = 0; node < batch.nodes; node++)
      least_pieces_ += chunks(batch.prefixes[node]) * batch.prefixes[node].spans;
  }

  void run(const Rows<const T>& query) {
    Index node = 0, before = 0;
    for (Index index = worker_.team->take();; index = worker_.team->take()) {
      while (node < batch_.nodes && index >= before + pieces(batch_.prefixes[node]))
        before += pieces(batch_.prefixes[node++]);
      if (node == batch_.nodes) return;
      attend(batch_.prefixes[node], index - before, query);
    }
  }

 private:
  static constexpr Index TILES = STRETCH / KEYS, UNIT = Packer<T, S>::UNIT;

  struct Buffers {
    std::vector<Unit> query, keys, values, weights;
    std::vector<float> scores, totals;  // totals: one for each lane
    std::vector<DigitRow> query_rows, weight_rows;
    float key_scales[STRETCH], value_scales[STRETCH];
  };

  const Worker& worker_;
  const Batch& batch_;
  const Cache<S>& cache_;
  const Scores& scores_;
  const Progress partials_;
  const Index group_, tokens_;
  const float scale_;  // from scores, after a soft cap, to powers of two
  Packer<T, S> packer_;
  const Index units_, width_;  // units_: of a query
  Buffers& buffers_;
  Index least_pieces_ = 0;

  Buffers& prepare() const {
    static thread_local Buffers buffers;
    const Index rows = std::max(SHARED_QUERIES, group_);
    grow(buffers.query, rows * units_);
    grow(buffers.keys, STRETCH * packer_.units + 8 * PANEL);
    grow(buffers.values, STRETCH * width_);
    grow(buffers.weights, SCORED * STRETCH / PER_UNIT<T>);
    grow(buffers.query_rows, rows);
    grow(buffers.weight_rows, SCORED);
    grow(buffers.scores, SCORED * STRETCH);
    grow(buffers.totals, rows * LANES);
    return buffers;
  }

  static Index rows(const Node& node) { return node.end - node.first; }
  Index chunks(const Node& node) const { return (rows(node) + tokens_ - 1) / tokens_; }

  // As many heads together as a piece holds and as leave work for everybody.
  Index head_splits(const Node& node) const {
    const Index together = std::max<Index>(1, SHARED_QUERIES / (std::min(tokens_, rows(node)) * group_));
    const Index wanted = (2 * worker_.threads + least_pieces_ - 1) / least_pieces_;
    return std::min(cache_.kv_heads, std::max((cache_.kv_heads + together - 1) / together, wanted));
  }

  Index pieces(const Node& node) const { return chunks(node) * node.spans * head_splits(node); }

  // One piece: some rows below the node, some of its keys, some key heads.
  void attend(const Node& node, Index piece, const Rows<const T>& query) {
    const int splits = static_cast<int>(head_splits(node)), parts = static_cast<int>(chunks(node));
    const Range heads = share(cache_.kv_heads, static_cast<int>(piece % splits), splits);
    const Range tokens = share(rows(node), static_cast<int>(piece / splits % parts), parts);
    const Index span = piece / splits / parts, count = (tokens.end - tokens.begin) * group_;
    const Range keys = span_keys(node, span);
    const auto progress = [&](Index head) {
      return partials_.from(partial_row(node, cache_, group_, span, head) + tokens.begin * group_, width_);
    };
    for (Index head = heads.begin; head < heads.end; head++) {
      gather(node, tokens, head, (head - heads.begin) * count, query);
      reset(progress(head), count, width_);
    }
    std::fill_n(buffers_.totals.begin(), (heads.end - heads.begin) * count * LANES, 0.0f);
    Tile<S> tiles[TILES], following[TILES];
    find(node, keys.begin, keys.end, tiles);
    for (Index key = keys.begin; key < keys.end; key += STRETCH) {
      find(node, key + STRETCH, keys.end, following);
      for (Index head = heads.begin; head < heads.end; head++)
        multiply(tiles, following, head, (head - heads.begin) * count, count, progress(head));
      std::copy_n(following, TILES, tiles);
    }
    for (Index head = heads.begin; head < heads.end; head++)
      finish(progress(head), (head - heads.begin) * count, count);
  }

  // Whole tiles as far as possible.
  static Range span_keys(const Node& node, Index span) {
    const Index keys = node.end_key - node.begin_key, tiles = (keys + KEYS - 1) / KEYS;
    const Range range = share(tiles, static_cast<int>(span), node.spans);
    return {node.begin_key + range.begin * KEYS, node.begin_key + std::min(range.end * KEYS, keys)};
  }

  void find(const Node& node, Index key, Index end, Tile<S>* tiles) const {
    for (Index tile = 0; tile < TILES; tile++, key += KEYS) {
      tiles[tile].count = 0;
      if (key < end) tiles[tile] = packer_.find(node.sequence, key, end);
    }
  }

  // Row order: token, query head of the key head's group.
  void gather(const Node& node, const Range& tokens, Index head, Index to, const Rows<const T>& query) const {
    for (Index token = tokens.begin; token < tokens.end; token++) {
      const Index row = batch_.prefix_rows[node.first + token];
      for (Index member = 0; member < group_; member++, to++) {
        const T* from = query.at(row, head * group_ + member, cache_.dim);
        if constexpr (DIGITS<T, S>)
          buffers_.query_rows[to] = query_digits(from, cache_.dim, packer_.units, &buffers_.query[to * units_]);
        else
          std::memcpy(&buffers_.query[to * units_], from, cache_.dim * sizeof(T));
      }
    }
  }

  // A stretch of keys against `rows` query rows of one key head, from query row `first` on.
  void multiply(const Tile<S>* tiles, const Tile<S>* following, Index head, Index first, Index rows,
                const Progress& progress) {
    Buffers& b = buffers_;
    Index count = 0, packed = 0;
    for (Index tile = 0; tile < TILES && tiles[tile].count > 0; tile++) {
      if constexpr (SCALED<S>) packer_.scales(tiles[tile], head, &b.key_scales[count], &b.value_scales[count]);
      packer_.keys(tiles[tile], following[tile], head, &b.keys[count * packer_.units]);
      packed += packer_.values(tiles[tile], following[tile], head, &b.values[count / UNIT * PANEL], STRETCH / UNIT);
      count += tiles[tile].count;
    }
    for (Range range{0, 0}; range.begin < rows; range.begin = range.end) {
      range.end = std::min(range.begin + SCORED, rows);
      score(first + range.begin, range.end - range.begin, count);
      for (Index row = range.begin; row < range.end; row++) {
        float* totals = &b.totals[(first + row) * LANES];
        if (count == STRETCH)
          weigh<true>(progress.from(row, width_), totals, row - range.begin, count);
        else
          weigh<false>(progress.from(row, width_), totals, row - range.begin, count);
      }
      add(progress.from(range.begin, width_), range.end - range.begin, packed);
    }
  }

  void score(Index first, Index rows, Index count) const {
    const Unit* query = &buffers_.query[first * units_];
    if constexpr (DIGITS<T, S>)
      for (Index panel = 0; panel * PANEL < count; panel++)
        digits_times_panel<true>(query, packer_.units, &buffers_.query_rows[first], rows,
                                 &buffers_.keys[panel * packer_.units * PANEL], packer_.units,
                                 &buffers_.scores[panel * PANEL], STRETCH, false);
    else
      rows_times_panels<T>(query, units_, rows, buffers_.keys.data(), packer_.units * PANEL, num_panels(count), units_,
                           {buffers_.scores.data(), STRETCH, false});
  }

  void add(const Progress& progress, Index rows, Index packed) const {
    constexpr Index stride = STRETCH / UNIT;
    const Unit *weights = buffers_.weights.data(), *values = buffers_.values.data();
    if constexpr (DIGITS<T, S>)
      for (Index panel = 0; panel * PANEL < cache_.dim; panel++)
        digits_times_panel<false>(weights, stride, buffers_.weight_rows.data(), rows, values + panel * stride * PANEL,
                                  packed, progress.sums + panel * PANEL, width_, true);
    else
      rows_times_panels<T>(weights, stride, rows, values, stride * PANEL, num_panels(cache_.dim), packed,
                           {progress.sums, width_, true});
  }

  // One row's scores become weights; WHOLE: as many as a stretch has. Here the reference counts in powers of two.
  template <bool WHOLE>
  void weigh(const Progress& progress, float* totals, Index row, Index count) const {
    constexpr int MOST = STRETCH / LANES;
    const int vectors = WHOLE ? MOST : static_cast<int>((count + LANES - 1) / LANES);
    const int last = WHOLE ? LANES : first_lanes(count - (vectors - 1) * LANES);
    const float* scores = &buffers_.scores[row * STRETCH];
    Unit* weights = &buffers_.weights[row * (DIGITS<T, S> ? 2 * STRETCH / UNIT : STRETCH / UNIT)];
    Floats part[MOST], highest = fill(LOWEST);
    for (int i = 0; i < vectors; i++) {
      part[i] = load(scores + i * LANES);
      if constexpr (SCALED<S>) part[i] = part[i] * load(&buffers_.key_scales[i * LANES]);
      if (scores_.softcap > 0) part[i] = capped(part[i]);
      const bool cut = !WHOLE && i == vectors - 1;
      highest = larger(highest, cut ? keep_first(last, part[i], highest) : part[i]);
    }
    const Floats scale = fill(scale_), limit = fill(*progress.reference + SLACK);
    if (any_above(highest * scale, limit))
      raise(progress, totals, largest_of(highest) * scale_);
    const Floats reference = fill(*progress.reference);
    Floats total = load(totals);
    for (int i = 0; i < vectors; i++) {
      part[i] = power_of_two<T>(fused(part[i], scale, zero() - reference));
      if (!WHOLE && i == vectors - 1) part[i] = keep_first(last, part[i], zero());
      total = total + part[i];
      if constexpr (SCALED<S>) part[i] = part[i] * load(&buffers_.value_scales[i * LANES]);
      if constexpr (!DIGITS<T, S>) store(reinterpret_cast<T*>(weights) + i * LANES, part[i]);
    }
    if constexpr (DIGITS<T, S>)
      buffers_.weight_rows[row] = {weight_digits(part, vectors, STRETCH / UNIT, weights), {0, 0}};
    store(totals, total);
  }

  Floats capped(Floats score) const {
    const Floats cap = fill(scores_.softcap);
    return tanh(score * fill(scores_.scale) / cap) * cap;
  }

  // Make everything that is known of a row relative to a higher reference.
  void raise(const Progress& progress, float* totals, float reference) const {
    const Floats factor = exp(fill((*progress.reference - reference) * LN_2));
    *progress.reference = reference;
    store(totals, load(totals) * factor);
    for (Index column = 0; column < width_; column += LANES) {
      float* weighted = progress.sums + column;
      store(weighted, load(weighted) * factor);
    }
  }

  // As `Progress` has it: the reference in natural logarithms, one total for each row.
  void finish(const Progress& progress, Index first, Index rows) const {
    for (Index row = 0; row < rows; row++) {
      progress.reference[row] *= LN_2;
      progress.total[row] = sum_of(load(&buffers_.totals[(first + row) * LANES]));
    }
  }
};

}  // namespace turnout
