// bfloat16 made float once for many rows, where no instruction multiplies bfloat16: else every product of a row would
// take its numbers apart again, and their halves would not fit the registers. The sums are the same, bit for bit: the
// products are exact in float, and are added in the same order.
#pragma once

#include <vector>

#include "panels.h"

namespace turnout {

template <typename T>
constexpr bool WIDENS = sizeof(T) == sizeof(bf16) && !MULTIPLIES_HALVES;
constexpr Index WIDENED_ROWS = 2 * ROWS;  // from as many on it pays; all blocks of rows are then of more than 3

// Room of a thread for some rows and a panel; grown to the largest product it saw.
class Wide {
 public:
  static Wide& of_thread() {
    static thread_local Wide room;
    return room;
  }

  const Unit* rows() const { return reinterpret_cast<const Unit*>(rows_.data()); }
  const Unit* panel() const { return reinterpret_cast<const Unit*>(panel_.data()); }

  // [count] rows of [units], `stride` units apart -> [count][2 units] floats.
  void take_rows(const Unit* from, Index stride, Index count, Index units) {
    reserve(rows_, count * 2 * units);
    for (Index row = 0; row < count; row++) {
      const bf16* halves = reinterpret_cast<const bf16*>(from + row * stride);
      float* to = rows_.data() + row * 2 * units;
      for (Index i = 0; i < 2 * units; i += LANES) {
        const int lanes = first_lanes(2 * units - i);
        store(to + i, load(halves + i, lanes), lanes);
      }
    }
  }

  // [units][PANEL] -> [2 units][PANEL] floats.
  void take_panel(const Unit* from, Index units) {
    reserve(panel_, 2 * units * PANEL);
    float* to = panel_.data();
    for (Index unit = 0; unit < units; unit++, from += PANEL, to += 2 * PANEL)
      for (Index column = 0; column < PANEL; column += LANES) {
        const Units both = load_units(from + column);
        store(to + column, low_halves(both));
        store(to + PANEL + column, high_halves(both));
      }
  }

 private:
  std::vector<float> rows_, panel_;

  static void reserve(std::vector<float>& room, Index size) {
    if (static_cast<Index>(room.size()) < size) room.resize(size);
  }
};

}  // namespace turnout
