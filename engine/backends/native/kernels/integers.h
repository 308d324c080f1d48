// Products with weights of 4 to 8 bits whose groups share a scale, over rows quantized to 8 bits in the same groups.
//
// Panel layout: [panels][groups] of a float16 scale for each column, a float16 zero or minimum where there are any, and
// [units][PANEL columns] units. A unit of 8 bits is four of K; of 4 bits eight: the first four in the low halves of its
// bytes. 32 of K of 5 bits, and 16 of 6, are a unit of their upper bits, then units of the lower 4. With super-blocks:
// [panels][super-blocks] of the float16 numbers, then a signed byte for each group and column that they are multiplied
// with to be its scale, the same for its minimum, then the units of all groups. Sums inside a group are integers, hence
// exact; groups are added in their order. So a row's result depends neither on the rows that are multiplied with it nor
// on the instructions.
#pragma once

#include <cstddef>

#include "panels.h"

namespace turnout {

constexpr Index GROUP = 32, HALF_GROUP = 16;
constexpr Index LARGEST_GROUP = 128;
constexpr int step_of(int bits) { return bits == 6 ? HALF_GROUP : GROUP; }  // of K, that are multiplied at once
constexpr Index AHEAD_BYTES = 8192;  // how far ahead a panel is fetched

// What precedes the `group` integers of one row's group; `start` is what its dots begin with.
struct RowGroup {
  float scale, scaled_sum;  // scaled_sum: scale * sum
  std::int32_t start;
};

// Bytes of a quantized row.
inline Index quantized_size(const Matrix& matrix) {
  return matrix.bits == 0 ? 0 : matrix.units * (matrix.group + static_cast<Index>(sizeof(RowGroup)));
}

// The same, of a matrix and of those after it at most.
inline Index largest_quantized_size(const Matrix& matrix) {
  Index most = 0;
  for (const Matrix* part = &matrix; part != nullptr; part = part->next) most = std::max(most, quantized_size(*part));
  return most;
}

// Round the `count` numbers of a group to 8 bits; those that the group lacks are 0. `taken`: from the dots, for each
// integer of the row.
template <bool WHOLE, typename T>
inline void quantize_group(const T* from, Index count, Index group, std::int32_t taken, std::int8_t* to) {
  const auto numbers = [&](Index i) { return load(from + i, WHOLE ? LANES : first_lanes(count - i)); };
  Floats largest = zero();
  for (Index i = 0; i < count; i += LANES) largest = larger(largest, magnitude(numbers(i)));
  const float most = largest_of(largest);
  const Floats factor = fill(most > 0 ? 127.0f / most : 0.0f);
  Units sum = no_units();
  for (Index i = 0; i < group; i += LANES) {
    const Units near = to_integers(numbers(i) * factor);
    sum = add_integers(sum, near);
    store_bytes(to + sizeof(RowGroup) + i, near);
  }
  const float scale = most / 127.0f;
  const std::int32_t whole = sum_of_integers(sum);
  const RowGroup known{scale, scale * static_cast<float>(whole), -taken * whole};
  std::memcpy(to, &known, sizeof(known));
}

// Round one row to 8 bits with a scale for each group; beyond the matrix's width it is 0.
template <typename T>
inline void quantize_row(const T* from, const Matrix& matrix, std::int8_t* to) {
  const std::int32_t middle = matrix.offset == SYMMETRIC ? 1 << (matrix.bits - 1) : 0;
  const std::int32_t taken = matrix.bits == 8 ? BYTES_TAKEN : middle;
  const Index group = matrix.group, step = static_cast<Index>(sizeof(RowGroup)) + group;
  for (Index start = 0; start < matrix.width; start += group, to += step) {
    const Index count = std::min(group, matrix.width - start);
    const T* numbers = from + start;
    T gathered[LARGEST_GROUP];
    if (matrix.order != nullptr) {
      for (Index i = 0; i < count; i++) gathered[i] = from[matrix.order[start + i]];
      numbers = gathered;
    }
    if (count == GROUP && group == GROUP)
      quantize_group<true>(numbers, GROUP, GROUP, taken, to);
    else if (count == HALF_GROUP && group == HALF_GROUP)
      quantize_group<true>(numbers, HALF_GROUP, HALF_GROUP, taken, to);
    else
      quantize_group<false>(numbers, count, group, taken, to);
  }
}

// One number of a row's group, in every lane.
inline Units fill_from(const std::int8_t* row, Index byte) {
  std::uint32_t unit;
  std::memcpy(&unit, row + byte, sizeof(unit));
  return fill_units(unit);
}

// Where the factors of a super-block's groups are.
struct SuperBlock {
  const std::uint16_t* halves;
  const std::int8_t* bytes;
  Index left;  // groups of it that are still to come
};

// Scales and minimums or zeros, where there are any, of a panel's next group; returns where the panel continues.
template <bool BLOCKED>
inline const Unit* read_factors(const Unit* panel, const Matrix& matrix, SuperBlock& block, Floats (&scale)[2],
                                Floats (&least)[2]) {
  const Index kinds = matrix.offset == SYMMETRIC ? 1 : 2;
  if constexpr (!BLOCKED) {
    const std::uint16_t* halves = reinterpret_cast<const std::uint16_t*>(panel);
    for (int v = 0; v < 2; v++) scale[v] = load_small(halves + v * LANES);
    if (kinds == 2)
      for (int v = 0; v < 2; v++) least[v] = load_small(halves + PANEL + v * LANES);
    return panel + kinds * PANEL / 2;
  }
  if (block.left == 0) {
    block = {reinterpret_cast<const std::uint16_t*>(panel),
             reinterpret_cast<const std::int8_t*>(panel + kinds * PANEL / 2), matrix.blocked};
    panel += kinds * (PANEL / 2 + matrix.blocked * PANEL / 4);
  }
  const auto factor = [&](Index kind, int v) {
    const std::int8_t* bytes = block.bytes + kind * matrix.blocked * PANEL + v * LANES;
    return load_small(block.halves + kind * PANEL + v * LANES) * load_bytes(bytes, LANES);
  };
  for (int v = 0; v < 2; v++) scale[v] = factor(0, v);
  if (kinds == 2)
    for (int v = 0; v < 2; v++) least[v] = factor(1, v);
  block.bytes += PANEL;
  block.left--;
  return panel;
}

inline void fetch_ahead(const Unit* unit) {
  _mm_prefetch(reinterpret_cast<const char*>(unit) + AHEAD_BYTES, _MM_HINT_T1);
  if (PANEL * sizeof(Unit) > 64)  // a cache line
    _mm_prefetch(reinterpret_cast<const char*>(unit + LANES) + AHEAD_BYTES, _MM_HINT_T1);
}

// Add the products of `step_of` of K, of 5 or 6 bits, to the sums of MR rows, whose integers begin at `at`; returns
// where the panel continues.
template <int BITS, int MR>
inline const Unit* add_split_products(const Unit* panel, const std::int8_t* const* rows, Index at,
                                      Units (&sums)[MR][2]) {
  constexpr int QUADS = step_of(BITS) / 4, UPPER = BITS - 4, MASK = ((1 << UPPER) - 1) << 4;
  static_assert(QUADS * UPPER == 8);
  fetch_ahead(panel);
  const Units upper[2] = {load_units(panel), load_units(panel + LANES)};
#pragma GCC unroll 8
  for (int quad = 0; quad < QUADS; quad++) {
    const Unit* unit = panel + (1 + quad / 2) * PANEL;
    if (quad % 2 == 0) fetch_ahead(unit);
    Units weights[2];
    for (int v = 0; v < 2; v++) {
      const Units both = load_units(unit + v * LANES), low = quad % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
      weights[v] = with_bits(low, upper[v], 4 - UPPER * quad, MASK);
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      const Units numbers = fill_from(rows[r], at + 4 * quad);
      for (int v = 0; v < 2; v++) sums[r][v] = dot_small(sums[r][v], weights[v], numbers);
    }
  }
  return panel + (1 + QUADS / 2) * PANEL;
}

// The same of GROUP of K, of 4 or 8 bits.
template <int BITS, int MR>
inline const Unit* add_products(const Unit* panel, const std::int8_t* const* rows, Index at, Units (&sums)[MR][2]) {
  Units parts[MR][2];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
    for (int v = 0; v < 2; v++) parts[r][v] = DOTS_ARE_WHOLE ? sums[r][v] : no_units();
  constexpr int UNITS = GROUP * BITS / 32;
#pragma GCC unroll 8
  for (int u = 0; u < UNITS; u++) {
    const Unit* unit = panel + u * PANEL;
    fetch_ahead(unit);
    const Units both[2] = {load_units(unit), load_units(unit + LANES)};
    if constexpr (BITS == 8) {
      const Units weights[2] = {dot_side(both[0]), dot_side(both[1])};
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const Units quad = fill_from(rows[r], at + 4 * u);
        for (int v = 0; v < 2; v++) sums[r][v] = dot_bytes(sums[r][v], weights[v], quad);
      }
    } else {
      const Units low[2] = {low_nibbles(both[0]), low_nibbles(both[1])};
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const Units quad = fill_from(rows[r], at + 8 * u);
        for (int v = 0; v < 2; v++) parts[r][v] = dot_halves(parts[r][v], low[v], quad);
      }
      const Units high[2] = {high_nibbles(both[0]), high_nibbles(both[1])};
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const Units quad = fill_from(rows[r], at + 8 * u + 4);
        for (int v = 0; v < 2; v++) parts[r][v] = dot_halves(parts[r][v], high[v], quad);
      }
    }
  }
  if constexpr (BITS == 4)
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < 2; v++)
        sums[r][v] = DOTS_ARE_WHOLE ? parts[r][v] : add_integers(sums[r][v], whole_dots(parts[r][v]));
  return panel + UNITS * PANEL;
}

// sums[MR, PANEL] = quantized rows x panel. `BLOCKED`: of super-blocks; apart, since the registers that reading their
// factors takes would cost other weights some per cent.
template <int BITS, bool BLOCKED, int MR>
[[gnu::noinline]] void integer_product(const std::int8_t* first, Index stride, const Unit* panel, const Matrix& matrix,
                                       float* sums) {
  const Index kind = matrix.offset, step = static_cast<Index>(sizeof(RowGroup)) + matrix.group;
  const std::int8_t* rows[MR];
  Floats totals[MR][2];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++) {
    rows[r] = first + r * stride;
    totals[r][0] = totals[r][1] = zero();
  }
  SuperBlock block{};
  for (Index group = 0; group < matrix.units; group++) {
    Floats scale[2], least[2];
    panel = read_factors<BLOCKED>(panel, matrix, block, scale, least);
    if (kind != SYMMETRIC) {
      if (kind == ZEROS)
        for (int v = 0; v < 2; v++) least[v] = zero() - least[v] * scale[v];
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const Floats scaled_sum = as_floats(fill_from(rows[r], offsetof(RowGroup, scaled_sum)));
        for (int v = 0; v < 2; v++) totals[r][v] = fused(least[v], scaled_sum, totals[r][v]);
      }
    }
    Units whole[MR][2];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) whole[r][0] = whole[r][1] = fill_from(rows[r], offsetof(RowGroup, start));
    for (Index at = sizeof(RowGroup); at < step; at += step_of(BITS))
      if constexpr (BITS == 5 || BITS == 6)
        panel = add_split_products<BITS, MR>(panel, rows, at, whole);
      else
        panel = add_products<BITS, MR>(panel, rows, at, whole);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      const Floats row_scale = as_floats(fill_from(rows[r], offsetof(RowGroup, scale)));
      for (int v = 0; v < 2; v++)
        totals[r][v] = fused(from_integers(whole[r][v]), scale[v] * row_scale, totals[r][v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) rows[r] += step;
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++) {
    store(sums + r * PANEL, totals[r][0]);
    store(sums + r * PANEL + LANES, totals[r][1]);
  }
}

using IntegerProduct = void (*)(const std::int8_t*, Index, const Unit*, const Matrix&, float*);

template <int BITS, bool BLOCKED>
inline IntegerProduct product_of_rows(Index rows) {
  switch (rows) {
#define CASE(MR) \
  case MR:       \
    return integer_product<BITS, BLOCKED, MR <= INTEGER_ROWS ? MR : INTEGER_ROWS>;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#undef CASE
    default:
      return integer_product<BITS, BLOCKED, INTEGER_ROWS>;
  }
}

template <bool BLOCKED>
inline IntegerProduct product_of_bits(Index bits, Index rows) {
  switch (bits) {
    case 4:
      return product_of_rows<4, BLOCKED>(rows);
    case 5:
      return product_of_rows<5, BLOCKED>(rows);
    case 6:
      return product_of_rows<6, BLOCKED>(rows);
    default:
      return product_of_rows<8, BLOCKED>(rows);
  }
}

inline IntegerProduct product_of(const Matrix& matrix, Index rows) {
  return matrix.blocked == 0 ? product_of_bits<false>(matrix.bits, rows) : product_of_bits<true>(matrix.bits, rows);
}

// 32-bit units of one panel.
inline Index integer_panel_size(const Matrix& matrix) {
  const Index kinds = matrix.offset == SYMMETRIC ? 1 : 2, weights = matrix.group * matrix.bits / 32 * PANEL;
  if (matrix.blocked == 0) return matrix.units * (kinds * PANEL / 2 + weights);
  return matrix.units / matrix.blocked * kinds * PANEL / 2 + matrix.units * (kinds * PANEL / 4 + weights);
}

// Any number of quantized rows, in blocks of nearly equal size; `finish(row, left, right)` gets each row's sums.
template <typename Finish>
inline void rows_times_integers(const std::int8_t* rows, Index count, const Unit* panel, const Matrix& matrix,
                                Finish finish) {
  const Index stride = quantized_size(matrix), blocks = (count + INTEGER_ROWS - 1) / INTEGER_ROWS;
  alignas(64) float sums[INTEGER_ROWS * PANEL];
  for (Index block = 0; block < blocks; block++) {
    const Range own = share(count, static_cast<int>(block), static_cast<int>(blocks));
    const Index size = own.end - own.begin;
    product_of(matrix, size)(rows + own.begin * stride, stride, panel, matrix, sums);
    for (Index r = 0; r < size; r++) finish(own.begin + r, load(sums + r * PANEL), load(sums + r * PANEL + LANES));
  }
}

}  // namespace turnout
