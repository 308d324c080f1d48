// Attention of a ragged batch over the block pool: causal or tree-masked queries, long or short, one kernel for all.
//
// A tile of 64 keys is packed into the panels that `matrix.h` multiplies with (keys transposed, values interleaved),
// the softmax is kept online, so memory does not grow with the length of the cache.
#pragma once

#include <vector>

#include "matrix.h"

namespace turnout {

// One forward's ragged batch. Row i of sequence s is fed token starts[s] + i; key k of a sequence lies in slot
// blocks[s][k / block_size] * block_size + k % block_size.
struct Batch {
  Index rows, sequences, block_width, block_size, tree_words;
  const std::int64_t* positions;       // [rows]
  const std::int64_t* slots;           // [rows], where a row's keys and values are written
  const std::int32_t* starts;          // [sequences + 1]
  const std::int32_t* lengths;         // [sequences], keys after this forward
  const std::int32_t* blocks;          // [sequences, block_width]
  const std::int32_t* tree_sizes;      // [sequences], the last so many keys are a tree's nodes, of which the fed ones
                                       // are rows; 0: plainly causal
  const std::uint64_t* tree_masks;     // [rows, tree_words], bit i of a node's row: it sees node i
};

struct Scores {
  float scale, softcap;  // softcap 0: none
  Index window;          // 0: none
};

template <typename T>
struct Cache {
  T* data;  // [slots, 2, kv_heads, dim]
  Index kv_heads, dim;

  T* key(Index slot, Index head) const { return data + (slot * 2 * kv_heads + head) * dim; }
  T* value(Index slot, Index head) const { return key(slot, head + kv_heads); }
};

template <typename T>
struct Rows {
  T* data;  // [rows, heads, dim]
  Index stride;

  T* at(Index row, Index head, Index dim) const { return data + row * stride + head * dim; }
};

// Query rows a piece of work holds (tokens x query heads), more only if one token has more.
constexpr Index QUERIES = 5 * ROWS;
constexpr Index KEYS = 64;

template <typename T>
class Attention {
 public:
  Attention(const Worker& worker, const Batch& batch, const Cache<T>& cache, Index heads, const Scores& scores)
      : worker_(worker),
        batch_(batch),
        cache_(cache),
        scores_(scores),
        group_(heads / cache.kv_heads),
        units_(cache.dim / PER_UNIT<T>),
        width_(num_panels(cache.dim) * PANEL),
        tokens_(std::max<Index>(1, QUERIES / group_)),
        most_rows_(std::max(QUERIES, group_)) {}

  // Pieces of work are taken one by one, because their sizes differ, and one ahead, to fetch its first keys in time.
  void run(const Rows<const T>& query, const Rows<T>& out) {
    Buffers& buffers = prepare();
    Cursor cursor;
    Piece piece = take(cursor);
    if (piece.heads.end == 0) return;
    Tile tile = find(piece, piece.keys.begin);
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

  // Where the slots of one tile's keys lie, and which part of a slot its piece reads.
  struct Tile {
    const T* slots[KEYS];
    Index count;
    Range heads;
  };

  struct Cursor {
    Index sequence = 0, before = 0;
  };

  struct Buffers {
    std::vector<Unit> query, keys, values, weights;
    std::vector<float> sums, scores, highest, total, zero;
  };

  const Worker& worker_;
  const Batch& batch_;
  const Cache<T>& cache_;
  const Scores& scores_;
  const Index group_, units_, width_, tokens_, most_rows_;

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
    buffers.query.resize(most_rows_ * units_);
    buffers.keys.resize(KEYS * units_ + 8 * PANEL);
    buffers.values.resize(KEYS * width_);
    buffers.weights.resize(most_rows_ * KEYS);
    buffers.sums.resize(most_rows_ * width_);
    buffers.scores.resize(most_rows_ * KEYS);
    buffers.highest.resize(most_rows_);
    buffers.total.resize(most_rows_);
    buffers.zero.assign(width_, 0.0f);
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
    return {at.sequence, first, tokens, heads, visible_keys(at.sequence, first, tokens)};
  }

  // `tile` is the piece's first, and becomes the next piece's first.
  void attend(Buffers& b, const Piece& piece, const Piece& next, Tile& tile, const Rows<const T>& query,
              const Rows<T>& out) const {
    const Index start = batch_.starts[piece.sequence] + piece.first, dim = cache_.dim, rows = piece.tokens * group_;
    const Range heads = piece.heads, keys = piece.keys;
    const Index all = (heads.end - heads.begin) * rows;
    // Row order: key head, token, query head of the key head's group.
    for (Index row = 0; row < all; row++)
      std::memcpy(&b.query[row * units_], at(query, start, heads.begin, row, rows), dim * sizeof(T));
    std::fill_n(b.sums.begin(), all * width_, 0.0f);
    std::fill_n(b.highest.begin(), all, -std::numeric_limits<float>::infinity());
    std::fill_n(b.total.begin(), all, 0.0f);
    std::uint64_t seen_by[QUERIES];
    for (Index key = keys.begin; key < keys.end; key += KEYS) {
      Tile following{};
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
      const __m512 scale = _mm512_set1_ps(1.0f / b.total[row]);
      T* to = at(out, start, heads.begin, row, rows);
      for (Index column = 0; column < dim; column += LANES)
        store(to + column, _mm512_mul_ps(_mm512_loadu_ps(&b.sums[row * width_ + column]), scale),
              first_lanes(dim - column));
    }
  }

  template <typename U>
  U* at(const Rows<U>& matrix, Index start, Index first_head, Index row, Index rows) const {
    const Index head = first_head + row / rows, inside = row % rows;
    return matrix.at(start + inside / group_, head * group_ + inside % group_, cache_.dim);
  }

  // One tile of keys against the rows first..first+rows-1 of one key head.
  void multiply(Buffers& b, const Tile& tile, const Tile& following, Index head, Index first, Index rows, const std::uint64_t* seen_by) const {
    const Index count = tile.count;
    pack_keys(b, tile, following, head * cache_.dim);
    for (Index panel = 0; panel * PANEL < count; panel++)
      rows_times_panel<T>(&b.query[first * units_], units_, rows, &b.keys[panel * units_ * PANEL], units_,
                          [&](Index row, __m512 left, __m512 right) {
                            float* to = &b.scores[row * KEYS + panel * PANEL];
                            _mm512_storeu_ps(to, left);
                            _mm512_storeu_ps(to + LANES, right);
                          });
    for (Index row = 0; row < rows; row++) weigh(b, first, row, seen_by[row / group_]);
    const Index pairs = pack_values(b, tile, following, (cache_.kv_heads + head) * cache_.dim);
    for (Index panel = 0; panel * PANEL < cache_.dim; panel++)
      rows_times_panel<T>(b.weights.data(), KEYS / PER_UNIT<T>, rows, &b.values[panel * KEYS / PER_UNIT<T> * PANEL],
                          pairs, [&](Index row, __m512 left, __m512 right) {
                            float* to = &b.sums[(first + row) * width_ + panel * PANEL];
                            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), left));
                            _mm512_storeu_ps(to + LANES, _mm512_add_ps(_mm512_loadu_ps(to + LANES), right));
                          });
  }

  Tile find(const Piece& piece, Index at) const {
    Tile tile;
    tile.count = std::min(KEYS, piece.keys.end - at);
    tile.heads = piece.heads;
    const std::int32_t* block = batch_.blocks + piece.sequence * batch_.block_width + at / batch_.block_size;
    Index inside = at % batch_.block_size;
    for (Index i = 0; i < tile.count; i++) {
      tile.slots[i] = cache_.key(*block * batch_.block_size + inside, 0);
      if (++inside == batch_.block_size) inside = 0, block++;
    }
    return tile;
  }

  // Keys that some row of the block can see.
  Range visible_keys(Index sequence, Index first, Index tokens) const {
    const Index length = batch_.lengths[sequence], count = fed(sequence), context = length - count;
    const bool in_tree = first + tokens > count - std::min<Index>(batch_.tree_sizes[sequence], count);
    const Index end = in_tree ? length : context + first + tokens;
    Index begin = 0;
    if (scores_.window > 0) {
      const std::int64_t* positions = batch_.positions + batch_.starts[sequence] + first;
      begin = std::max<Index>(0, *std::min_element(positions, positions + tokens) - scores_.window + 1);
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
    if (scores_.window > 0) bits &= ~low(batch_.positions[row] - scores_.window + 1 - at);
    if (!is_node) return bits;
    const std::uint64_t* mask = batch_.tree_masks + row * batch_.tree_words;
    for (Index key = std::max(at, root); key < at + count; key++) {
      const Index node = key - root;
      const Index place = batch_.positions[batch_.starts[sequence] + key - context];
      const bool near = scores_.window == 0 || place > batch_.positions[row] - scores_.window;
      if (near && (mask[node / 64] >> (node % 64) & 1)) bits |= 1ull << (key - at);
    }
    return bits;
  }

  // Online softmax of one row's 64 scores: new weights, and the old sums rescaled to the new maximum.
  void weigh(Buffers& b, Index first, Index row, std::uint64_t bits) const {
    float* scores = &b.scores[row * KEYS];
    float &best = b.highest[first + row], &sum = b.total[first + row];
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 part[KEYS / LANES], highest = _mm512_set1_ps(best);
    for (int i = 0; i < KEYS / LANES; i++) {
      part[i] = _mm512_mul_ps(_mm512_loadu_ps(scores + i * LANES), _mm512_set1_ps(scores_.scale));
      if (scores_.softcap > 0)
        part[i] = _mm512_mul_ps(tanh(_mm512_div_ps(part[i], _mm512_set1_ps(scores_.softcap))),
                                _mm512_set1_ps(scores_.softcap));
      part[i] = _mm512_mask_mov_ps(lowest, static_cast<__mmask16>(bits >> (i * LANES)), part[i]);
      highest = _mm512_max_ps(highest, part[i]);
    }
    const float top = _mm512_reduce_max_ps(highest);
    T* weights = reinterpret_cast<T*>(&b.weights[row * (KEYS / PER_UNIT<T>)]);
    if (top == -std::numeric_limits<float>::infinity()) {  // nothing seen yet
      std::memset(weights, 0, KEYS * sizeof(T));
      return;
    }
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < KEYS / LANES; i++) {
      part[i] = exp(_mm512_sub_ps(part[i], _mm512_set1_ps(top)));
      total = _mm512_add_ps(total, part[i]);
      store(weights + i * LANES, part[i]);
    }
    if (top > best) {
      const __m512 factor = exp(_mm512_set1_ps(best - top));
      sum *= _mm512_cvtss_f32(factor);
      best = top;
      for (Index column = 0; column < width_; column += LANES) {
        float* weighted = &b.sums[(first + row) * width_ + column];
        _mm512_storeu_ps(weighted, _mm512_mul_ps(_mm512_loadu_ps(weighted), factor));
      }
    }
    sum += _mm512_reduce_add_ps(total);
  }

  // While a key is packed, the same one of the tile after it is fetched: spread out, because the memory system drops
  // fetches that come in a burst.
  void pack_keys(Buffers& b, const Tile& tile, const Tile& following, Index offset) const {
    const Index count = tile.count;
    for (Index group = 0; group * LANES < count; group++)
      for (Index unit = 0; unit < units_; unit += LANES) {
        const __mmask16 mask = first_lanes(units_ - unit);
        __m512i block[LANES];
        for (int i = 0; i < LANES; i++) {
          const Index key = group * LANES + i;
          const Unit* from = reinterpret_cast<const Unit*>(tile.slots[std::min(key, count - 1)] + offset) + unit;
          block[i] = _mm512_maskz_loadu_epi32(key < count ? mask : 0, from);
          if (key < following.count) fetch(following.slots[key] + offset, unit * sizeof(Unit));
        }
        transpose(block);
        Unit* to = &b.keys[((group / 2) * units_ + unit) * PANEL + (group % 2) * LANES];
        const Index end = std::min<Index>(LANES, units_ - unit);
        for (Index i = 0; i < end; i++) _mm512_storeu_si512(to + i * PANEL, block[i]);
      }
    for (Index key = (count + LANES - 1) / LANES * LANES; key < following.count; key++)
      for (Index unit = 0; unit < units_; unit += LANES) fetch(following.slots[key] + offset, unit * sizeof(Unit));
    if (count % PANEL != 0 && count % PANEL <= LANES)  // the panel's other half is multiplied too
      for (Index unit = 0; unit < units_; unit++)
        _mm512_storeu_si512(&b.keys[(count / PANEL * units_ + unit) * PANEL + LANES], _mm512_setzero_si512());
  }

  static void fetch(const T* row, Index byte) {
    _mm_prefetch(reinterpret_cast<const char*>(row) + byte, _MM_HINT_T1);
  }

  // Returns the units packed: keys, or pairs of keys.
  Index pack_values(Buffers& b, const Tile& tile, const Tile& following, Index offset) const;
};

template <>
inline Index Attention<float>::pack_values(Buffers& b, const Tile& tile, const Tile& following, Index offset) const {
  for (Index key = 0; key < tile.count; key++)
    for (Index column = 0; column < width_; column += LANES) {
      Unit* to = &b.values[(column / PANEL * KEYS + key) * PANEL + column % PANEL];
      const __mmask16 mask = first_lanes(std::max<Index>(cache_.dim - column, 0));
      _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(mask, tile.slots[key] + offset + column));
      if (key < following.count) fetch(following.slots[key] + offset, column * sizeof(float));
    }
  for (Index key = tile.count; key < following.count; key++)
    for (Index column = 0; column < width_; column += LANES)
      fetch(following.slots[key] + offset, column * sizeof(float));
  return tile.count;
}

template <>
inline Index Attention<bf16>::pack_values(Buffers& b, const Tile& tile, const Tile& following, Index offset) const {
  alignas(64) std::uint16_t low[2 * LANES], high[2 * LANES];
  for (int i = 0; i < LANES; i++) {
    low[2 * i] = i, low[2 * i + 1] = 32 + i;
    high[2 * i] = 16 + i, high[2 * i + 1] = 48 + i;
  }
  const __m512i first_half = _mm512_load_si512(low), second_half = _mm512_load_si512(high);
  const Index pairs = (tile.count + 1) / 2;
  for (Index pair = 0; pair < pairs; pair++) {
    const void* even = tile.slots[2 * pair] + offset;
    const bool whole = 2 * pair + 1 < tile.count;
    const void* odd = whole ? static_cast<const void*>(tile.slots[2 * pair + 1] + offset) : b.zero.data();
    for (Index column = 0; column < width_; column += PANEL) {
      const __mmask32 mask = cache_.dim - column >= PANEL ? ~0u : (1u << (cache_.dim - column)) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(even) + column);
      const __m512i c = _mm512_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(odd) + column);
      Unit* to = &b.values[(column / PANEL * (KEYS / 2) + pair) * PANEL];
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first_half, c));
      _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi16(a, second_half, c));
      for (Index key = 2 * pair; key < std::min(2 * pair + 2, following.count); key++)
        fetch(following.slots[key] + offset, column * sizeof(bf16));
    }
  }
  for (Index key = 2 * pairs; key < following.count; key++)
    for (Index column = 0; column < width_; column += PANEL)
      fetch(following.slots[key] + offset, column * sizeof(bf16));
  return pairs;
}

}  // namespace turnout
