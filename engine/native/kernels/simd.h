// Vectors of 16 floats, and what the two number types (float, bfloat16) have in common: "units" of four bytes.
//
// A unit is one float or two neighbouring bfloat16. A dot product is a sum over units; the multiply-add of a unit is
// the only instruction in which the two types differ.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace turnout {

using Index = std::int64_t;
using Unit = std::uint32_t;

struct bf16 {
  std::uint16_t bits;
};

constexpr int LANES = 16;

template <typename T>
constexpr int PER_UNIT = sizeof(Unit) / sizeof(T);

inline __mmask16 first_lanes(Index count) {
  return count >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1);
}

// acc += sum over the unit of a * b, in every lane.
template <typename T>
inline __m512 multiply_add(__m512 acc, __m512i a, __m512i b);

template <>
inline __m512 multiply_add<float>(__m512 acc, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
}

template <>
inline __m512 multiply_add<bf16>(__m512 acc, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                        _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                         _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
#endif
}

template <typename T>
inline __m512 load(const T* from, __mmask16 mask = 0xFFFF);

template <>
inline __m512 load<float>(const float* from, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, from);
}

template <>
inline __m512 load<bf16>(const bf16* from, __mmask16 mask) {
  const __m256i half = _mm256_maskz_loadu_epi16(mask, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Round to nearest, ties to even, as torch does; a NaN stays a NaN.
inline __m256i to_bf16(__m512 value) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(value);
#else
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline void store(float* to, __m512 value, __mmask16 mask = 0xFFFF) { _mm512_mask_storeu_ps(to, mask, value); }

inline void store(bf16* to, __m512 value, __mmask16 mask = 0xFFFF) {
  _mm256_mask_storeu_epi16(to, mask, to_bf16(value));
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// e^x to about 2 ulp; 0 below -87, so that exp(-inf) is 0.
inline __m512 exp(__m512 x) {
  const __m512 lowest = _mm512_set1_ps(-87.3f), highest = _mm512_set1_ps(88.7f);
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, lowest, _CMP_LT_OQ);
  x = _mm512_min_ps(_mm512_max_ps(x, lowest), highest);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(static_cast<__mmask16>(~tiny), p, n);
}

// x * sigmoid(x).
inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline __m512 tanh(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  return _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(exp(_mm512_mul_ps(two, x)), one)));
}

// 16 x 16 transpose of 4-byte units held in registers.
inline void transpose(__m512i rows[LANES]) {
  __m512i t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < LANES; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0xDD);
    }
  for (int j = 0; j < 8; j++) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xDD);
  }
}

}  // namespace turnout
