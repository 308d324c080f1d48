// What Python calls. Plain C types only, so that the library depends on no version of Python or torch.
#include <omp.h>

#include "layers.h"

using namespace turnout;

namespace {

// Room for what rows know of the prefixes they share; the calling thread's, grown to the largest forward it saw.
Progress partials(const Batch& batch, Index heads, Index dim) {
  static thread_local std::vector<float> room;
  const Index width = num_panels(dim) * PANEL;
  const std::size_t wanted = batch.partial_rows * heads * (width + 2);
  if (room.size() < wanted) room.resize(wanted);
  return partial_progress(room.data(), batch, heads, width);
}

// Room for quantized rows; the calling thread's, grown to the largest forward it saw.
std::int8_t* quantized(Index bytes) {
  static thread_local std::vector<std::int8_t> room;
  grow(room, bytes);
  return room.data();
}

// One parallel region for the whole call; `room` is of `quantized`.
template <typename Work>
void together(int threads, std::int8_t* room, Work work) {
  Team team;
#pragma omp parallel num_threads(threads)
  work(Worker{&team, omp_get_thread_num(), omp_get_num_threads(), room});
}

// Bytes that a row takes at most as it is quantized for a layer's matrices.
Index widest(const Layer& layer) {
  return std::max({largest_quantized_size(layer.qkv), largest_quantized_size(layer.out),
                   largest_quantized_size(layer.gate_up), largest_quantized_size(layer.down)});
}

template <typename T>
void forward(const Layer* layers, Index first, Index last, const Shape& shape, const Batch& batch, const float* angles,
             const Space& space, int threads) {
  const Progress known = partials(batch, shape.heads, shape.dim);
  Index row = 0;
  for (Index layer = first; layer < last; layer++) row = std::max(row, widest(layers[layer]));
  together(threads, quantized(batch.rows * row), [&](const Worker& worker) {
    for (Index layer = first; layer < last; layer++)
      run_layer<T>(worker, layers[layer], shape, batch, angles, space, known);
  });
}

template <typename T>
void linear(const Matrix& matrix, const T* in, Index rows, Index stride, void* out, bool wide, int threads) {
  const Index columns = all_columns(matrix);
  together(threads, quantized(rows * largest_quantized_size(matrix)), [&](const Worker& worker) {
    if (wide)
      multiply_into(worker, in, stride, rows, matrix, static_cast<float*>(out), columns);
    else
      multiply_into(worker, in, stride, rows, matrix, static_cast<T*>(out), columns);
  });
}

template <typename T, typename S>
void attention(const Batch& batch, Cache<S> cache, Index heads, const Scores& scores, const T* query, T* out,
               int threads) {
  const Index width = heads * cache.dim;
  const Progress known = partials(batch, heads, cache.dim);
  together(threads, nullptr, [&](const Worker& worker) {
    attend<T>(worker, batch, cache, heads, scores, known, {query, width}, {out, width});
  });
}

// As `turnout_attention`, for rows of type T.
template <typename T>
void attention(const Batch& batch, bool bytes, void* cache, Index kv_heads, Index dim, Index heads,
               const Scores& scores, const void* query, void* out, int threads) {
  const T* from = static_cast<const T*>(query);
  T* to = static_cast<T*>(out);
  if (bytes)
    attention<T, std::int8_t>(batch, {static_cast<std::int8_t*>(cache), kv_heads, dim}, heads, scores, from, to,
                              threads);
  else
    attention<T, T>(batch, {static_cast<T*>(cache), kv_heads, dim}, heads, scores, from, to, threads);
}

}  // namespace

extern "C" {

// Columns of a panel: weights are packed for the vectors of this machine.
int turnout_panel() { return PANEL; }

// Layers first..last-1 of a stack, over space->hidden.
void turnout_forward(bool half, const Layer* layers, Index first, Index last, const Shape* shape, const Batch* batch,
                     const float* angles, const Space* space, int threads) {
  half ? forward<bf16>(layers, first, last, *shape, *batch, angles, *space, threads)
       : forward<float>(layers, first, last, *shape, *batch, angles, *space, threads);
}

// out[rows, all columns] = in[rows, K] x matrix + bias; `wide`: out is float whatever the weights are.
void turnout_linear(bool half, const Matrix* matrix, const void* in, Index rows, Index stride, void* out, bool wide,
                    int threads) {
  half ? linear(*matrix, static_cast<const bf16*>(in), rows, stride, out, wide, threads)
       : linear(*matrix, static_cast<const float*>(in), rows, stride, out, wide, threads);
}

// out[rows, heads, dim] = attention of query[rows, heads, dim] over one layer's cache, already written; `bytes`: it is
// kept as bytes.
void turnout_attention(bool half, bool bytes, const Batch* batch, void* cache, Index kv_heads, Index dim, Index heads,
                       const Scores* scores, const void* query, void* out, int threads) {
  half ? attention<bf16>(*batch, bytes, cache, kv_heads, dim, heads, *scores, query, out, threads)
       : attention<float>(*batch, bytes, cache, kv_heads, dim, heads, *scores, query, out, threads);
}

// out[rows, width] = RMS norm of float rows picked[i] of hidden, rounded to the weights' type.
void turnout_norm(bool half, const float* hidden, const std::int64_t* picked, Index rows, Index width,
                  const float* weight, float epsilon, void* out) {
  for (Index row = 0; row < rows; row++) {
    const float* from = hidden + picked[row] * width;
    if (half)
      rms_norm(from, weight, width, epsilon, static_cast<bf16*>(out) + row * width);
    else
      rms_norm(from, weight, width, epsilon, static_cast<float*>(out) + row * width);
  }
}

}  // extern "C"
