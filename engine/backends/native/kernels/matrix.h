// Products with a matrix packed into panels of PANEL columns, and the kernel they share with attention.
//
// Panel layout: [panels][units of K][PANEL columns] units; a row of a panel is two vectors. With 1 to ROWS rows of A,
// all sums stay in registers while a panel streams past once: that is what makes ROWS rows cost what 1 row costs as
// long as memory is the limit.
#pragma once

#include "integers.h"
#include "wide.h"

namespace turnout {

constexpr Index AHEAD = 64 * PANEL;  // how far ahead, in units, a panel is fetched
constexpr Index CHUNK = 20 * ROWS;  // rows whose A stays in the second-level cache while panels pass

// Where the sums of rows go: PANEL floats for each.
struct Sums {
  float* to;
  Index stride;
  bool added;  // to what is there

  Sums from(Index row) const { return {to + row * stride, stride, added}; }
};

// sums[MR, PANEL] += unit k of MR rows x a row of a panel. WIDE: A is bfloat16 made float, two floats for a unit.
template <typename T, bool WIDE, int MR>
inline void add_unit(Floats (&sums)[MR][2], const Unit* a, Index row_stride, Index k, const Unit* row) {
  const Units left = load_units(row), right = load_units(row + LANES);
  if constexpr (WIDE) {
    const auto add_halves = [&](Index half, Floats left_half, Floats right_half) {
#pragma GCC unroll 12
      for (int r = 0; r < MR; r++) {
        const Floats value = as_floats(fill_units(a[r * row_stride + 2 * k + half]));
        sums[r][0] = fused(value, left_half, sums[r][0]);
        sums[r][1] = fused(value, right_half, sums[r][1]);
      }
    };
    add_halves(0, low_halves(left), low_halves(right));
    add_halves(1, high_halves(left), high_halves(right));
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
      const Units value = fill_units(a[r * row_stride + k]);
      sums[r][0] = multiply_add<T>(sums[r][0], value, left);
      sums[r][1] = multiply_add<T>(sums[r][1], value, right);
    }
  }
}

// out[MR, PANEL] = A[MR rows, units] x panel[units, PANEL]. Compiled once for each MR, not for each use of the sums:
// that would be most of the time that the kernels take to compile.
template <typename T, bool WIDE, int MR>
[[gnu::noinline]] void product(const Unit* a, Index row_stride, const Unit* panel, Index units, const Sums& out) {
  constexpr int UNROLL = MR == 1 ? 4 : MR <= 3 ? 2 : 1;
  Floats sums[UNROLL][MR][2];
  for (int u = 0; u < UNROLL; u++)
    for (int r = 0; r < MR; r++) sums[u][r][0] = sums[u][r][1] = zero();
  Index k = 0;
  for (; k + UNROLL <= units; k += UNROLL) {
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++) {
      const Unit* row = panel + (k + u) * PANEL;
      _mm_prefetch(reinterpret_cast<const char*>(row + AHEAD), _MM_HINT_T1);
      if (PANEL * sizeof(Unit) > 64)  // a cache line
        _mm_prefetch(reinterpret_cast<const char*>(row + AHEAD + LANES), _MM_HINT_T1);
      add_unit<T, WIDE, MR>(sums[u], a, row_stride, k + u, row);
    }
  }
  for (; k < units; k++) add_unit<T, WIDE, MR>(sums[0], a, row_stride, k, panel + k * PANEL);
  for (int r = 0; r < MR; r++) {
    for (int u = 1; u < UNROLL; u++) {
      sums[0][r][0] = sums[0][r][0] + sums[u][r][0];
      sums[0][r][1] = sums[0][r][1] + sums[u][r][1];
    }
    float* to = out.to + r * out.stride;
    if (out.added) {
      sums[0][r][0] = load(to) + sums[0][r][0];
      sums[0][r][1] = load(to + LANES) + sums[0][r][1];
    }
    store(to, sums[0][r][0]);
    store(to + LANES, sums[0][r][1]);
  }
}

// Any number of rows, in blocks of nearly equal size.
template <typename T, bool WIDE>
inline void rows_times_panel(const Unit* a, Index row_stride, Index rows, const Unit* panel, Index units, Sums out) {
  const Index blocks = (rows + ROWS - 1) / ROWS;
  for (Index block = 0; block < blocks; block++) {
    const Range range = share(rows, static_cast<int>(block), static_cast<int>(blocks));
    const Unit* from = a + range.begin * row_stride;
    switch (range.end - range.begin) {
#define CASE(MR)                                                                                              \
  case MR:                                                                                                    \
    if constexpr (MR <= ROWS) product<T, WIDE, MR>(from, row_stride, panel, units, out.from(range.begin)); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
  }
}

// Any number of rows and of panels, `stride` units from one to the next.
template <typename T>
inline void rows_times_panels(const Unit* a, Index row_stride, Index rows, const Unit* panels, Index stride,
                              Index count, Index units, Sums out) {
  if constexpr (WIDENS<T>) {
    WideRows& wide = WideRows::of_thread();
    wide.take(a, row_stride, rows, units);
    a = wide.rows();
    row_stride = 2 * units;
  }
  for (Index panel = 0; panel < count; panel++, panels += stride, out.to += PANEL)
    rows_times_panel<T, WIDENS<T>>(a, row_stride, rows, panels, units, out);
}

// Any number of rows, with `finish(row, left, right)` of each.
template <typename T, typename Finish>
inline void multiply_rows(const Unit* a, Index row_stride, Index rows, const Unit* panel, Index units, Finish finish) {
  alignas(64) float sums[ROWS * PANEL];
  const Index blocks = (rows + ROWS - 1) / ROWS;
  for (Index block = 0; block < blocks; block++) {
    const Range own = share(rows, static_cast<int>(block), static_cast<int>(blocks));
    rows_times_panel<T, WIDENS<T>>(a + own.begin * row_stride, row_stride, own.end - own.begin, panel, units,
                                   {sums, PANEL, false});
    const float* row_sums = sums;
    for (Index row = own.begin; row < own.end; row++, row_sums += PANEL)
      finish(row, load(row_sums), load(row_sums + LANES));
  }
}

// Every (chunk of rows, panel) once, shared between the workers; `finish(row, panel, left, right)`, bias added. Rows for
// a matrix of integers are quantized first, for all workers; those of bfloat16 are made float by each, see `wide.h`.
template <typename T, typename Finish>
inline void multiply(const Worker& worker, const T* a, Index row_stride, Index rows, const Matrix& matrix,
                     Finish finish) {
  const Index panels = num_panels(matrix.columns), chunks = (rows + CHUNK - 1) / CHUNK;
  const Range mine = worker.share(panels * chunks);
  const Index quantized = quantized_size(matrix);
  if (matrix.bits > 0) {
    const Range own = worker.share(rows);
    for (Index row = own.begin; row < own.end; row++)
      quantize_row(a + row * row_stride, matrix, worker.quantized + row * quantized);
    worker.barrier();
  }
  [[maybe_unused]] WideRows& wide = WideRows::of_thread();
  [[maybe_unused]] Index widened = -1;  // the chunk whose rows `wide` holds
  for (Index piece = mine.begin; piece < mine.end; piece++) {
    const Index panel = piece % panels;
    const Range range = share(rows, static_cast<int>(piece / panels), static_cast<int>(chunks));
    Floats left_bias = zero(), right_bias = left_bias;
    if (matrix.bias != nullptr) {
      const float* bias = matrix.bias + panel * PANEL;
      left_bias = load(bias, first_lanes(matrix.columns - panel * PANEL));
      right_bias = load(bias + LANES, first_lanes(matrix.columns - panel * PANEL - LANES));
    }
    const auto biased = [&](Index row, Floats left, Floats right) {
      finish(range.begin + row, panel, left + left_bias, right + right_bias);
    };
    if (matrix.bits > 0) {
      rows_times_integers(worker.quantized + range.begin * quantized, range.end - range.begin,
                          matrix.panels + panel * integer_panel_size(matrix), matrix, biased);
      continue;
    }
    const Unit* from = reinterpret_cast<const Unit*>(a + range.begin * row_stride);
    const Unit* weights = matrix.panels + panel * matrix.units * PANEL;
    const Index count = range.end - range.begin;
    Index from_stride = row_stride / PER_UNIT<T>;
    if constexpr (WIDENS<T>) {
      if (widened != range.begin) wide.take(from, from_stride, count, matrix.units);
      widened = range.begin;
      from = wide.rows();
      from_stride = 2 * matrix.units;
    }
    multiply_rows<T>(from, from_stride, count, weights, matrix.units, biased);
  }
}

// The first `columns` of a panel's.
template <typename Out>
inline void store_panel(Out* to, Floats left, Floats right, Index columns) {
  store(to, left, first_lanes(columns));
  if (columns > LANES) store(to + LANES, right, first_lanes(columns - LANES));
}

// out[rows, all columns] = a x matrix and those after it.
template <typename T, typename Out>
inline void multiply_into(const Worker& worker, const T* a, Index row_stride, Index rows, const Matrix& matrix,
                          Out* out, Index out_stride) {
  for (const Matrix* part = &matrix; part != nullptr; out += part->columns, part = part->next) {
    if (part != &matrix) worker.barrier();  // before rows are quantized anew
    multiply(worker, a, row_stride, rows, *part, [&](Index row, Index panel, Floats left, Floats right) {
      store_panel(out + row * out_stride + panel * PANEL, left, right, part->columns - panel * PANEL);
    });
  }
}

// sum[rows, columns] += a x matrix.
template <typename T>
inline void multiply_onto(const Worker& worker, const T* a, Index row_stride, Index rows, const Matrix& matrix,
                          float* sum, Index sum_stride) {
  multiply(worker, a, row_stride, rows, matrix, [&](Index row, Index panel, Floats left, Floats right) {
    float* to = sum + row * sum_stride + panel * PANEL;
    const Index columns = matrix.columns - panel * PANEL;
    const int first = first_lanes(columns);
    store(to, load(to, first) + left, first);
    if (columns > LANES) {
      const int second = first_lanes(columns - LANES);
      store(to + LANES, load(to + LANES, second) + right, second);
    }
  });
}

// out[rows, out_width] = silu(gate) * up, of a matrix each.
template <typename T>
inline void multiply_gated_apart(const Worker& worker, const T* a, Index row_stride, Index rows, const Matrix& gate,
                                 const Matrix& up, T* out, Index out_width) {
  multiply(worker, a, row_stride, rows, gate, [&](Index row, Index panel, Floats left, Floats right) {
    store_panel(out + row * out_width + panel * PANEL, silu(left), silu(right), out_width - panel * PANEL);
  });
  worker.barrier();
  multiply(worker, a, row_stride, rows, up, [&](Index row, Index panel, Floats left, Floats right) {
    T* to = out + row * out_width + panel * PANEL;
    const Index columns = out_width - panel * PANEL;
    const Floats first = load(to, first_lanes(columns));
    const Floats second = columns > LANES ? load(to + LANES, first_lanes(columns - LANES)) : zero();
    store_panel(to, first * left, second * right, columns);
  });
}

// out[rows, out_width] = silu(gate) * up; every panel holds LANES columns of gate and the same of up, unless they are
// two matrices.
template <typename T>
inline void multiply_gated(const Worker& worker, const T* a, Index row_stride, Index rows, const Matrix& matrix, T* out,
                           Index out_width) {
  if (matrix.next != nullptr)
    return multiply_gated_apart(worker, a, row_stride, rows, matrix, *matrix.next, out, out_width);
  multiply(worker, a, row_stride, rows, matrix, [&](Index row, Index panel, Floats gate, Floats up) {
    const Index column = panel * LANES;
    store(out + row * out_width + column, silu(gate) * up, first_lanes(out_width - column));
  });
}

}  // namespace turnout
