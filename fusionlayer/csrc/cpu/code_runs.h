// Runs of 32 codes of 2 or 3 bits, as core/code_words.h packs them, on vectors: in a part of k bits byte j of 4 k holds the
// codes j, j + 4 k, j + 8 k, .. Nothing outside the 8 or 12 bytes of a run is accessed.
#pragma once

#include "elements.h"
#include "int_group.h"

namespace fl::FL_ISA {

constexpr int kLowBits = 2;  // in the first part of a run; a third bit is in the second

template <int kBits>
constexpr int kRunBytes = kBlock * kBits / 8;

// The first part of a run, and the second one of three bits.
FL_INLINE int64_t low_part(const uint8_t *p) {
  int64_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return bits;
}
FL_INLINE int32_t top_part(const uint8_t *p) {
  int32_t bits;
  __builtin_memcpy(&bits, p + 8, sizeof bits);
  return bits;
}

// Writes the codes in the low bits of 32 lanes; what is above need not be zero.
template <int kBits>
FL_INLINE void store_run(uint8_t *p, const vi (&codes)[kVectors]) {
#if defined(FL_AVX512)
  // Ternary logic 0xca: bits of the second operand where the first one has them, else of the third.
  const __m512i both = (__m512i)join_nibbles(codes[0], codes[1]);
  const __m256i odd = _mm256_slli_epi32(_mm512_extracti64x4_epi64(both, 1), kLowBits);
  const __m256i low = _mm256_ternarylogic_epi32(_mm256_set1_epi32(0x33), _mm512_castsi512_si256(both), odd, 0xca);
  _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm256_cvtepi32_epi8(low));
  if constexpr (kBits == 3) {
    const __m512i places = _mm512_setr_epi32(-2, -2, -2, -2, -1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1);
    const __m512i bits = _mm512_rolv_epi32(_mm512_and_si512(both, _mm512_set1_epi32(0x44)), places);
    const __m256i half = _mm256_or_si256(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
    const __m128i top = _mm_or_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const int32_t word = _mm_cvtsi128_si32(_mm_cvtepi32_epi8(top));
    __builtin_memcpy(p + 8, &word, sizeof word);
  }
#else
  constexpr int kParts = 8 / kLanes;
  vi low[kParts]{}, top{};
  for (int j = 0; j < kVectors; ++j) {
    low[j % kParts] |= (codes[j] & 3) << j / kParts * kLowBits;
    if constexpr (kBits == 3) top |= (codes[j] >> kLowBits & 1) << j * kLanes / 4;
  }
#if defined(FL_AVX2)
  const auto lower = [](vi v) FL_LAMBDA { return _mm256_castsi256_si128((__m256i)v); };
  const auto upper = [](vi v) FL_LAMBDA { return _mm256_extracti128_si256((__m256i)v, 1); };
  const __m128i bits = _mm_or_si128(lower(top), _mm_slli_epi32(upper(top), 1));
  const __m128i words = _mm_packus_epi32(lower(low[0]), upper(low[0]));
  const __m128i bytes = _mm_packus_epi16(words, _mm_packus_epi32(bits, bits));
#elif defined(FL_SSE2)
  const __m128i words = _mm_packs_epi32((__m128i)low[0], (__m128i)low[1]);
  const __m128i bytes = _mm_packus_epi16(words, _mm_packs_epi32((__m128i)top, (__m128i)top));
#else
  uint8_t bytes[12];
  for (int i = 0; i < 12; ++i) bytes[i] = uint8_t(i < 8 ? low[i / 4][i % 4] : top[i % 4]);
#endif
  __builtin_memcpy(p, &bytes, kRunBytes<kBits>);
#endif
}

// The levels of a run, in half steps. Looking up takes the lowest four or three bits of a lane: the table repeats the levels,
// so that what is above a code does not matter.
template <int kBits>
FL_INLINE Block load_run(const uint8_t *p) {
  Block b;
#if defined(FL_AVX512)
  const __m512 levels = kBits == 3 ? _mm512_setr_ps(1, 3, 5, 7, -7, -5, -3, -1, 1, 3, 5, 7, -7, -5, -3, -1)
                                   : _mm512_setr_ps(1, 3, -3, -1, 1, 3, -3, -1, 1, 3, -3, -1, 1, 3, -3, -1);
  const __m512i low = _mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi64x(low_part(p))),
                                        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2));
  __m512i codes[2] = {low, _mm512_srli_epi32(low, 4)};
  if constexpr (kBits == 3) {
    const __m512i four = _mm512_set1_epi32(4);
    const __m512i top = _mm512_srlv_epi32(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi32(top_part(p))), 2),
                                          _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    codes[0] = _mm512_ternarylogic_epi32(four, top, codes[0], 0xca);
    codes[1] = _mm512_ternarylogic_epi32(four, _mm512_srli_epi32(top, 4), codes[1], 0xca);
  }
  for (int j = 0; j < kVectors; ++j) b.v[j] = _mm512_permutexvar_ps(codes[j], levels);
#elif defined(FL_AVX2)
  const __m256 levels =
      kBits == 3 ? _mm256_setr_ps(1, 3, 5, 7, -7, -5, -3, -1) : _mm256_setr_ps(1, 3, -3, -1, 1, 3, -3, -1);
  const vi low = (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(low_part(p)));
  vi top{};
  if constexpr (kBits == 3)
    top = (vi)_mm256_srlv_epi32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_set1_epi32(top_part(p))), 2),
                                _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
  for (int j = 0; j < kVectors; ++j) {
    vi codes = low >> j * kLowBits;
    if constexpr (kBits == 3) codes = (codes & 3) | (top >> 2 * j & 4);
    b.v[j] = _mm256_permutevar8x32_ps(levels, (__m256i)codes);
  }
#else
  constexpr int kSign = 1 << (kBits - 1), kMost = 2 * kSign - 1;
  vi low[2], top{};
#if defined(FL_SSE2)
  const __m128i zero = _mm_setzero_si128(), halves = _mm_unpacklo_epi8(_mm_cvtsi64_si128(low_part(p)), zero);
  low[0] = (vi)_mm_unpacklo_epi16(halves, zero);
  low[1] = (vi)_mm_unpackhi_epi16(halves, zero);
  if constexpr (kBits == 3) top = (vi)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(top_part(p)), zero), zero);
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes[3]{};
  __builtin_memcpy(bytes, p, kRunBytes<kBits>);
  for (int i = 0; i < 2; ++i) low[i] = __builtin_convertvector(bytes[i], vi);
  top = __builtin_convertvector(bytes[2], vi);
#endif
  for (int j = 0; j < kVectors; ++j) {
    vi code = low[j % 2] >> j / 2 * kLowBits & 3;
    if constexpr (kBits == 3) code |= (top >> j & 1) << kLowBits;
    b.v[j] = __builtin_convertvector(((code ^ kSign) << 1) - kMost, vf);
  }
#endif
  return b;
}

}  // namespace fl::FL_ISA
