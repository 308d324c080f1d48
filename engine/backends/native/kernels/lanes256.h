// Vectors of 8 floats in AVX2 with FMA. The same names stand in `lanes512.h` for 16 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace turnout {

constexpr int LANES = 8;
constexpr int ROWS = 6;  // of a product whose sums, two vectors each, stay in the 16 registers
constexpr int INTEGER_ROWS = 4;  // the same with integers

using Floats = __m256;
using Units = __m256i;

// All bits set in the first lanes.
inline __m256i lane_mask(int lanes) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats fill(float value) { return _mm256_set1_ps(value); }
inline float first_of(Floats x) { return _mm256_cvtss_f32(x); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }  // a b + c
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline bool any_above(Floats a, Floats b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }

inline float sum_of(Floats x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest_of(Floats x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// p * 2^n, for whole n from -126 to 127.
inline Floats scaled(Floats p, Floats n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

// `x` in the first lanes; in lanes whose bit is set; in lanes where a < b: `otherwise` in the rest.
inline Floats keep_first(int lanes, Floats x, Floats otherwise) {
  return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(lane_mask(lanes)));
}
inline Floats keep_bits(std::uint64_t bits, Floats x, Floats otherwise) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xFF)), lane);
  return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}
inline Floats where_below(Floats a, Floats b, Floats x, Floats otherwise) {
  return _mm256_blendv_ps(otherwise, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

inline Units no_units() { return _mm256_setzero_si256(); }
inline Units fill_units(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
inline Units load_units(const std::uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Units load_units(const std::uint32_t* from, int lanes) {
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(from), lane_mask(lanes));
}
inline void store_units(std::uint32_t* to, Units value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }

inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
inline Floats load_floats(const float* from, int lanes) { return _mm256_maskload_ps(from, lane_mask(lanes)); }
inline void store_floats(float* to, Floats value) { _mm256_storeu_ps(to, value); }
inline void store_floats(float* to, Floats value, int lanes) { _mm256_maskstore_ps(to, lane_mask(lanes), value); }

inline Floats as_floats(Units x) { return _mm256_castsi256_ps(x); }
// Both halves of every unit, as bfloat16 made wider.
inline Floats low_halves(Units x) { return as_floats(_mm256_slli_epi32(x, 16)); }
inline Floats high_halves(Units x) { return as_floats(_mm256_and_si256(x, fill_units(0xFFFF0000u))); }

// acc += sum over the unit's two bfloat16 of a * b.
constexpr bool MULTIPLIES_HALVES = false;  // in one instruction
inline Floats multiply_add_halves(Floats acc, Units a, Units b) {
  return fused(high_halves(a), high_halves(b), fused(low_halves(a), low_halves(b), acc));
}

// 8 numbers of 16 bits, each in the low half of a unit; what is not among the first is 0. There are no masked loads
// of 16 bits, and nothing beyond them may be touched.
inline Units load_short(const std::uint16_t* from, int lanes) {
  __m128i half;
  if (lanes == LANES) {
    half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  } else {
    alignas(16) std::uint16_t kept[LANES] = {};
    std::memcpy(kept, from, lanes * sizeof(std::uint16_t));
    half = _mm_load_si128(reinterpret_cast<const __m128i*>(kept));
  }
  return _mm256_cvtepu16_epi32(half);
}

inline Floats load_halves(const std::uint16_t* from, int lanes) { return low_halves(load_short(from, lanes)); }

// Rounded to nearest, ties to even, as torch does; a NaN stays a NaN.
inline void store_halves(std::uint16_t* to, Floats value, int lanes) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  near = _mm256_srli_epi32(_mm256_blendv_epi8(near, _mm256_set1_epi32(0x7FC00000), nan), 16);
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1));
  if (lanes == LANES) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
  } else {
    alignas(16) std::uint16_t kept[LANES];
    _mm_store_si128(reinterpret_cast<__m128i*>(kept), half);
    std::memcpy(to, kept, lanes * sizeof(std::uint16_t));
  }
}

// Two rows of bfloat16 in turns: 2 * LANES units, each an element of `even` and below it, in the high half, of `odd`;
// elements from `columns` on, of `odd` from `odd_columns` on, are 0.
inline void interleave(const std::uint16_t* even, int columns, const std::uint16_t* odd, int odd_columns,
                       std::uint32_t* to) {
  for (int start = 0; start < 2 * LANES; start += LANES) {
    const auto part = [start](const std::uint16_t* row, int count) {
      const int lanes = count - start >= LANES ? LANES : count > start ? count - start : 0;
      return load_short(row + start, lanes);
    };
    store_units(to + start, _mm256_or_si256(part(even, columns), _mm256_slli_epi32(part(odd, odd_columns), 16)));
  }
}

inline Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Floats load_small(const std::uint16_t* from) {  // float16
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Whole numbers of 32 bits; rounded to nearest, ties to even.
inline Units to_integers(Floats x) { return _mm256_cvtps_epi32(x); }
inline Floats from_integers(Units x) { return _mm256_cvtepi32_ps(x); }
inline Units add_integers(Units a, Units b) { return _mm256_add_epi32(a, b); }
inline std::int32_t sum_of_integers(Units x) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
inline void store_bytes(std::int8_t* to, Units x) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}
inline void store_bytes(std::int8_t* to, Units x, int lanes) {
  if (lanes == LANES) return store_bytes(to, x);
  std::int8_t kept[LANES];
  store_bytes(kept, x);
  std::memcpy(to, kept, lanes);
}

// Signed bytes as floats: the first lanes, the rest is 0; one byte of every unit.
inline Floats load_bytes(const std::int8_t* from, int lanes) {
  std::int64_t kept = 0;
  if (lanes == LANES)
    std::memcpy(&kept, from, sizeof(kept));
  else
    std::memcpy(&kept, from, lanes);
  return from_integers(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(kept)));
}
template <int BYTE>
inline Floats byte_of(Units x) {
  return from_integers(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * BYTE), 24));
}

// LANES columns of four rows of bytes, the first lanes of them: a unit for each column.
inline Units columns_of(const std::int8_t* const rows[4], int lanes) {
  std::int64_t parts[4] = {};
  for (int row = 0; row < 4; row++)
    if (lanes == LANES)
      std::memcpy(&parts[row], rows[row], sizeof(std::int64_t));
    else
      std::memcpy(&parts[row], rows[row], lanes);
  const __m256i all = _mm256_setr_epi64x(parts[0], parts[1], parts[2], parts[3]);
  const __m256i fours = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m128i turned = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(all, fours), _mm256_broadcastsi128_si256(turned));
}

// Digits to the base 128: of numbers with signs the upper one, rounded, and what it leaves; of others.
inline Units near_upper_digit(Units x) { return _mm256_srai_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(64)), 7); }
inline Units without_upper_digit(Units x, Units upper) { return _mm256_sub_epi32(x, _mm256_slli_epi32(upper, 7)); }
inline Units upper_digit(Units x) { return _mm256_srli_epi32(x, 7); }
inline Units lower_digit(Units x) { return _mm256_and_si256(x, _mm256_set1_epi32(127)); }

// The halves of every byte.
inline Units low_nibbles(Units x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x0F)); }
inline Units high_nibbles(Units x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }

// What is in `mask` of every byte of x, moved up by `places` (down where that is negative); and added to `low`, which
// lacks these bits.
inline Units with_bits(Units low, Units x, int places, int mask) {
  const Units moved = places < 0 ? _mm256_srli_epi16(x, -places) : _mm256_slli_epi16(x, places);
  return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask))));
}

// Sums of four products in every lane; see `lanes512.h`.
#ifdef __AVXVNNI__
constexpr bool DOTS_ARE_WHOLE = true;
constexpr int BYTES_TAKEN = 128;
inline Units dot_halves(Units sums, Units weights, Units row) { return _mm256_dpbusd_avx_epi32(sums, weights, row); }
inline Units dot_side(Units weights) { return _mm256_xor_si256(weights, _mm256_set1_epi8(-128)); }
inline Units dot_bytes(Units sums, Units weights, Units row) { return _mm256_dpbusd_avx_epi32(sums, weights, row); }
inline Units whole_dots(Units sums) { return sums; }
inline Units dot_small(Units sums, Units small, Units bytes) { return _mm256_dpbusd_avx_epi32(sums, small, bytes); }
#else
constexpr bool DOTS_ARE_WHOLE = false;
constexpr int BYTES_TAKEN = 0;
inline Units whole_dots(Units sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
inline Units dot_halves(Units sums, Units weights, Units row) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, row));
}
inline Units dot_side(Units weights) { return weights; }
inline Units dot_small(Units sums, Units small, Units bytes) {
  return _mm256_add_epi32(sums, whole_dots(_mm256_maddubs_epi16(small, bytes)));
}
inline Units dot_bytes(Units sums, Units weights, Units row) {
  const Units products = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(row, weights));
  return _mm256_add_epi32(sums, whole_dots(products));
}
#endif

// 8 x 8 transpose of units.
inline void transpose(Units rows[LANES]) {
  __m256i t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    rows[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; j++) t[j] = rows[j], t[j + 4] = rows[j + 4];
  for (int j = 0; j < 4; j++) {
    rows[j] = _mm256_permute2x128_si256(t[j], t[j + 4], 0x20);
    rows[j + 4] = _mm256_permute2x128_si256(t[j], t[j + 4], 0x31);
  }
}

}  // namespace turnout
