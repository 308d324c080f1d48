// Keys and values kept as signed bytes: of every token and key head `dim` bytes, and after them the float they count in.
//
// Their scales come to the scores (of keys) and to the weights (of values): once for a key, not for each of its numbers.
// Rows of float multiply bytes made wider. Rows of bfloat16 are integers too, of two digits to the base 128, so that
// bytes are multiplied as they are: sums inside a tile are exact, and 14 bits next to a row's largest number are more
// than bfloat16 holds.
#pragma once

#include <algorithm>
#include <type_traits>

#include "panels.h"

namespace turnout {

constexpr float MOST_CODE = 127.0f, LEAST_SCALE = 0x1p-100f;  // as in engine/cache/kv_formats.py
constexpr float BASE = 128.0f, MOST_NUMBER = BASE * 127, MOST_WEIGHT = BASE * BASE - 1;  // of two digits
constexpr int DIGIT_ROWS = LANES == 16 ? 6 : 2;  // of a product whose sums stay in registers

// Whether cached numbers of this type have scales, and whether rows of T are multiplied with them in digits.
template <typename S>
constexpr bool SCALED = std::is_same_v<S, std::int8_t>;
template <typename T, typename S>
constexpr bool DIGITS = SCALED<S> && sizeof(T) < sizeof(float);

inline float scale_of(const std::int8_t* head, Index dim) {
  float scale;
  std::memcpy(&scale, head + dim, sizeof(scale));
  return scale;
}

// The largest magnitude of some numbers; no number where one of them is not finite.
template <typename T>
inline float most_of(const T* from, Index count) {
  Floats largest = zero(), broken = zero();
  for (Index i = 0; i < count; i += LANES) {
    const Floats numbers = load(from + i, first_lanes(count - i));
    largest = larger(largest, magnitude(numbers));
    broken = fused(numbers, zero(), broken);
  }
  return largest_of(largest) + sum_of(broken);
}

// Round one head's numbers; where one of them is not finite the scale is no number, and so nothing that is read.
template <typename T>
inline void quantize_head(const T* from, Index dim, std::int8_t* to) {
  const float most = most_of(from, dim) / MOST_CODE, scale = most < LEAST_SCALE ? LEAST_SCALE : most;
  for (Index i = 0; i < dim; i += LANES) {
    const int lanes = first_lanes(dim - i);
    store_bytes(to + i, to_integers(load(from + i, lanes) / fill(scale)), lanes);
  }
  std::memcpy(to + dim, &scale, sizeof(scale));
}

// The bytes of LANES units of keys as floats, a row of `stride` for each byte, of which `most` are wanted.
inline void spread_bytes(Units bytes, Unit* to, Index stride, Index most) {
  const Floats numbers[] = {byte_of<0>(bytes), byte_of<1>(bytes), byte_of<2>(bytes), byte_of<3>(bytes)};
  for (Index i = 0; i < std::min<Index>(most, 4); i++) store(reinterpret_cast<float*>(to + i * stride), numbers[i]);
}

// What the digits of a row count in, and what the dots of each begin with.
struct DigitRow {
  float scale;
  std::int32_t starts[2];
};

// The digits of one query: two rows of `units` units, the higher ones first.
template <typename T>
inline DigitRow query_digits(const T* from, Index dim, Index units, Unit* to) {
  std::int8_t *high = reinterpret_cast<std::int8_t*>(to), *low = reinterpret_cast<std::int8_t*>(to + units);
  const float most = most_of(from, dim);
  const Floats factor = fill(most > 0 ? MOST_NUMBER / most : 0.0f);
  Units sums[] = {no_units(), no_units()};
  for (Index i = 0; i < 4 * units; i += LANES) {
    const Units number = to_integers(load(from + i, first_lanes(dim - i)) * factor);
    const Units upper = near_upper_digit(number), lower = without_upper_digit(number, upper);
    const int lanes = first_lanes(4 * units - i);
    store_bytes(high + i, upper, lanes);
    store_bytes(low + i, lower, lanes);
    sums[0] = add_integers(sums[0], upper);
    sums[1] = add_integers(sums[1], lower);
  }
  return {most / MOST_NUMBER, {-BYTES_TAKEN * sum_of_integers(sums[0]), -BYTES_TAKEN * sum_of_integers(sums[1])}};
}

// The digits of one row's `vectors` vectors of weights: two rows of `units` units. Returns what they count in.
inline float weight_digits(const Floats* weights, int vectors, Index units, Unit* to) {
  std::int8_t *high = reinterpret_cast<std::int8_t*>(to), *low = reinterpret_cast<std::int8_t*>(to + units);
  Floats largest = zero(), broken = zero();
  for (int i = 0; i < vectors; i++) {
    largest = larger(largest, weights[i]);
    broken = fused(weights[i], zero(), broken);
  }
  const float most = largest_of(largest);
  const Floats factor = fill(most > 0 ? MOST_WEIGHT / most : 0.0f);
  for (int i = 0; i < vectors; i++) {
    const Units number = to_integers(weights[i] * factor);
    store_bytes(high + i * LANES, upper_digit(number));
    store_bytes(low + i * LANES, lower_digit(number));
  }
  return most / MOST_WEIGHT + sum_of(broken);
}

// out[MR, PANEL] = rows in digits x panel of bytes; `SIGNED`: the digits have signs. Digits of a row are `stride` apart.
template <bool SIGNED, int MR>
[[gnu::noinline]] void digit_product(const Unit* digits, Index stride, const DigitRow* rows, const Unit* panel,
                                     Index units, float* to, Index out_stride, bool added) {
  Units sums[2 * MR][2];
  for (int r = 0; r < 2 * MR; r++) sums[r][0] = sums[r][1] = fill_units(rows[r / 2].starts[r % 2]);
  for (Index k = 0; k < units; k++) {
    Units left = load_units(panel + k * PANEL), right = load_units(panel + k * PANEL + LANES);
    if (SIGNED) left = dot_side(left), right = dot_side(right);
#pragma GCC unroll 12
    for (int r = 0; r < 2 * MR; r++) {
      const Units digit = fill_units(digits[r * stride + k]);
      sums[r][0] = SIGNED ? dot_bytes(sums[r][0], left, digit) : dot_small(sums[r][0], digit, left);
      sums[r][1] = SIGNED ? dot_bytes(sums[r][1], right, digit) : dot_small(sums[r][1], digit, right);
    }
  }
  for (int r = 0; r < MR; r++, to += out_stride)
    for (int v = 0; v < 2; v++) {
      const Floats whole = fused(from_integers(sums[2 * r][v]), fill(BASE), from_integers(sums[2 * r + 1][v]));
      const Floats before = added ? load(to + v * LANES) : zero();
      store(to + v * LANES, fused(whole, fill(rows[r].scale), before));
    }
}

// Any number of rows.
template <bool SIGNED>
inline void digits_times_panel(const Unit* digits, Index stride, const DigitRow* rows, Index count, const Unit* panel,
                               Index units, float* to, Index out_stride, bool added) {
  for (Index row = 0; row < count; row += DIGIT_ROWS) {
    const Unit* from = digits + 2 * row * stride;
    float* out = to + row * out_stride;
    switch (std::min<Index>(count - row, DIGIT_ROWS)) {
#define CASE(MR)                                                                                                 \
  case MR:                                                                                                       \
    if constexpr (MR <= DIGIT_ROWS)                                                                              \
      digit_product<SIGNED, MR>(from, stride, rows + row, panel, units, out, out_stride, added);                 \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
  }
}

}  // namespace turnout
