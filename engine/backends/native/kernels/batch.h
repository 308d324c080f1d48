// One forward's ragged batch, and where its queries, keys and values lie.
#pragma once

#include "bytes.h"
#include "matrix.h"

namespace turnout {

// Leading keys that several sequences have in common, the same slots for all of them. A sequence's path runs from its
// deepest node over the parents to a root; what comes after the deepest node's keys is its own.
struct Node {
  std::int32_t sequence;           // one of those below; its block table leads to the keys
  std::int32_t parent;             // node whose keys come before these; -1: none
  std::int32_t first, end;         // rows of the sequences below: prefix_rows[first..end-1]
  std::int32_t begin_key, end_key;
  std::int32_t spans;              // parts the keys are cut into
  std::int32_t before;             // sum over the nodes before it of rows x spans
};

// Row i of sequence s is fed token starts[s] + i; key k of a sequence lies in slot
// blocks[s][k / block_size] * block_size + k % block_size.
struct Batch {
  Index rows, sequences, block_width, block_size, tree_words;
  const std::int64_t* positions;    // [rows]
  const std::int64_t* slots;        // [rows], where a row's keys and values are written
  const std::int32_t* starts;       // [sequences + 1]
  const std::int32_t* lengths;      // [sequences], keys after this forward
  const std::int32_t* blocks;       // [sequences, block_width]
  const std::int32_t* tree_sizes;   // [sequences], number of last keys that are a tree's nodes, of which the fed ones
                                    // are rows; 0: plainly causal
  const std::uint64_t* tree_masks;  // [rows, tree_words], bit i of a node's row: it sees node i
  std::int64_t* keys_read;          // grows by the (key, key head) pairs that were read
  Index nodes, partial_rows;        // partial_rows: sum over the nodes of rows x spans
  Index positions_end;              // greater than every position
  const Node* prefixes;             // [nodes], parents before children
  const std::int32_t* prefix_rows;  // rows of the sequences that share, those of a node side by side
  const std::int32_t* leaves;       // [sequences], deepest node; -1: none
  const std::int32_t* places;       // [sequences], where a sequence's rows stand in prefix_rows
};

struct Scores {
  float scale, softcap;  // softcap 0: none
  Index window, chunk;   // 0: none
  const float* sinks;    // [heads], logits that only the denominator counts; null: none

  bool bounded() const { return window > 0 || chunk > 0; }

  // Whether a token of a position below `end` may not see all before it.
  bool cut(Index end) const { return (window > 0 && end > window) || (chunk > 0 && end > chunk); }

  // The first position that a token sees.
  Index first_seen(Index position) const {
    return window > 0 ? position - window + 1 : chunk > 0 ? position / chunk * chunk : 0;
  }
};

// Keys and values of type S: the model's, or bytes.
template <typename S>
struct Cache {
  S* data;  // [slots, 2, kv_heads, width]
  Index kv_heads, dim;

  // Of a head, with its scale.
  Index width() const { return dim + (SCALED<S> ? static_cast<Index>(sizeof(float)) : 0); }
  S* key(Index slot, Index head) const { return data + (slot * 2 * kv_heads + head) * width(); }
};

template <typename T>
struct Rows {
  T* data;  // [rows, heads, dim]
  Index stride;

  T* at(Index row, Index head, Index dim) const { return data + row * stride + head * dim; }
};

}  // namespace turnout
