// Elements of f32, bf16 and f16 as blocks of f32: loads, stores that round, and how a loop over blocks reaches an array.
#pragma once

#include "fusionlayer_codec.h"
#include "narrow_lanes.h"

namespace fl::FL_ISA {

// Elements of a tile where several f32 arrays share L1, and of one that is summed, unless a codec says otherwise.
constexpr int kShortTile = 512;
template <class Codec>
constexpr int kSumTile = kShortTile;

// Whether messages are summed in the domain of a transform: add_messages then begins with 0, and transforms the sum back.
template <class Codec>
constexpr bool kSumsRotated = false;

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class T>
struct Type {
  using type = T;

  // Element i of an array.
  static const T *at(const void *x, int64_t i) { return static_cast<const T *>(x) + i; }
  static T *at(void *x, int64_t i) { return static_cast<T *>(x) + i; }
};

template <class Body>
FL_INLINE void with_dtype(uint32_t dtype, const Body &body) {
  if (dtype == FL_BF16) return body(Type<Bf16>{});
  if (dtype == FL_F16) return body(Type<F16>{});
  body(Type<float>{});
}

FL_INLINE vi magnitude_bits(vf v) { return (vi)v & 0x7fffffff; }

FL_INLINE vf canonical(vf v) {
#if defined(FL_AVX512)
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), (vf)broadcast(int32_t(kF32Nan)));
#else
  return magnitude_bits(v) > int32_t(kF32Inf) ? (vf)broadcast(int32_t(kF32Nan)) : v;
#endif
}

FL_INLINE Block operator+(Block a, const Block &b) {
  for (int j = 0; j < kVectors; ++j) a.v[j] += b.v[j];
  return a;
}

FL_INLINE Block operator-(Block a, const Block &b) {
  for (int j = 0; j < kVectors; ++j) a.v[j] -= b.v[j];
  return a;
}

// sum += b * scale, whose products are exact.
FL_INLINE void add_scaled(Block &sum, const Block &b, vf scale) {
  for (int j = 0; j < kVectors; ++j) sum.v[j] = add_exact_product(b.v[j], scale, sum.v[j]);
}

FL_INLINE Block canonical(Block b) {
  for (int j = 0; j < kVectors; ++j) b.v[j] = canonical(b.v[j]);
  return b;
}

// The largest magnitude of a block, as bits, in some lane.
FL_INLINE vi largest(const Block &b) {
  vi most = magnitude_bits(b.v[0]);
  for (int j = 1; j < kVectors; ++j) most = max(most, magnitude_bits(b.v[j]));
  return most;
}

// The same of what `hadamard` made of a block: its last stage leaves no NaN beside a finite value, so either way the bits
// say that something is not finite.
FL_INLINE vi largest_of_rotated(const Block &b) {
#if defined(FL_AVX512)
  return (vi)_mm512_range_ps(b.v[0], b.v[1], 11);  // the larger magnitude; of NaN and another value the other
#else
  return largest(b);
#endif
}

// residual_after of core/residual.h.
FL_INLINE Block residual_after(const Block &value, const Block &decoded, Block residual) {
  for (int j = 0; j < kVectors; ++j) {
    const vf lost = value.v[j] - decoded.v[j];
    residual.v[j] = magnitude_bits(lost) < int32_t(kF32Inf) ? lost : residual.v[j];
  }
  return residual;
}

#if !defined(FL_AVX512) && !defined(FL_AVX2)
// f16_to_f32 and f32_to_f16 of core/floats.h, the f16 in the upper half.
FL_INLINE vf f16_to_f32(vi h) {
  const vi sign = h & INT32_MIN, magnitude = (vi)((vu)(h << 1) >> 4);
  const vi finite = (vi)((vf)magnitude * 0x1p112f);
  return (vf)(sign | (magnitude >= 0x0f800000 ? magnitude | 0x70000000 : finite));
}
FL_INLINE vi f32_to_f16(vf f) {
  const vi a = magnitude_bits(f), sign = (vi)f & INT32_MIN;
  const vi subnormal = (vi)((vf)a + 0.5f) - 0x3f000000;
  const vi normal = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
  const vi finite = a < 0x38800000 ? subnormal : normal;
  const vi any = a >= 0x477ff000 ? broadcast(0x7c00) : finite;
  return a > int32_t(kF32Inf) ? broadcast(kF16Nan << 16) : sign | any << 16;
}
#endif

FL_INLINE Block load_block(const float *p) {
  Block b;
  for (int j = 0; j < kVectors; ++j) b.v[j] = load(p + j * kLanes);
  return b;
}

FL_INLINE Block load_block(const Bf16 *p) {
  vi h[kVectors];
  load_high_halves(&p->bits, h);
  Block b;
  for (int j = 0; j < kVectors; ++j) b.v[j] = (vf)h[j];
  return b;
}

FL_INLINE Block load_block(const F16 *p) {
  Block b;
#if defined(FL_AVX512)
  for (int j = 0; j < kVectors; ++j)
    b.v[j] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16 * j)));
#elif defined(FL_AVX2)
  for (int j = 0; j < kVectors; ++j)
    b.v[j] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8 * j)));
#else
  vi h[kVectors];
  load_high_halves(&p->bits, h);
  for (int j = 0; j < kVectors; ++j) b.v[j] = f16_to_f32(h[j]);
#endif
  return b;
}

// 32 values of f16 format, as bits in 16-bit lanes.
typedef uint16_t vh __attribute__((vector_size(4 * kLanes)));
constexpr int kHalfVectors = kVectors / 2;

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

FL_INLINE Bytes16 load_bytes16(const uint8_t *p) {
  typedef Bytes16 unaligned __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const unaligned *>(p);
}

// table[index[i]], each index from 0 to 15.
FL_INLINE Bytes16 look_up(Bytes16 table, Bytes16 index) {
#if defined(FL_AVX512) || defined(FL_AVX2)
  return (Bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#else
  Bytes16 found;
  for (int i = 0; i < 16; ++i) found[i] = table[index[i]];
  return found;
#endif
}

// 32 bytes, 16 of them in `high`, as 32 lanes of 16 bits.
FL_INLINE void widen_bytes(Bytes16 low, Bytes16 high, vh (&v)[kHalfVectors]) {
#if defined(FL_AVX512)
  v[0] = (vh)_mm512_cvtepu8_epi16(_mm256_set_m128i((__m128i)high, (__m128i)low));
#elif defined(FL_AVX2)
  v[0] = (vh)_mm256_cvtepu8_epi16((__m128i)low);
  v[1] = (vh)_mm256_cvtepu8_epi16((__m128i)high);
#elif defined(FL_SSE2)
  const __m128i zero = _mm_setzero_si128();
  v[0] = (vh)_mm_unpacklo_epi8((__m128i)low, zero);
  v[1] = (vh)_mm_unpackhi_epi8((__m128i)low, zero);
  v[2] = (vh)_mm_unpacklo_epi8((__m128i)high, zero);
  v[3] = (vh)_mm_unpackhi_epi8((__m128i)high, zero);
#else
  for (int i = 0; i < kBlock; ++i) v[i / (2 * kLanes)][i % (2 * kLanes)] = i < 16 ? low[i] : high[i - 16];
#endif
}

// 32 bytes in memory as 32 signed lanes of 16 bits.
FL_INLINE void load_signed_bytes(const uint8_t *p, vh (&v)[kHalfVectors]) {
#if defined(FL_AVX512)
  v[0] = (vh)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(FL_AVX2)
  for (int j = 0; j < 2; ++j)
    v[j] = (vh)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 16 * j)));
#else
  typedef int16_t Signed __attribute__((vector_size(4 * kLanes)));
  widen_bytes(load_bytes16(p), load_bytes16(p + 16), v);
  for (vh &h : v) h = (vh)((Signed)(h << 8) >> 8);
#endif
}

FL_INLINE Block f16_to_f32(const vh (&h)[kHalfVectors]) {
  Block b;
#if defined(FL_AVX512)
  b.v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)h[0]));
  b.v[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)h[0], 1));
#elif defined(FL_AVX2)
  for (int j = 0; j < kHalfVectors; ++j) {
    b.v[2 * j] = _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)h[j]));
    b.v[2 * j + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)h[j], 1));
  }
#elif defined(FL_SSE2)
  for (int j = 0; j < kHalfVectors; ++j) {
    b.v[2 * j] = f16_to_f32((vi)_mm_unpacklo_epi16(_mm_setzero_si128(), (__m128i)h[j]));
    b.v[2 * j + 1] = f16_to_f32((vi)_mm_unpackhi_epi16(_mm_setzero_si128(), (__m128i)h[j]));
  }
#else
  for (int i = 0; i < kBlock; ++i) b.v[i / kLanes][i % kLanes] = fl::f16_to_f32(h[i / (2 * kLanes)][i % (2 * kLanes)]);
#endif
  return b;
}

// Stores round to the element type. A NaN is given in its canonical form, and so it arrives.
template <Store kStore = Store::kCached>
FL_INLINE void store_block(float *p, const Block &b) {
  for (int j = 0; j < kVectors; ++j) store<kStore>(p + j * kLanes, b.v[j]);
}

template <Store kStore = Store::kCached>
FL_INLINE void store_block(Bf16 *p, const Block &b) {
  vi rounded[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    const vu u = (vu)b.v[j];
    rounded[j] = (vi)(u + 0x7fff + (u >> 16 & 1));
  }
  store_high_halves<kStore>(&p->bits, rounded);
}

template <Store kStore = Store::kCached>
FL_INLINE void store_block(F16 *p, const Block &b) {
#if defined(FL_AVX512)
  for (int j = 0; j < kVectors; ++j) store<kStore>(p + 16 * j, _mm512_cvtps_ph(b.v[j], _MM_FROUND_TO_NEAREST_INT));
#elif defined(FL_AVX2)
  for (int j = 0; j < kVectors; ++j) store<kStore>(p + 8 * j, _mm256_cvtps_ph(b.v[j], _MM_FROUND_TO_NEAREST_INT));
#else
  vi h[kVectors];
  for (int j = 0; j < kVectors; ++j) h[j] = f32_to_f16(b.v[j]);
  store_high_halves<kStore>(&p->bits, h);
#endif
}

// Calls body with the way to store at p.
template <Store kStore>
struct StoreChoice {
  static constexpr Store value = kStore;
};
template <class Body>
FL_INLINE void with_store(bool streamed, const void *p, const Body &body) {
  if (streamed && reinterpret_cast<uintptr_t>(p) % kStreamAlignment == 0)
    body(StoreChoice<Store::kStreamed>{});
  else
    body(StoreChoice<Store::kCached>{});
}

// How a loop over blocks reaches an array: whole blocks directly, the first n elements of the last one through a buffer.
struct Whole {
  FL_INLINE uint32_t mask() const { return ~uint32_t(0); }  // a bit for each element that exists
  template <class T>
  FL_INLINE Block load(const T *p) const {
    return load_block(p);
  }
  template <Store kStore = Store::kCached, class T>
  FL_INLINE void store(T *p, const Block &b) const {
    store_block<kStore>(p, b);
  }
};
struct Part {
  int n;
  FL_INLINE uint32_t mask() const { return (uint32_t(1) << n) - 1; }
  template <class T>
  FL_INLINE Block load(const T *p) const {  // followed by zeros
    T whole[kBlock] = {};
    __builtin_memcpy(whole, p, n * sizeof(T));
    return load_block(whole);
  }
  template <Store kStore = Store::kCached, class T>
  FL_INLINE void store(T *p, const Block &b) const {
    T whole[kBlock];
    store_block(whole, b);
    __builtin_memcpy(p, whole, n * sizeof(T));
  }
};

// Calls body(i, access) for the blocks of n elements, i being a block's first element.
template <class Body>
FL_INLINE void for_each_block(int n, const Body &body) {
  int i = 0;
  for (; i + kBlock <= n; i += kBlock) body(i, Whole{});
  if (i < n) body(i, Part{n - i});
}

}  // namespace fl::FL_ISA
