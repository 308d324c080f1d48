// Decoder layers of the Llama family: everything between the embeddings and the head, in one call.
#pragma once

#include "attention.h"

namespace turnout {

struct Layer {
  Matrix qkv, out, gate_up, down;
  const float *before_attention, *before_mlp;  // [hidden]
  const float *query_norm, *key_norm;          // [dim] or null
  void* cache;                                 // see `Cache`
  Scores scores;
  bool skips_attention, skips_mlp;  // for the present call: the residual stream passes
};

struct Shape {
  Index hidden, heads, kv_heads, dim, intermediate;
  float epsilon;
  bool byte_cache;  // keys and values are kept as bytes
};

// Working memory, one row per fed token.
struct Space {
  float* hidden;   // [rows, hidden], in and out
  void* normed;    // [rows, hidden]
  void* qkv;       // [rows, (heads + 2 kv_heads) * dim]
  void* attended;  // [rows, heads * dim]
  void* gated;     // [rows, intermediate]
};

inline float inverse_rms(const float* row, Index width, float epsilon) {
  Floats sum = zero();
  for (Index i = 0; i < width; i += LANES) {
    const Floats value = load(row + i, first_lanes(width - i));
    sum = fused(value, value, sum);
  }
  return 1.0f / std::sqrt(sum_of(sum) / static_cast<float>(width) + epsilon);
}

template <typename Out>
inline void rms_norm(const float* row, const float* weight, Index width, float epsilon, Out* out) {
  const Floats scale = fill(inverse_rms(row, width, epsilon));
  for (Index i = 0; i < width; i += LANES) {
    const int lanes = first_lanes(width - i);
    store(out + i, load(row + i, lanes) * scale * load(weight + i, lanes), lanes);
  }
}

// Rotate one head in place: x * cos + swap(x) * sin, where the table's sin carries the sign of the swapped half.
template <typename T>
inline void rotate(T* head, const float* angles, const float* norm, Index dim, float epsilon) {
  float x[1024];
  for (Index i = 0; i < dim; i += LANES) store(x + i, load(head + i, first_lanes(dim - i)));
  if (norm != nullptr) rms_norm(x, norm, dim, epsilon, x);
  const float *cosine = angles, *sine = angles + dim;
  const Index half = dim / 2;
  for (Index i = 0; i < half; i += LANES) {
    const int lanes = first_lanes(half - i);
    const Floats a = load(x + i, lanes), b = load(x + half + i, lanes);
    store(head + i, fused(a, load(cosine + i, lanes), b * load(sine + i, lanes)), lanes);
    store(head + half + i,
          fused(b, load(cosine + half + i, lanes), a * load(sine + half + i, lanes)), lanes);
  }
}

// Rotate queries and keys of one row and write keys and values into the cache.
template <typename T, typename S>
inline void place_row(T* row, const Layer& layer, const Shape& shape, const Cache<S>& cache, const float* angles,
                      Index slot) {
  for (Index head = 0; head < shape.heads; head++)
    rotate(row + head * shape.dim, angles, layer.query_norm, shape.dim, shape.epsilon);
  T* keys = row + shape.heads * shape.dim;
  for (Index head = 0; head < shape.kv_heads; head++)
    rotate(keys + head * shape.dim, angles, layer.key_norm, shape.dim, shape.epsilon);
  if constexpr (SCALED<S>)
    for (Index head = 0; head < 2 * shape.kv_heads; head++)
      quantize_head(keys + head * shape.dim, shape.dim, cache.key(slot, head));
  else
    std::memcpy(cache.key(slot, 0), keys, 2 * shape.kv_heads * shape.dim * sizeof(T));
}

// Keep the keys and values of the batch's rows, then attend.
template <typename T, typename S>
inline void attend_rows(const Worker& worker, const Layer& layer, const Shape& shape, const Batch& batch,
                        const float* angles, const Space& space, const Progress& partials) {
  T *qkv = static_cast<T*>(space.qkv), *attended = static_cast<T*>(space.attended);
  const Index query_width = shape.heads * shape.dim, qkv_width = all_columns(layer.qkv);
  const Cache<S> cache{static_cast<S*>(layer.cache), shape.kv_heads, shape.dim};
  const Range mine = worker.share(batch.rows);
  for (Index row = mine.begin; row < mine.end; row++)
    place_row(qkv + row * qkv_width, layer, shape, cache, angles + batch.positions[row] * 2 * shape.dim,
              batch.slots[row]);
  worker.barrier();
  attend<T>(worker, batch, cache, shape.heads, layer.scores, partials, {qkv, qkv_width}, {attended, query_width});
  worker.barrier();
}

template <typename T>
inline void run_attention(const Worker& worker, const Layer& layer, const Shape& shape, const Batch& batch,
                          const float* angles, const Space& space, const Progress& partials) {
  T *normed = static_cast<T*>(space.normed), *qkv = static_cast<T*>(space.qkv);
  const Index rows = batch.rows, query_width = shape.heads * shape.dim, qkv_width = all_columns(layer.qkv);
  const Range mine = worker.share(rows);
  for (Index row = mine.begin; row < mine.end; row++)
    rms_norm(space.hidden + row * shape.hidden, layer.before_attention, shape.hidden, shape.epsilon,
             normed + row * shape.hidden);
  worker.barrier();
  multiply_into(worker, normed, shape.hidden, rows, layer.qkv, qkv, qkv_width);
  worker.barrier();
  if (shape.byte_cache)
    attend_rows<T, std::int8_t>(worker, layer, shape, batch, angles, space, partials);
  else
    attend_rows<T, T>(worker, layer, shape, batch, angles, space, partials);
  multiply_onto(worker, static_cast<const T*>(space.attended), query_width, rows, layer.out, space.hidden,
                shape.hidden);
  worker.barrier();
}

template <typename T>
inline void run_mlp(const Worker& worker, const Layer& layer, const Shape& shape, const Batch& batch,
                    const Space& space) {
  T *normed = static_cast<T*>(space.normed), *gated = static_cast<T*>(space.gated);
  const Index rows = batch.rows;
  const Range mine = worker.share(rows);
  for (Index row = mine.begin; row < mine.end; row++)
    rms_norm(space.hidden + row * shape.hidden, layer.before_mlp, shape.hidden, shape.epsilon,
             normed + row * shape.hidden);
  worker.barrier();
  multiply_gated(worker, normed, shape.hidden, rows, layer.gate_up, gated, shape.intermediate);
  worker.barrier();
  multiply_onto(worker, gated, shape.intermediate, rows, layer.down, space.hidden, shape.hidden);
  worker.barrier();
}

template <typename T>
inline void run_layer(const Worker& worker, const Layer& layer, const Shape& shape, const Batch& batch,
                      const float* angles, const Space& space, const Progress& partials) {
  if (!layer.skips_attention) run_attention<T>(worker, layer, shape, batch, angles, space, partials);
  if (!layer.skips_mlp) run_mlp<T>(worker, layer, shape, batch, space);
}

}  // namespace turnout
