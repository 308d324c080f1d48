// Products with weights of 4 or 8 bits whose groups share a scale, over rows quantized to 8 bits in the same groups.
//
// Panel layout: [panels][groups] of a float16 scale for each column, a float16 zero or minimum where there are any, and
// [units][PANEL columns] units. A unit of 8 bits is four of K; of 4 bits eight: the first four in the low halves of its
// bytes. Sums inside a group are integers, hence exact; groups are added in their order. So a row's result depends
// neither on the rows that are multiplied with it nor on the instructions.
#pragma once

#include "panels.h"

namespace turnout {

constexpr Index GROUP = 32;
constexpr Index AHEAD_BYTES = 8192;  // how far ahead a panel is fetched

// What precedes the `group` integers of one row's group.
struct RowGroup {
  float scale, scaled_sum;  // scaled_sum: scale * sum
  std::int32_t sum;
};

// Bytes of a quantized row.
inline Index quantized_size(const Matrix& matrix) {
  return matrix.bits == 0 ? 0 : matrix.units * (matrix.group + static_cast<Index>(sizeof(RowGroup)));
}

// Round one row to 8 bits with a scale for each group; beyond `width` it is 0.
template <typename T>
inline void quantize_row(const T* from, Index width, Index group, std::int8_t* to) {
  for (Index start = 0; start < width; start += group) {
    const Index count = std::min(group, width - start);
    Floats largest = zero();
    for (Index i = 0; i < count; i += LANES)
      largest = larger(largest, magnitude(load(from + start + i, first_lanes(count - i))));
    const float most = largest_of(largest);
    const Floats factor = fill(most > 0 ? 127.0f / most : 0.0f);
    std::int8_t* integers = to + sizeof(RowGroup);
    Units sum = no_units();
    for (Index i = 0; i < group; i += LANES) {
      const Units near = to_integers(load(from + start + i, first_lanes(count - i)) * factor);
      sum = add_integers(sum, near);
      store_bytes(integers + i, near);
    }
    const float scale = most / 127.0f;
    const std::int32_t whole = sum_of_integers(sum);
    const RowGroup known{scale, scale * static_cast<float>(whole), whole};
    std::memcpy(to, &known, sizeof(known));
    to = integers + group;
  }
}

// Four bytes of a row, in every lane.
inline Units fill_quad(const std::int8_t* from) {
  std::uint32_t quad;
  std::memcpy(&quad, from, sizeof(quad));
  return fill_units(quad);
}

// Add the products of GROUP of K to the sums of MR rows; returns where the panel continues.
template <int BITS, int MR>
inline const Unit* add_products(const Unit* panel, const std::int8_t* const* rows, Index at, Units (&sums)[MR][2]) {
  Units parts[MR][2];
  for (int r = 0; r < MR; r++)
    for (int v = 0; v < 2; v++) parts[r][v] = DOTS_ARE_WHOLE ? sums[r][v] : no_units();
  constexpr int UNITS = GROUP * BITS / 32;
#pragma GCC unroll 8
  for (int u = 0; u < UNITS; u++) {
    const Unit* unit = panel + u * PANEL;
    _mm_prefetch(reinterpret_cast<const char*>(unit) + AHEAD_BYTES, _MM_HINT_T1);
    if (PANEL * sizeof(Unit) > 64)  // a cache line
      _mm_prefetch(reinterpret_cast<const char*>(unit + LANES) + AHEAD_BYTES, _MM_HINT_T1);
    const Units both[2] = {load_units(unit), load_units(unit + LANES)};
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
      if constexpr (BITS == 8) {
        const Units quad = fill_quad(rows[r] + at + 4 * u);
        for (int v = 0; v < 2; v++) sums[r][v] = dot_bytes(sums[r][v], both[v], quad);
      } else {
        const Units first = fill_quad(rows[r] + at + 8 * u), second = fill_quad(rows[r] + at + 8 * u + 4);
        for (int v = 0; v < 2; v++) {
          parts[r][v] = dot_halves(parts[r][v], low_nibbles(both[v]), first);
          parts[r][v] = dot_halves(parts[r][v], high_nibbles(both[v]), second);
        }
      }
    }
  }
  if constexpr (BITS == 4)
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < 2; v++)
        sums[r][v] = DOTS_ARE_WHOLE ? parts[r][v] : add_integers(sums[r][v], whole_dots(parts[r][v]));
  return panel + UNITS * PANEL;
}

// sums[MR, PANEL] = quantized rows x panel.
template <int BITS, int MR>
[[gnu::noinline]] void integer_product(const std::int8_t* first, Index stride, const Unit* panel, const Matrix& matrix,
                                       float* sums) {
  const Index kind = matrix.offset;
  const std::int32_t taken = BITS == 8 ? BYTES_TAKEN : kind == SYMMETRIC ? 8 : 0;
  const std::int8_t* rows[MR];
  Floats totals[MR][2];
  for (int r = 0; r < MR; r++) {
    rows[r] = first + r * stride;
    totals[r][0] = totals[r][1] = zero();
  }
  for (Index group = 0; group < matrix.units; group++) {
    const std::uint16_t* scales = reinterpret_cast<const std::uint16_t*>(panel);
    const Floats scale[2] = {load_small(scales), load_small(scales + LANES)};
    panel += PANEL / 2;
    Floats offset[2] = {zero(), zero()};
    if (kind != SYMMETRIC) {
      offset[0] = load_small(scales + PANEL);
      offset[1] = load_small(scales + PANEL + LANES);
      panel += PANEL / 2;
    }
    RowGroup known[MR];
    Units whole[MR][2];
    for (int r = 0; r < MR; r++) {
      std::memcpy(&known[r], rows[r], sizeof(RowGroup));
      rows[r] += sizeof(RowGroup);
      whole[r][0] = whole[r][1] = fill_units(static_cast<Unit>(-taken * known[r].sum));
    }
    for (Index at = 0; at < matrix.group; at += GROUP) panel = add_products<BITS, MR>(panel, rows, at, whole);
    for (int r = 0; r < MR; r++) {
      for (int v = 0; v < 2; v++) {
        Floats dot = from_integers(whole[r][v]);
        if (kind == ZEROS) dot = fused(offset[v], fill(-static_cast<float>(known[r].sum)), dot);
        totals[r][v] = fused(dot, scale[v] * fill(known[r].scale), totals[r][v]);
        if (kind == MINIMUMS) totals[r][v] = fused(offset[v], fill(known[r].scaled_sum), totals[r][v]);
      }
      rows[r] += matrix.group;
    }
  }
  for (int r = 0; r < MR; r++) {
    store(sums + r * PANEL, totals[r][0]);
    store(sums + r * PANEL + LANES, totals[r][1]);
  }
}

using IntegerProduct = void (*)(const std::int8_t*, Index, const Unit*, const Matrix&, float*);

template <int BITS>
inline IntegerProduct product_of_rows(Index rows) {
  switch (rows) {
#define CASE(MR) \
  case MR:       \
    return integer_product<BITS, MR>;
    CASE(1) CASE(2) CASE(4)
#undef CASE
    default:
      return integer_product<BITS, INTEGER_ROWS>;
  }
}

// 32-bit units of one panel.
inline Index integer_panel_size(const Matrix& matrix) {
  const Index halves = matrix.offset == SYMMETRIC ? 1 : 2;
  return matrix.units * (halves * PANEL / 2 + matrix.group * matrix.bits / 32 * PANEL);
}

// Any number of quantized rows, a power of two of them at once; `finish(row, left, right)` gets each row's sums.
template <typename Finish>
inline void rows_times_integers(const std::int8_t* rows, Index count, const Unit* panel, const Matrix& matrix,
                                Finish finish) {
  const Index stride = quantized_size(matrix);
  alignas(64) float sums[INTEGER_ROWS * PANEL];
  for (Index row = 0; row < count;) {
    Index size = INTEGER_ROWS;
    while (size > count - row) size /= 2;
    const IntegerProduct product = matrix.bits == 4 ? product_of_rows<4>(size) : product_of_rows<8>(size);
    product(rows + row * stride, stride, panel, matrix, sums);
    for (Index r = 0; r < size; r++) finish(row + r, load(sums + r * PANEL), load(sums + r * PANEL + LANES));
    row += size;
  }
}

}  // namespace turnout
