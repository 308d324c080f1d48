// Vectors of 16 floats in AVX-512. The same names stand in `lanes256.h` for 8 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace turnout {

constexpr int LANES = 16;
constexpr int ROWS = 12;  // of a product whose sums, two vectors each, stay in the 32 registers
constexpr int INTEGER_ROWS = 5;  // the same with integers, whose sums inside a group stay as well

using Floats = __m512;
using Units = __m512i;

inline __mmask16 lane_mask(int lanes) { return static_cast<__mmask16>((1u << lanes) - 1); }

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats fill(float value) { return _mm512_set1_ps(value); }
inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline bool any_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

// p * 2^n, for whole n from -126 to 127.
inline Floats scaled(Floats p, Floats n) { return _mm512_scalef_ps(p, n); }

// `x` in the first lanes; in lanes whose bit is set; in lanes where a < b: `otherwise` in the rest.
inline Floats keep_first(int lanes, Floats x, Floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, lane_mask(lanes), x);
}
inline Floats keep_bits(std::uint64_t bits, Floats x, Floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, static_cast<__mmask16>(bits), x);
}
inline Floats where_below(Floats a, Floats b, Floats x, Floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}

inline Units no_units() { return _mm512_setzero_si512(); }
inline Units fill_units(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
inline Units load_units(const std::uint32_t* from) { return _mm512_loadu_si512(from); }
inline Units load_units(const std::uint32_t* from, int lanes) {
  return _mm512_maskz_loadu_epi32(lane_mask(lanes), from);
}
inline void store_units(std::uint32_t* to, Units value) { _mm512_storeu_si512(to, value); }

inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load_floats(const float* from, int lanes) { return _mm512_maskz_loadu_ps(lane_mask(lanes), from); }
inline void store_floats(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline void store_floats(float* to, Floats value, int lanes) { _mm512_mask_storeu_ps(to, lane_mask(lanes), value); }

inline Floats as_floats(Units x) { return _mm512_castsi512_ps(x); }
// Both halves of every unit, as bfloat16 made wider.
inline Floats low_halves(Units x) { return as_floats(_mm512_slli_epi32(x, 16)); }
inline Floats high_halves(Units x) { return as_floats(_mm512_and_si512(x, fill_units(0xFFFF0000u))); }

// acc += sum over the unit's two bfloat16 of a * b.
#ifdef __AVX512BF16__
constexpr bool MULTIPLIES_HALVES = true;  // in one instruction
inline Floats multiply_add_halves(Floats acc, Units a, Units b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool MULTIPLIES_HALVES = false;
inline Floats multiply_add_halves(Floats acc, Units a, Units b) {
  return fused(high_halves(a), high_halves(b), fused(low_halves(a), low_halves(b), acc));
}
#endif

inline Floats load_halves(const std::uint16_t* from, int lanes) {
  const __m256i half = _mm256_maskz_loadu_epi16(lane_mask(lanes), from);
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Rounded to nearest, ties to even, as torch does; a NaN stays a NaN.
inline void store_halves(std::uint16_t* to, Floats value, int lanes) {
#ifdef __AVX512BF16__
  const __m256i half = (__m256i)_mm512_cvtneps_pbh(value);
#else
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  near = _mm512_mask_mov_epi32(near, nan, _mm512_set1_epi32(0x7FC00000));
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
#endif
  _mm256_mask_storeu_epi16(to, lane_mask(lanes), half);
}

// Two rows of bfloat16 in turns: 2 * LANES units, each an element of `even` and below it, in the high half, of `odd`;
// elements from `columns` on, of `odd` from `odd_columns` on, are 0.
inline void interleave(const std::uint16_t* even, int columns, const std::uint16_t* odd, int odd_columns,
                       std::uint32_t* to) {
  alignas(64) static constexpr std::uint16_t LOW[2 * LANES] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,
                                                               37, 6, 38, 7, 39, 8,  40, 9,  41, 10, 42,
                                                               11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const auto mask = [](int count) { return static_cast<__mmask32>((1ull << count) - 1); };
  const __m512i left = _mm512_load_si512(LOW), right = _mm512_add_epi16(left, _mm512_set1_epi16(LANES));
  const __m512i a = _mm512_maskz_loadu_epi16(mask(columns), even), b = _mm512_maskz_loadu_epi16(mask(odd_columns), odd);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, left, b));
  _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi16(a, right, b));
}

inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Floats load_small(const std::uint16_t* from) {  // float16
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Whole numbers of 32 bits; rounded to nearest, ties to even.
inline Units to_integers(Floats x) { return _mm512_cvtps_epi32(x); }
// By GCC's operator: its header's _mm512_cvtepi32_ps names a vector that nothing sets, of which it then warns.
inline Floats from_integers(Units x) { return (Floats)__builtin_convertvector((__v16si)x, __v16sf); }
inline Units add_integers(Units a, Units b) { return _mm512_add_epi32(a, b); }
inline std::int32_t sum_of_integers(Units x) { return _mm512_reduce_add_epi32(x); }
inline void store_bytes(std::int8_t* to, Units x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}
inline void store_bytes(std::int8_t* to, Units x, int lanes) {
  _mm_mask_storeu_epi8(to, lane_mask(lanes), _mm512_cvtepi32_epi8(x));
}

// Signed bytes as floats: the first lanes, the rest is 0; one byte of every unit.
inline Floats load_bytes(const std::int8_t* from, int lanes) {
  return from_integers(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lane_mask(lanes), from)));
}
template <int BYTE>
inline Floats byte_of(Units x) {
  return from_integers(_mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * BYTE), 24));
}

// LANES columns of four rows of bytes, the first lanes of them: a unit for each column.
inline Units columns_of(const std::int8_t* const rows[4], int lanes) {
  const auto part = [lanes](const std::int8_t* row) { return _mm_maskz_loadu_epi8(lane_mask(lanes), row); };
  __m512i all = _mm512_castsi128_si512(part(rows[0]));
  all = _mm512_inserti32x4(all, part(rows[1]), 1);
  all = _mm512_inserti32x4(all, part(rows[2]), 2);
  all = _mm512_inserti32x4(all, part(rows[3]), 3);
  const __m512i fours = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i turned = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(fours, all), _mm512_broadcast_i32x4(turned));
}

// Digits to the base 128: of numbers with signs the upper one, rounded, and what it leaves; of others.
inline Units near_upper_digit(Units x) { return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7); }
inline Units without_upper_digit(Units x, Units upper) { return _mm512_sub_epi32(x, _mm512_slli_epi32(upper, 7)); }
inline Units upper_digit(Units x) { return _mm512_srli_epi32(x, 7); }
inline Units lower_digit(Units x) { return _mm512_and_si512(x, _mm512_set1_epi32(127)); }

// The halves of every byte.
inline Units low_nibbles(Units x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0F)); }
inline Units high_nibbles(Units x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

// What is in `mask` of every byte of x, moved up by `places` (down where that is negative); and added to `low`, which
// lacks these bits.
inline Units with_bits(Units low, Units x, int places, int mask) {
  const Units moved = places < 0 ? _mm512_srli_epi16(x, -places) : _mm512_slli_epi16(x, places);
  return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask))));
}

// Sums of four products in every lane. `dot_halves` takes 4-bit numbers, unsigned, times signed bytes; GROUP of them
// add up before `whole_dots` makes sums of 32 bits of them. `dot_bytes` takes signed bytes; its sums are too large by
// BYTES_TAKEN times the row's own. `dot_small` takes bytes from 0 to 127 times signed ones.
#ifdef __AVX512VNNI__
constexpr bool DOTS_ARE_WHOLE = true;
constexpr int BYTES_TAKEN = 128;
inline Units dot_halves(Units sums, Units weights, Units row) { return _mm512_dpbusd_epi32(sums, weights, row); }
inline Units dot_side(Units weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(-128)); }
inline Units dot_bytes(Units sums, Units weights, Units row) { return _mm512_dpbusd_epi32(sums, weights, row); }
inline Units whole_dots(Units sums) { return sums; }
inline Units dot_small(Units sums, Units small, Units bytes) { return _mm512_dpbusd_epi32(sums, small, bytes); }
#else
constexpr bool DOTS_ARE_WHOLE = false;
constexpr int BYTES_TAKEN = 0;
inline Units whole_dots(Units sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
inline Units dot_halves(Units sums, Units weights, Units row) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, row));
}
inline Units dot_side(Units weights) { return weights; }
inline Units dot_small(Units sums, Units small, Units bytes) {
  return _mm512_add_epi32(sums, whole_dots(_mm512_maddubs_epi16(small, bytes)));
}
inline Units dot_bytes(Units sums, Units weights, Units row) {
  const Units turned = _mm512_mask_sub_epi8(row, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), row);
  return _mm512_add_epi32(sums, whole_dots(_mm512_maddubs_epi16(_mm512_abs_epi8(weights), turned)));
}
#endif

// 16 x 16 transpose of units.
inline void transpose(Units rows[LANES]) {
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
