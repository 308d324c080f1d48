// A linear layer's weight, packed into panels of PANEL columns: numbers (`matrix.h`) or integers (`integers.h`).
#pragma once

#include "team.h"

namespace turnout {

constexpr int PANEL = 2 * LANES;

// What is taken from integers before they are scaled: w = scale * (q - zero), with one zero for all (8 of 4 bits, 16 of
// 5, 32 of 6, 0 of 8) or one for each group; or w = scale * q + minimum.
enum Offset : Index { SYMMETRIC = 0, ZEROS = 1, MINIMUMS = 2 };

// `columns` may end inside the last panel; K is padded to whole units.
struct Matrix {
  const Unit* panels;
  const float* bias;     // [columns] or null
  Index units, columns;  // units: of numbers; of integers, their groups
  Index bits;            // 0: numbers of the activations' type; 4, 5, 6 or 8: integers
  Index width;           // of integers: K without padding
  Index group;           // of integers: how many of K share a scale, a multiple of `step_of`
  Index offset;          // of integers: see `Offset`
  Index blocked;         // of integers: groups of a super-block, see `integers.h`; 0: there are none
  const std::int32_t* order;  // of integers: which input each of K is; null: they are in their order
  const Matrix* next;    // the columns after these, over the same rows, or null
};

// Columns of a matrix and of those after it.
inline Index all_columns(const Matrix& matrix) {
  Index columns = 0;
  for (const Matrix* part = &matrix; part != nullptr; part = part->next) columns += part->columns;
  return columns;
}

inline Index num_panels(Index columns) { return (columns + PANEL - 1) / PANEL; }

}  // namespace turnout
