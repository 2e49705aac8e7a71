// What vectors of 32-bit lanes exchange with narrower and wider numbers: bytes, half words and f64. Portable code writes a
// vector as a whole: one that is filled lane by lane is uninitialised to gcc 12.
#pragma once

#include "simd.h"

namespace fl::FL_ISA {

#if defined(FL_AVX512)
// Those of 32 lanes, in order.
FL_INLINE __m512i upper_halves(const vi (&v)[kVectors]) {
  const vu odd = (iota() * 4 + 1) | (iota() * 4 + 3) << 16;  // of the 64 halves of both
  return _mm512_permutex2var_epi16((__m512i)v[0], (__m512i)odd, (__m512i)v[1]);
}
#endif

// 16 bytes <-> 16 lanes of 32 bits ------------------------------------------------------------------------------------

// The low bytes of 16 lanes.
FL_INLINE void store_low_bytes(uint8_t *p, const vi (&v)[kQuad]) {
#if defined(FL_AVX512)
  store(p, _mm512_cvtepi32_epi8((__m512i)v[0]));
#elif defined(FL_AVX2)
  const vi low = broadcast(255);
  const __m256i halves = _mm256_packus_epi32((__m256i)(v[0] & low), (__m256i)(v[1] & low));
  const __m256i bytes = _mm256_packus_epi16(halves, halves);  // 32-bit units 0 2 0 2 | 1 3 1 3
  const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  store(p, _mm256_castsi256_si128(ordered));
#elif defined(FL_SSE2)
  const vi low = broadcast(255);
  const __m128i a = _mm_packs_epi32((__m128i)(v[0] & low), (__m128i)(v[1] & low));
  const __m128i b = _mm_packs_epi32((__m128i)(v[2] & low), (__m128i)(v[3] & low));
  store(p, _mm_packus_epi16(a, b));
#else
  for (int i = 0; i < 16; ++i) p[i] = uint8_t(v[i / kLanes][i % kLanes]);
#endif
}

// 16 lanes as signed bytes, limited to what these hold.
FL_INLINE void store_saturated_bytes(uint8_t *p, const vi (&v)[kQuad]) {
#if defined(FL_AVX512)
  store(p, _mm512_cvtsepi32_epi8((__m512i)v[0]));
#elif defined(FL_SSE2) && !defined(FL_AVX2)
  const __m128i a = _mm_packs_epi32((__m128i)v[0], (__m128i)v[1]), b = _mm_packs_epi32((__m128i)v[2], (__m128i)v[3]);
  store(p, _mm_packs_epi16(a, b));
#else
  vi limited[kQuad];
  for (int j = 0; j < kQuad; ++j) limited[j] = max(min(v[j], broadcast(127)), broadcast(-128));
  store_low_bytes(p, limited);
#endif
}

// The low nibbles of a, and those of b above them; what is above is not zero.
FL_INLINE vi join_nibbles(vi a, vi b) {
#if defined(FL_AVX512)
  return (vi)_mm512_ternarylogic_epi32((__m512i)broadcast(15), (__m512i)a, (__m512i)(b << 4), 0xca);
#else
  return (a & 15) | b << 4;
#endif
}

// The third bytes of 32 lanes, above their low halves.
FL_INLINE void store_third_bytes(uint8_t *p, const vi (&v)[kVectors]) {
#if defined(FL_AVX512)
  store(p, _mm512_cvtepi16_epi8(upper_halves(v)));
#else
  for (int i = 0; i < kVectors; i += kQuad) {
    vi bytes[kQuad];
    for (int j = 0; j < kQuad; ++j) bytes[j] = v[i + j] >> 16;
    store_low_bytes(p + i * kLanes, bytes);
  }
#endif
}

// The low nibbles of these bytes, and above them those of b.
FL_INLINE void store_third_nibbles(uint8_t *p, const vi (&a)[kVectors], const vi (&b)[kVectors]) {
#if defined(FL_AVX512)
  const __m512i high = _mm512_slli_epi16(upper_halves(b), 4), low = _mm512_set1_epi16(15);
  store(p, _mm512_cvtepi16_epi8(_mm512_ternarylogic_epi32(low, upper_halves(a), high, 0xca)));
#else
  for (int i = 0; i < kVectors; i += kQuad) {
    vi bytes[kQuad];
    for (int j = 0; j < kQuad; ++j) bytes[j] = (a[i + j] >> 16 & 15) | (b[i + j] >> 12 & 0xf0);
    store_low_bytes(p + i * kLanes, bytes);
  }
#endif
}

// 16 bytes as signed integers.
FL_INLINE void load_bytes(const uint8_t *p, vi (&v)[kQuad]) {
#if defined(FL_AVX512)
  v[0] = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(FL_AVX2)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  v[0] = (vi)_mm256_cvtepi8_epi32(bytes);
  v[1] = (vi)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes));
#elif defined(FL_SSE2)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  const __m128i low = _mm_unpacklo_epi8(bytes, bytes), high = _mm_unpackhi_epi8(bytes, bytes);
  v[0] = (vi)_mm_unpacklo_epi16(low, low) >> 24;
  v[1] = (vi)_mm_unpackhi_epi16(low, low) >> 24;
  v[2] = (vi)_mm_unpacklo_epi16(high, high) >> 24;
  v[3] = (vi)_mm_unpackhi_epi16(high, high) >> 24;
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  for (vi &lanes : v) {
    Bytes bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    lanes = __builtin_convertvector(bytes, vi);
    p += kLanes;
  }
#endif
}

// 32 half words <-> upper halves of 32 lanes of 32 bits ----------------------------------------------------------------

template <Store kStore>
FL_INLINE void store_high_halves(uint16_t *p, const vi (&v)[kVectors]) {
#if defined(FL_AVX512)
  store<kStore>(p, upper_halves(v));
#elif defined(FL_AVX2)
  for (int j = 0; j < 2; ++j) {
    const __m256i a = (__m256i)((vu)v[2 * j] >> 16), b = (__m256i)((vu)v[2 * j + 1] >> 16);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);  // it packs 64-bit units 0 2 1 3
    store<kStore>(p + 16 * j, halves);
  }
#elif defined(FL_SSE2)
  for (int j = 0; j < 4; ++j)
    store<kStore>(p + 8 * j, _mm_packs_epi32((__m128i)(v[2 * j] >> 16), (__m128i)(v[2 * j + 1] >> 16)));
#else
  for (int i = 0; i < kBlock; ++i) p[i] = uint16_t(v[i / kLanes][i % kLanes] >> 16);
#endif
}

FL_INLINE void load_high_halves(const uint16_t *p, vi (&v)[kVectors]) {
#if defined(FL_AVX512)
  const __m512i halves = _mm512_loadu_si512(p);
  const vu which = iota() << 16;
  for (int j = 0; j < 2; ++j)
    v[j] = (vi)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)(which + (j << 20)), halves);
#elif defined(FL_AVX2)
  for (int j = 0; j < kVectors; ++j)
    v[j] = (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8 * j))) << 16;
#elif defined(FL_SSE2)
  for (int j = 0; j < kVectors / 2; ++j) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8 * j));
    v[2 * j] = (vi)_mm_unpacklo_epi16(_mm_setzero_si128(), halves);
    v[2 * j + 1] = (vi)_mm_unpackhi_epi16(_mm_setzero_si128(), halves);
  }
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  for (vi &lanes : v) {
    Halves halves;
    __builtin_memcpy(&halves, p, sizeof halves);
    lanes = (vi)(__builtin_convertvector(halves, vu) << 16);
    p += kLanes;
  }
#endif
}

// f64 -----------------------------------------------------------------------------------------------------------------

typedef double vd __attribute__((vector_size(4 * kLanes)));

// The lanes of v as f64, exactly.
FL_INLINE void widen(vf v, vd (&wide)[2]) {
#if defined(FL_AVX512)
  wide[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
  wide[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif defined(FL_AVX2)
  wide[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
  wide[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#elif defined(FL_SSE2)
  wide[0] = _mm_cvtps_pd(v);
  wide[1] = _mm_cvtps_pd(_mm_movehl_ps(v, v));
#else
  typedef float Half __attribute__((vector_size(2 * kLanes)));
  Half halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  for (int i = 0; i < 2; ++i) wide[i] = __builtin_convertvector(halves[i], vd);
#endif
}

}  // namespace fl::FL_ISA
