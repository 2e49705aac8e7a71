// Vectors of bytes and of 16-bit halves, and what taking elements apart into planes needs of them. The portable bodies
// compute the same bits as the intrinsics.
#pragma once

#include "elements.h"

namespace fl::FL_ISA {

constexpr int kVectorBytes = 4 * kLanes;

typedef uint8_t vb __attribute__((vector_size(kVectorBytes)));
typedef uint16_t vh __attribute__((vector_size(kVectorBytes)));

FL_INLINE vb load_vb(const uint8_t *p) {
  typedef vb unaligned __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const unaligned *>(p);
}
FL_INLINE vh load_vh(const uint16_t *p) {
  typedef vh unaligned __attribute__((aligned(2), may_alias));
  return *reinterpret_cast<const unaligned *>(p);
}
FL_INLINE vb broadcast_byte(int v) { return uint8_t(v) - vb{}; }

// The halves of a, then those of b, all below 256, as bytes.
FL_INLINE vb pack_halves(vh a, vh b) {
#if defined(FL_AVX512)
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return (vb)_mm512_permutexvar_epi64(order, _mm512_packus_epi16((__m512i)a, (__m512i)b));
#elif defined(FL_AVX2)
  return (vb)_mm256_permute4x64_epi64(_mm256_packus_epi16((__m256i)a, (__m256i)b), 0xd8);
#elif defined(FL_SSE2)
  return (vb)_mm_packus_epi16((__m128i)a, (__m128i)b);
#else
  vb v;
  for (int i = 0; i < kVectorBytes; ++i) v[i] = uint8_t(i < 2 * kLanes ? a[i] : b[i - 2 * kLanes]);
  return v;
#endif
}

// The inverse.
FL_INLINE void unpack_halves(vb v, vh &a, vh &b) {
#if defined(FL_AVX512)
  a = (vh)_mm512_cvtepu8_epi16(_mm512_castsi512_si256((__m512i)v));
  b = (vh)_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64((__m512i)v, 1));
#elif defined(FL_AVX2)
  a = (vh)_mm256_cvtepu8_epi16(_mm256_castsi256_si128((__m256i)v));
  b = (vh)_mm256_cvtepu8_epi16(_mm256_extracti128_si256((__m256i)v, 1));
#elif defined(FL_SSE2)
  a = (vh)_mm_unpacklo_epi8((__m128i)v, _mm_setzero_si128());
  b = (vh)_mm_unpackhi_epi8((__m128i)v, _mm_setzero_si128());
#else
  for (int i = 0; i < 2 * kLanes; ++i) {
    a[i] = v[i];
    b[i] = v[i + 2 * kLanes];
  }
#endif
}

// Bit i: bit kBit of byte i.
template <int kBit>
FL_INLINE uint64_t plane_of(vb v) {
#if defined(FL_AVX512)
  return _mm512_test_epi8_mask((__m512i)v, _mm512_set1_epi8(1 << kBit));
#elif defined(FL_AVX2)
  return uint32_t(_mm256_movemask_epi8(_mm256_slli_epi16((__m256i)v, 7 - kBit)));
#elif defined(FL_SSE2)
  return uint32_t(_mm_movemask_epi8(_mm_slli_epi16((__m128i)v, 7 - kBit)));
#else
  uint64_t plane = 0;
  for (int i = 0; i < kVectorBytes; ++i) plane |= uint64_t(v[i] >> kBit & 1) << i;
  return plane;
#endif
}

// Byte i is 2^kBit where bit i of the plane is set, else 0; the plane has kVectorBytes bits.
template <int kBit>
FL_INLINE vb spread(uint64_t plane) {
#if defined(FL_AVX512)
  return (vb)_mm512_maskz_set1_epi8(plane, 1 << kBit);
#elif defined(FL_AVX2)
  const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bits = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(int(plane)), which);
  return (vb)_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits) & broadcast_byte(1 << kBit);
#elif defined(FL_SSE2)
  const __m128i bits = _mm_set1_epi64x(int64_t(0x8040201008040201));
  __m128i bytes = _mm_cvtsi32_si128(int(plane));
  bytes = _mm_unpacklo_epi8(bytes, bytes);
  bytes = _mm_unpacklo_epi16(bytes, bytes);
  bytes = _mm_unpacklo_epi32(bytes, bytes);
  return (vb)_mm_cmpeq_epi8(_mm_and_si128(bytes, bits), bits) & broadcast_byte(1 << kBit);
#else
  vb v;
  for (int i = 0; i < kVectorBytes; ++i) v[i] = uint8_t((plane >> i & 1) << kBit);
  return v;
#endif
}

// Byte i becomes table[v[i]]; v < 8.
FL_INLINE vb look_up(const uint8_t (&table)[8], vb v) {
#if defined(FL_AVX512)
  int64_t entries;
  __builtin_memcpy(&entries, table, sizeof entries);
  return (vb)_mm512_shuffle_epi8(_mm512_set1_epi64(entries), (__m512i)v);
#elif defined(FL_AVX2)
  int64_t entries;
  __builtin_memcpy(&entries, table, sizeof entries);
  return (vb)_mm256_shuffle_epi8(_mm256_set1_epi64x(entries), (__m256i)v);
#else
  vb found{};
  for (int i = 0; i < 8; ++i) found |= (vb)(v == broadcast_byte(i)) & broadcast_byte(table[i]);
  return found;
#endif
}

}  // namespace fl::FL_ISA
