// Hadamard transforms of blocks of codes in integers, where the instruction set can multiply and add bytes and words. They are
// exact, as those of core/int_group.h are of codes, so stages may go in any order: those of neighbours widen bytes to words
// and words to 32 bits, the others are between registers.
#pragma once

#include "cpu/code_runs.h"

#if defined(FL_AVX512) || defined(FL_AVX2)
#define FL_CODE_ROTATION 1

namespace fl::FL_ISA {

#if defined(FL_AVX512)
typedef __m512i Wide;
#define FL_WIDE(operation) _mm512_##operation
#else
typedef __m256i Wide;
#define FL_WIDE(operation) _mm256_##operation
#endif

constexpr int kWideBlocks = int(sizeof(Wide)) / kBlock;  // blocks whose codes fill a register

// N blocks: four vectors for each register of codes, their lanes out of order.
template <int N>
constexpr int kRotatedVectors = 4 * ((N + kWideBlocks - 1) / kWideBlocks);

// The nibbles of 16 or 32 bytes as signed bytes: the low ones, behind them the high ones.
template <int N>
FL_INLINE void load_nibbles(const uint8_t *p, Wide (&codes)[kRotatedVectors<N> / 4]) {
  Wide nibbles[kRotatedVectors<N> / 4];
  if constexpr (N == 1) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
#if defined(FL_AVX512)
    nibbles[0] = _mm512_zextsi256_si512(both);
#else
    nibbles[0] = both;
#endif
  } else {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    const __m256i high = _mm256_srli_epi16(bytes, 4);
#if defined(FL_AVX512)
    nibbles[0] = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), high, 1);
#else
    nibbles[0] = bytes;
    nibbles[1] = high;
#endif
  }
  const Wide low = FL_WIDE(set1_epi8)(15), sign = FL_WIDE(set1_epi8)(8);
  for (int r = 0; r < kRotatedVectors<N> / 4; ++r) codes[r] = FL_WIDE(sub_epi8)((nibbles[r] & low) ^ sign, sign);
}

// Two halves of a register.
FL_INLINE Wide wide(__m256i first, __m256i second) {
#if defined(FL_AVX512)
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
#else
  (void)second;
  return first;
#endif
}

// load_run of N runs as signed bytes.
template <int kBits, int N>
FL_INLINE Wide load_run_bytes(const uint8_t *p) {
  const uint8_t *next = N == 2 ? p + kRunBytes<kBits> : p;
  const __m256i pairs = _mm256_setr_epi64x(0, 2, 4, 6), bits = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const Wide low = wide(_mm256_set1_epi64x(low_part(p)), _mm256_set1_epi64x(low_part(next)));
  Wide codes = FL_WIDE(srlv_epi64)(low, wide(pairs, pairs)) & FL_WIDE(set1_epi8)(3);
  if constexpr (kBits == 3) {
    const Wide top = wide(_mm256_set1_epi32(top_part(p)), _mm256_set1_epi32(top_part(next)));
    const Wide one = FL_WIDE(srlv_epi32)(top, wide(bits, bits)) & FL_WIDE(set1_epi8)(1);
    codes = codes | FL_WIDE(slli_epi32)(one, kLowBits);
  }
  const __m256i levels = _mm256_set1_epi64x(int64_t(kBits == 3 ? 0xfffdfbf907050301u : 0xfffd0301fffd0301u));
  return FL_WIDE(shuffle_epi8)(wide(levels, levels), codes);
}

template <int kBits, int N>
FL_INLINE void load_codes(const uint8_t *p, Wide (&codes)[kRotatedVectors<N> / 4]) {
  if constexpr (kBits == 4) {
    load_nibbles<N>(p, codes);
  } else if constexpr (between_integers(kBits)) {
    static_assert(N <= kWideBlocks);
    codes[0] = load_run_bytes<kBits, N>(p);
  } else {
#if defined(FL_AVX512)
    if constexpr (N == 1)
      codes[0] = _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    else
      codes[0] = _mm512_loadu_si512(p);
#else
    codes[0] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
#endif
  }
}

// The even and the odd 128-bit lanes of a, and behind them those of b.
FL_INLINE void split_lanes(Wide a, Wide b, Wide &even, Wide &odd) {
#if defined(FL_AVX512)
  even = _mm512_shuffle_i64x2(a, b, 0x88);
  odd = _mm512_shuffle_i64x2(a, b, 0xdd);
#else
  even = _mm256_permute2x128_si256(a, b, 0x20);
  odd = _mm256_permute2x128_si256(a, b, 0x31);
#endif
}

// Sums and differences of neighbours, then of what lies 8, 4, 16 and 2 elements apart. Words hold the first four: 2048 at most.
FL_INLINE void rotate_codes(Wide codes, vf *v) {
  // One factor of a product of bytes is unsigned: codes plus 128 have the same differences.
  const Wide ones = FL_WIDE(set1_epi8)(1), one_minus_one = FL_WIDE(set1_epi16)(int16_t(0xff01));
  const Wide biased = codes ^ FL_WIDE(set1_epi8)(-128);
  Wide sum = FL_WIDE(maddubs_epi16)(ones, codes), difference = FL_WIDE(maddubs_epi16)(biased, one_minus_one);
  const auto stage = [&](Wide a, Wide b) FL_LAMBDA {
    sum = FL_WIDE(add_epi16)(a, b);
    difference = FL_WIDE(sub_epi16)(a, b);
  };
  stage(FL_WIDE(unpacklo_epi32)(sum, difference), FL_WIDE(unpackhi_epi32)(sum, difference));
  stage(FL_WIDE(unpacklo_epi64)(sum, difference), FL_WIDE(unpackhi_epi64)(sum, difference));
  Wide even, odd;
  split_lanes(sum, difference, even, odd);
  stage(even, odd);
  const Wide both = FL_WIDE(set1_epi16)(1), first_minus_second = FL_WIDE(set1_epi32)(int32_t(0xffff0001));
  v[0] = FL_WIDE(cvtepi32_ps)(FL_WIDE(madd_epi16)(sum, both));
  v[1] = FL_WIDE(cvtepi32_ps)(FL_WIDE(madd_epi16)(sum, first_minus_second));
  v[2] = FL_WIDE(cvtepi32_ps)(FL_WIDE(madd_epi16)(difference, both));
  v[3] = FL_WIDE(cvtepi32_ps)(FL_WIDE(madd_epi16)(difference, first_minus_second));
}

// H32 of each of N blocks of codes that lie one behind the other, or of the low and the high nibbles of bytes: the vectors of
// register `r`.
template <int kBits, int N>
FL_INLINE void rotated_codes(const uint8_t *p, int r, vf *v) {
  Wide codes[kRotatedVectors<N> / 4];
  load_codes<kBits, N>(p, codes);
  rotate_codes(codes[r], v);
}

// The blocks of such vectors. Vectors 0 and 1, and 2 and 3, alternate by two lanes.
template <int N>
FL_INLINE void in_order(const vf (&v)[kRotatedVectors<N>], Block (&b)[N]) {
#if defined(FL_AVX512)
  for (int j = 0; j < 2; ++j) {
    const __m512d even = (__m512d)v[2 * j], odd = (__m512d)v[2 * j + 1];
    b[0].v[j] = (vf)_mm512_permutex2var_pd(even, _mm512_setr_epi64(0, 8, 4, 12, 1, 9, 5, 13), odd);
    if constexpr (N == 2)
      b[1].v[j] = (vf)_mm512_permutex2var_pd(even, _mm512_setr_epi64(2, 10, 6, 14, 3, 11, 7, 15), odd);
  }
#else
  for (int k = 0; k < N; ++k)
    for (int j = 0; j < 2; ++j) {
      const __m256d even = (__m256d)v[4 * k + 2 * j], odd = (__m256d)v[4 * k + 2 * j + 1];
      b[k].v[2 * j] = (vf)_mm256_unpacklo_pd(even, odd);
      b[k].v[2 * j + 1] = (vf)_mm256_unpackhi_pd(even, odd);
    }
#endif
}

#undef FL_WIDE

}  // namespace fl::FL_ISA

#endif
