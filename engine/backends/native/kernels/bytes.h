// Keys and values kept as signed bytes: of every token and key head `dim` bytes, and after them the float they count in.
//
// A byte is an integer that bfloat16 holds exactly. So heads are multiplied as integers, and what they count in comes to
// the scores (of keys) and to the weights (of values) afterwards: once for a key, not for each of its numbers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace turnout {

constexpr float MOST_CODE = 127.0f, LEAST_SCALE = 0x1p-100f;  // as in engine/cache/kv_formats.py

// Whether cached numbers of this type have scales.
template <typename S>
constexpr bool SCALED = std::is_same_v<S, std::int8_t>;

inline float scale_of(const std::int8_t* head, Index dim) {
  float scale;
  std::memcpy(&scale, head + dim, sizeof(scale));
  return scale;
}

// Round one head's numbers; where one of them is not finite the scale is no number, and so nothing that is read.
template <typename T>
inline void quantize_head(const T* from, Index dim, std::int8_t* to) {
  Floats largest = zero(), broken = zero();
  for (Index i = 0; i < dim; i += LANES) {
    const Floats numbers = load(from + i, first_lanes(dim - i));
    largest = larger(largest, magnitude(numbers));
    broken = fused(numbers, zero(), broken);
  }
  const float scale = std::max(largest_of(largest) / MOST_CODE, LEAST_SCALE) + sum_of(broken);
  for (Index i = 0; i < dim; i += LANES) {
    const int lanes = first_lanes(dim - i);
    store_bytes(to + i, to_integers(load(from + i, lanes) / fill(scale)), lanes);
  }
  std::memcpy(to + dim, &scale, sizeof(scale));
}

// The bytes of LANES units of keys as units of T: 4 / PER_UNIT<T> for each, PANEL apart, of which `most` are wanted.
template <typename T>
inline void spread_bytes(Units bytes, Unit* to, Index stride, Index most) {
  const Floats numbers[] = {byte_of<0>(bytes), byte_of<1>(bytes), byte_of<2>(bytes), byte_of<3>(bytes)};
  if constexpr (sizeof(T) == sizeof(float)) {
    for (Index i = 0; i < std::min<Index>(most, 4); i++) store(reinterpret_cast<float*>(to + i * stride), numbers[i]);
  } else {
    store_units(to, joined_halves(numbers[0], numbers[1]));
    if (most > 1) store_units(to + stride, joined_halves(numbers[2], numbers[3]));
  }
}

}  // namespace turnout
