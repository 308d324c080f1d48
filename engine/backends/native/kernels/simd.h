// Vectors of LANES floats, and what the two number types (float, bfloat16) have in common: "units" of four bytes.
//
// A unit is one float or two neighbouring bfloat16. A dot product is a sum over units; the multiply-add of a unit is
// the only instruction in which the two types differ. How wide a vector is, and how it is loaded, stored and masked,
// stands in `lanes512.h` and `lanes256.h`; nothing else knows of instructions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "lanes512.h"
#else
#include "lanes256.h"
#endif

namespace turnout {

using Index = std::int64_t;
using Unit = std::uint32_t;

struct bf16 {
  std::uint16_t bits;
};

template <typename T>
constexpr int PER_UNIT = sizeof(Unit) / sizeof(T);

// How many lanes of a vector `count` elements fill.
inline int first_lanes(Index count) { return count >= LANES ? LANES : count > 0 ? static_cast<int>(count) : 0; }

// acc += sum over the unit of a * b, in every lane.
template <typename T>
inline Floats multiply_add(Floats acc, Units a, Units b) {
  if constexpr (sizeof(T) == sizeof(float))
    return fused(as_floats(a), as_floats(b), acc);
  else
    return multiply_add_halves(acc, a, b);
}

// The first lanes; the rest is 0. Nothing beyond them is read or written.
inline Floats load(const float* from) { return load_floats(from); }
inline Floats load(const float* from, int lanes) { return load_floats(from, lanes); }
inline Floats load(const bf16* from, int lanes) { return load_halves(&from->bits, lanes); }
inline void store(float* to, Floats value) { store_floats(to, value); }
inline void store(float* to, Floats value, int lanes) { store_floats(to, value, lanes); }
inline void store(bf16* to, Floats value, int lanes = LANES) { store_halves(&to->bits, value, lanes); }

// e^x to about 2 ulp; 0 below -87, so that exp(-inf) is 0. What is no number stays none: `larger` and `smaller` give
// their second operand then.
inline Floats exp(Floats x) {
  const Floats least = fill(-87.3f), inside = smaller(fill(88.3f), larger(least, x));
  const Floats n = rounded(inside * fill(1.44269504f));
  Floats r = fused(n, fill(-0.693359375f), inside);
  r = fused(n, fill(2.12194440e-4f), r);
  Floats p = fill(1.9875691500e-4f);
  p = fused(p, r, fill(1.3981999507e-3f));
  p = fused(p, r, fill(8.3334519073e-3f));
  p = fused(p, r, fill(4.1665795894e-2f));
  p = fused(p, r, fill(1.6666665459e-1f));
  p = fused(p, r, fill(5.0000001201e-1f));
  p = fused(p * r, r, r + fill(1.0f));
  return where_below(x, least, zero(), scaled(p, n));
}

// x * sigmoid(x).
inline Floats silu(Floats x) { return x / (fill(1.0f) + exp(zero() - x)); }

inline Floats tanh(Floats x) { return fill(1.0f) - fill(2.0f) / (exp(fill(2.0f) * x) + fill(1.0f)); }

}  // namespace turnout
