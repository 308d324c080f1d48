// Rows of bfloat16 made float, where no instruction multiplies bfloat16: else every product with a panel would take
// their numbers apart again. A panel's numbers are taken apart as they stream past, for all rows of a block at once.
#pragma once

#include <vector>

#include "panels.h"

namespace turnout {

template <typename T>
constexpr bool WIDENS = sizeof(T) == sizeof(bf16) && !MULTIPLIES_HALVES;

// Room of a thread for some rows; grown to the largest product it saw.
class WideRows {
 public:
  static WideRows& of_thread() {
    static thread_local WideRows room;
    return room;
  }

  // [count][2 units] floats.
  const Unit* rows() const { return reinterpret_cast<const Unit*>(rows_.data()); }

  // [count] rows of [units], `stride` units apart.
  void take(const Unit* from, Index stride, Index count, Index units) {
    if (static_cast<Index>(rows_.size()) < count * 2 * units) rows_.resize(count * 2 * units);
    for (Index row = 0; row < count; row++) {
      const bf16* halves = reinterpret_cast<const bf16*>(from + row * stride);
      float* to = rows_.data() + row * 2 * units;
      for (Index i = 0; i < 2 * units; i += LANES) {
        const int lanes = first_lanes(2 * units - i);
        store(to + i, load(halves + i, lanes), lanes);
      }
    }
  }

 private:
  std::vector<float> rows_;
};

}  // namespace turnout
