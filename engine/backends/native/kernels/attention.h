// Attention of a ragged batch over the block pool: causal or tree-masked queries, long or short, one kernel for all.
// Prefixes that sequences share are attended to first; every row then continues from there over its sequence's own keys.
//
// A tile of 64 keys is packed into the panels that `matrix.h` multiplies with, and the softmax is kept online, so memory
// does not grow with the length of the cache.
#pragma once

#include "prefixes.h"

namespace turnout {

// Query rows a piece of work holds (tokens x query heads), more only if one token has more.
constexpr Index QUERIES = 5 * ROWS;

template <typename T, typename S>
class Attention {
 public:
  Attention(const Worker& worker, const Batch& batch, const Cache<S>& cache, Index heads, const Scores& scores,
            const Progress& partials)
      : worker_(worker),
        batch_(batch),
        cache_(cache),
        scores_(scores),
        partials_(partials),
        group_(heads / cache.kv_heads),
        tokens_(std::max<Index>(1, QUERIES / group_)),
        most_rows_(std::max(QUERIES, group_)),
        shared_(shares(batch, scores)),
        packer_(batch, cache),
        units_(packer_.units * (DIGITS<T, S> ? 2 : 1)),
        width_(packer_.width) {}

  // Pieces of work are taken one by one, because their sizes differ, and one ahead, to fetch its first keys in time.
  void run(const Rows<const T>& query, const Rows<T>& out) {
    Buffers& buffers = prepare();
    Cursor cursor;
    Piece piece = take(cursor);
    if (piece.heads.end == 0) return;
    Tile<S> tile = find(piece, piece.keys.begin);
    while (piece.heads.end > 0) {
      const Piece next = take(cursor);
      attend(buffers, piece, next, tile, query, out);
      piece = next;
    }
  }

 private:
  // Some tokens of one sequence, for some key heads; heads.end 0: no piece is left.
  struct Piece {
    Index sequence, first, tokens;
    Range heads, keys;
  };

  struct Cursor {
    Index sequence = 0, before = 0;
  };

  struct Buffers {
    std::vector<Unit> query, keys, values, weights;
    std::vector<float> sums, scores, highest, total;
    std::vector<DigitRow> query_rows, weight_rows;
    float key_scales[KEYS], value_scales[KEYS];

    Progress progress() { return {sums.data(), highest.data(), total.data()}; }
  };

  const Worker& worker_;
  const Batch& batch_;
  const Cache<S>& cache_;
  const Scores& scores_;
  const Progress partials_;
  const Index group_, tokens_, most_rows_;
  const bool shared_;
  Packer<T, S> packer_;
  const Index units_, width_;  // units_: of a query

  Index fed(Index sequence) const { return batch_.starts[sequence + 1] - batch_.starts[sequence]; }
  Index token_blocks(Index sequence) const { return (fed(sequence) + tokens_ - 1) / tokens_; }

  // A token's heads lie side by side in the cache, so a piece takes as many of them as its buffers hold and as leave
  // work for everybody.
  Index head_splits(Index sequence) const {
    const Index together = std::max<Index>(1, QUERIES / (std::min(tokens_, fed(sequence)) * group_));
    const Index wanted = (worker_.threads + batch_.sequences - 1) / batch_.sequences;
    return std::min(cache_.kv_heads, std::max((cache_.kv_heads + together - 1) / together, wanted));
  }

  Index pieces(Index sequence) const { return token_blocks(sequence) * head_splits(sequence); }

  Buffers& prepare() const {
    static thread_local Buffers buffers;
    grow(buffers.query, most_rows_ * units_);
    grow(buffers.keys, KEYS * packer_.units + 8 * PANEL);
    grow(buffers.values, KEYS * width_);
    grow(buffers.weights, most_rows_ * KEYS);
    grow(buffers.query_rows, most_rows_);
    grow(buffers.weight_rows, most_rows_);
    grow(buffers.sums, most_rows_ * width_);
    grow(buffers.scores, most_rows_ * KEYS);
    grow(buffers.highest, most_rows_);
    grow(buffers.total, most_rows_);
    return buffers;
  }

  Piece take(Cursor& at) const {
    const Index index = worker_.team->take();
    while (at.sequence < batch_.sequences && index >= at.before + pieces(at.sequence))
      at.before += pieces(at.sequence++);
    if (at.sequence == batch_.sequences) return {0, 0, 0, {0, 0}, {0, 0}};
    const Index inside = index - at.before, splits = head_splits(at.sequence);
    // Last blocks first: in a causal prompt they are the longest.
    const Index first = (token_blocks(at.sequence) - 1 - inside / splits) * tokens_;
    const Index tokens = std::min(tokens_, fed(at.sequence) - first);
    const Range heads = share(cache_.kv_heads, static_cast<int>(inside % splits), static_cast<int>(splits));
    return {at.sequence, first, tokens, heads, own_keys(at.sequence, first, tokens)};
  }

  // `tile` is the piece's first, and becomes the next piece's first.
  void attend(Buffers& b, const Piece& piece, const Piece& next, Tile<S>& tile, const Rows<const T>& query,
              const Rows<T>& out) {
    const Index start = batch_.starts[piece.sequence] + piece.first, dim = cache_.dim, rows = piece.tokens * group_;
    const Range heads = piece.heads, keys = piece.keys;
    const Index all = (heads.end - heads.begin) * rows;
    // Row order: key head, token, query head of the key head's group.
    for (Index row = 0; row < all; row++) {
      const T* from = at(query, start, heads.begin, row, rows);
      if constexpr (DIGITS<T, S>)
        b.query_rows[row] = query_digits(from, dim, packer_.units, &b.query[row * units_]);
      else
        std::memcpy(&b.query[row * units_], from, dim * sizeof(T));
    }
    reset(b.progress(), all, width_);
    if (shared_) join_prefixes(piece, b.progress());
    std::uint64_t seen_by[QUERIES];
    for (Index key = keys.begin; key < keys.end; key += KEYS) {
      Tile<S> following{};
      if (key + KEYS < keys.end)
        following = find(piece, key + KEYS);
      else if (next.heads.end > 0)
        following = find(next, next.keys.begin);
      for (Index token = 0; token < piece.tokens; token++)
        seen_by[token] = seen(piece.sequence, piece.first + token, key, tile.count);
      for (Index head = heads.begin; head < heads.end; head++) {
        multiply(b, tile, following, head, (head - heads.begin) * rows, rows, seen_by);
      }
      tile = following;
    }
    for (Index row = 0; row < all; row++) {
      const Floats scale = fill(1.0f / (b.total[row] + sink(heads.begin, row, rows, b.highest[row])));
      T* to = at(out, start, heads.begin, row, rows);
      for (Index column = 0; column < dim; column += LANES)
        store(to + column, load(&b.sums[row * width_ + column]) * scale,
              first_lanes(dim - column));
    }
  }

  // Add what a piece's rows know of the keys that its sequence shares.
  void join_prefixes(const Piece& piece, const Progress& progress) const {
    const Index rows = piece.tokens * group_;
    for (Index index = batch_.leaves[piece.sequence]; index >= 0; index = batch_.prefixes[index].parent) {
      const Node& node = batch_.prefixes[index];
      const Index place = (batch_.places[piece.sequence] + piece.first - node.first) * group_;
      for (Index span = 0; span < node.spans; span++)
        for (Index head = piece.heads.begin; head < piece.heads.end; head++) {
          const Index from = partial_row(node, cache_, group_, span, head) + place;
          join(progress.from((head - piece.heads.begin) * rows, width_), partials_.from(from, width_), rows, width_);
        }
    }
  }

  template <typename U>
  U* at(const Rows<U>& matrix, Index start, Index first_head, Index row, Index rows) const {
    return matrix.at(start + row % rows / group_, head_of(first_head, row, rows), cache_.dim);
  }

  // The query head of a piece's row.
  Index head_of(Index first_head, Index row, Index rows) const {
    return (first_head + row / rows) * group_ + row % rows % group_;
  }

  // The weight of the sink of a row's head, relative to the row's highest score as its total is.
  float sink(Index first_head, Index row, Index rows, float highest) const {
    return scores_.sinks == nullptr ? 0.0f : std::exp(scores_.sinks[head_of(first_head, row, rows)] - highest);
  }

  // One tile of keys against the rows first..first+rows-1 of one key head.
  void multiply(Buffers& b, const Tile<S>& tile, const Tile<S>& following, Index head, Index first, Index rows,
                const std::uint64_t* seen_by) {
    if constexpr (SCALED<S>) packer_.scales(tile, head, b.key_scales, b.value_scales);
    packer_.keys(tile, following, head, b.keys.data());
    if constexpr (DIGITS<T, S>)
      for (Index panel = 0; panel * PANEL < tile.count; panel++)
        digits_times_panel<true>(&b.query[first * units_], packer_.units, &b.query_rows[first], rows,
                                 &b.keys[panel * packer_.units * PANEL], packer_.units, &b.scores[panel * PANEL], KEYS,
                                 false);
    else
      rows_times_panels<T>(&b.query[first * units_], units_, rows, b.keys.data(), units_ * PANEL,
                           num_panels(tile.count), units_, {b.scores.data(), KEYS, false});
    for (Index row = 0; row < rows; row++) weigh(b, first, row, seen_by[row / group_]);
    constexpr Index STRIDE = KEYS / Packer<T, S>::UNIT;
    const Index packed = packer_.values(tile, following, head, b.values.data(), STRIDE);
    if constexpr (DIGITS<T, S>)
      for (Index panel = 0; panel * PANEL < cache_.dim; panel++)
        digits_times_panel<false>(b.weights.data(), STRIDE, b.weight_rows.data(), rows,
                                  &b.values[panel * STRIDE * PANEL], packed, &b.sums[first * width_ + panel * PANEL],
                                  width_, true);
    else
      rows_times_panels<T>(b.weights.data(), STRIDE, rows, b.values.data(), STRIDE * PANEL, num_panels(cache_.dim),
                           packed, {&b.sums[first * width_], width_, true});
  }

  Tile<S> find(const Piece& piece, Index at) const {
    return packer_.find(piece.sequence, at, piece.keys.end);
  }

  // Keys that some row of the block can see, without those its sequence shares.
  Range own_keys(Index sequence, Index first, Index tokens) const {
    const Index length = batch_.lengths[sequence], count = fed(sequence), context = length - count;
    const bool in_tree = first + tokens > count - std::min<Index>(batch_.tree_sizes[sequence], count);
    const Index end = in_tree ? length : context + first + tokens;
    if (shared_ && batch_.leaves[sequence] >= 0) return {batch_.prefixes[batch_.leaves[sequence]].end_key, end};
    Index begin = 0;
    if (scores_.bounded()) {
      const std::int64_t* positions = batch_.positions + batch_.starts[sequence] + first;
      begin = std::max<Index>(0, scores_.first_seen(*std::min_element(positions, positions + tokens)));
    }
    return {begin, end};
  }

  static std::uint64_t low(Index count) { return count <= 0 ? 0 : count >= KEYS ? ~0ull : (1ull << count) - 1; }

  // Which of the keys at..at+count-1 one token sees.
  std::uint64_t seen(Index sequence, Index token, Index at, Index count) const {
    const Index length = batch_.lengths[sequence], fed_tokens = fed(sequence), nodes = batch_.tree_sizes[sequence];
    const Index context = length - fed_tokens, row = batch_.starts[sequence] + token, root = length - nodes;
    const bool is_node = token >= fed_tokens - std::min(nodes, fed_tokens);
    std::uint64_t bits = low(std::min(count, (is_node ? root : context + token + 1) - at));
    const Index first = scores_.first_seen(batch_.positions[row]);
    if (scores_.bounded()) bits &= ~low(first - at);
    if (!is_node) return bits;
    const std::uint64_t* mask = batch_.tree_masks + row * batch_.tree_words;
    for (Index key = std::max(at, root); key < at + count; key++) {
      const Index node = key - root;
      // Keys before the fed rows have no position here: models with windows or chunks keep no nodes in the cache.
      const bool near =
          !scores_.bounded() || batch_.positions[batch_.starts[sequence] + key - context] >= first;
      if (near && (mask[node / 64] >> (node % 64) & 1)) bits |= 1ull << (key - at);
    }
    return bits;
  }

  // Online softmax of one row's 64 scores: new weights, and the old sums rescaled to the new maximum.
  void weigh(Buffers& b, Index first, Index row, std::uint64_t bits) const {
    float* scores = &b.scores[row * KEYS];
    float &best = b.highest[first + row], &sum = b.total[first + row];
    Floats part[KEYS / LANES], highest = fill(best);
    for (int i = 0; i < KEYS / LANES; i++) {
      part[i] = load(scores + i * LANES) * fill(scores_.scale);
      if constexpr (SCALED<S>) part[i] = part[i] * load(&b.key_scales[i * LANES]);
      if (scores_.softcap > 0)
        part[i] = tanh(part[i] / fill(scores_.softcap)) * fill(scores_.softcap);
      part[i] = keep_bits(bits >> (i * LANES), part[i], fill(LOWEST));
      highest = larger(highest, part[i]);
    }
    const float top = largest_of(highest);
    constexpr Index STRIDE = DIGITS<T, S> ? 2 * KEYS / 4 : KEYS / PER_UNIT<T>;
    Unit* weights = &b.weights[row * STRIDE];
    if (top == LOWEST) {  // nothing seen yet
      std::memset(weights, 0, STRIDE * sizeof(Unit));
      if (DIGITS<T, S>) b.weight_rows[row] = {0.0f, {0, 0}};
      for (int i = 0; i < KEYS / LANES; i++) sum += sum_of(exp(part[i]));  // 0, if none of them is no number
      return;
    }
    Floats total = zero();
    for (int i = 0; i < KEYS / LANES; i++) {
      part[i] = exp(part[i] - fill(top));
      total = total + part[i];
      if constexpr (SCALED<S>) part[i] = part[i] * load(&b.value_scales[i * LANES]);
      if constexpr (!DIGITS<T, S>) store(reinterpret_cast<T*>(weights) + i * LANES, part[i]);
    }
    if constexpr (DIGITS<T, S>) b.weight_rows[row] = {weight_digits(part, KEYS / LANES, KEYS / 4, weights), {0, 0}};
    if (top > best) {
      const Floats factor = exp(fill(best - top));
      sum *= first_of(factor);
      best = top;
      for (Index column = 0; column < width_; column += LANES) {
        float* weighted = &b.sums[(first + row) * width_ + column];
        store(weighted, load(weighted) * factor);
      }
    }
    sum += sum_of(total);
  }
};

// The whole of one layer's attention, for every worker of the team.
template <typename T, typename S>
inline void attend(const Worker& worker, const Batch& batch, const Cache<S>& cache, Index heads, const Scores& scores,
                   const Progress& partials, const Rows<const T>& query, const Rows<T>& out) {
  if (shares(batch, scores)) {
    SharedPrefixes<T, S>(worker, batch, cache, heads, scores, partials).run(query);
    worker.barrier();
  }
  Attention<T, S>(worker, batch, cache, heads, scores, partials).run(query, out);
}

}  // namespace turnout
