// Vectors of the instruction set this file is compiled for, and the few primitives the kernels are made of: 16 lanes with
// AVX-512, 8 with AVX2, 4 otherwise. Everything lives in a namespace named after the instruction set, so that the linker
// never takes one variant's code for another's. A primitive has an intrinsic body where gcc makes poor code of the
// portable one; both compute the same bits.
#pragma once

#if defined(__x86_64__)
#pragma GCC diagnostic push  // gcc 12 warns of its own _mm512_undefined_epi32
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "floats.h"

#define FL_INLINE inline __attribute__((always_inline))
#define FL_LAMBDA __attribute__((always_inline))

namespace fl::FL_ISA {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FL_AVX512 1
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FL_AVX2 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__SSE2__)
#define FL_SSE2 1
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));

// 32 consecutive elements: what one Hadamard transform works on.
constexpr int kBlock = 32;
constexpr int kVectors = kBlock / kLanes;
struct Block {
  vf v[kVectors];
};

// 16 consecutive elements: what packing and unpacking bytes works on.
constexpr int kQuad = 16 / kLanes;

template <int... I>
struct Lanes {};
template <int N, int... I>
struct MakeLanes : MakeLanes<N - 1, N - 1, I...> {};
template <int... I>
struct MakeLanes<0, I...> {
  using type = Lanes<I...>;
};
using AllLanes = typename MakeLanes<kLanes>::type;

template <int... I>
FL_INLINE vu iota(Lanes<I...>) {
  return vu{I...};
}
FL_INLINE vu iota() { return iota(AllLanes{}); }
FL_INLINE vf broadcast(float f) { return f - vf{}; }
FL_INLINE vi broadcast(int32_t i) { return i - vi{}; }

FL_INLINE vf load(const float *p) {
  typedef vf unaligned __attribute__((aligned(4), may_alias));
  return *reinterpret_cast<const unaligned *>(p);
}

// How to store: through the caches, or past them, which halves the traffic of results that are too large to stay there.
// The latter needs p aligned to kStreamAlignment, and finish_streaming before others may read.
enum class Store { kCached, kStreamed };
constexpr int kStreamAlignment = 64;

template <Store kStore = Store::kCached, class V>
FL_INLINE void store(void *p, V v) {
#if defined(__x86_64__)
  if constexpr (kStore == Store::kStreamed && sizeof v == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i *>(p), (__m512i)v);
  else if constexpr (kStore == Store::kStreamed && sizeof v == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i *>(p), (__m256i)v);
  else if constexpr (kStore == Store::kStreamed)
    return _mm_stream_si128(reinterpret_cast<__m128i *>(p), (__m128i)v);
#endif
  typedef V unaligned __attribute__((aligned(1), may_alias));
  *reinterpret_cast<unaligned *>(p) = v;
}

FL_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Fetches a block's bytes into the caches; they may lie beyond an array.
template <class T>
FL_INLINE void prefetch_block(const T *p) {
  for (int i = 0; i < kBlock * int(sizeof(T)); i += 64) __builtin_prefetch(reinterpret_cast<const char *>(p) + i);
}

// Runs of so many bytes, a stride apart, that are to be read soon. They are fetched run after run, some lines at a time: the
// processor's own prefetchers follow a run, but not many that advance by turns.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const uint8_t *first, int64_t stride, int runs, int bytes)
      : at_(first), end_(first + bytes), stride_(stride), bytes_(bytes), runs_(runs) {}

  // How many are left.
  int lines() const { return runs_ > 0 ? ((runs_ - 1) * bytes_ + int(end_ - at_)) / 64 : 0; }

  FL_INLINE void fetch(int lines) {
    while (lines > 0 && runs_ > 0) {
      for (; lines > 0 && at_ < end_; at_ += 64, --lines) __builtin_prefetch(at_);
      if (at_ < end_) return;
      --runs_;
      end_ += stride_;
      at_ = end_ - bytes_;
    }
  }

 private:
  const uint8_t *at_ = nullptr, *end_ = nullptr;
  int64_t stride_ = 0;
  int bytes_ = 0, runs_ = 0;
};

// v limited to -bound..bound; NaN becomes bound.
FL_INLINE vf clamp(vf v, float bound) {
  const vf high = broadcast(bound), low = broadcast(-bound);
#if defined(FL_AVX512)
  return _mm512_max_ps(_mm512_min_ps(v, high), low);
#elif defined(FL_AVX2)
  return _mm256_max_ps(_mm256_min_ps(v, high), low);
#else
  const vf limited = v < high ? v : high;
  return limited > low ? limited : low;
#endif
}

// The same of numbers.
FL_INLINE vf clamp_number(vf v, float bound) {
#if defined(FL_AVX512)
  return _mm512_range_ps(v, broadcast(bound), 2);  // the smaller magnitude, with the sign of v
#else
  return clamp(v, bound);
#endif
}

// Butterflies --------------------------------------------------------------------------------------------------------

template <int H, int... I>
FL_INLINE vf swap_lanes(vf v, Lanes<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (I ^ H)...);
#else
  return __builtin_shuffle(v, vi{(I ^ H)...});
#endif
}

// Lane i becomes v[i] + v[i + H] where i & H is 0, else v[i - H] - v[i], rounded once: multiplying by +-1 and flipping a
// sign are both exact.
template <int H, int... I>
FL_INLINE vf butterfly(vf v, Lanes<I...> lanes) {
  const vf other = swap_lanes<H>(v, lanes);
#if defined(FL_AVX512)
  return _mm512_fmadd_ps(v, vf{(I & H ? -1.0f : 1.0f)...}, other);
#elif defined(FL_AVX2)
  return _mm256_fmadd_ps(v, vf{(I & H ? -1.0f : 1.0f)...}, other);
#else
  return other + (vf)((vi)v ^ vi{(I & H ? INT32_MIN : 0)...});
#endif
}

template <int H, int N>
FL_INLINE void hadamard_stage(Block (&b)[N]) {
  for (int k = 0; k < N; ++k)
    if constexpr (H < kLanes) {
      for (int j = 0; j < kVectors; ++j) b[k].v[j] = butterfly<H>(b[k].v[j], AllLanes{});
    } else {
      for (int j = 0; j < kVectors; ++j)
        if (!(j & (H / kLanes))) {
          const vf x = b[k].v[j], y = b[k].v[j + H / kLanes];
          b[k].v[j] = x + y;
          b[k].v[j + H / kLanes] = x - y;
        }
    }
}

// hadamard32 of core/int_group.h for N blocks side by side: the stages of one are a chain, so others fill its gaps.
template <int N>
FL_INLINE void hadamard(Block (&b)[N]) {
  hadamard_stage<1>(b);
  hadamard_stage<2>(b);
  hadamard_stage<4>(b);
  hadamard_stage<8>(b);
  hadamard_stage<16>(b);
}

// Maximum of non-negative integers ------------------------------------------------------------------------------------

FL_INLINE vi max(vi a, vi b) {
#if defined(FL_AVX512)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(FL_AVX2)
  return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

FL_INLINE vi min(vi a, vi b) {
#if defined(FL_AVX512)
  return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(FL_AVX2)
  return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}

// Lane i of the result is the larger one of lanes 2 i and 2 i + 1 of the two vectors in a row.
template <int... I>
FL_INLINE vi max_pairs(vi a, vi b, Lanes<I...>) {
#if defined(__clang__)
  return max(__builtin_shufflevector(a, b, (2 * I)...), __builtin_shufflevector(a, b, (2 * I + 1)...));
#else
  return max(__builtin_shuffle(a, b, vi{(2 * I)...}), __builtin_shuffle(a, b, vi{(2 * I + 1)...}));
#endif
}

// For N = kLanes: lane i of the result is the largest lane of v[i].
template <int N = kLanes>
FL_INLINE vi max_of_each(const vi *v) {
  if constexpr (N == 1)
    return *v;
  else
    return max_pairs(max_of_each<N / 2>(v), max_of_each<N / 2>(v + N / 2), AllLanes{});
}

// Lane i of the result is the sum of lanes 2 i and 2 i + 1 of the two vectors in a row.
template <int... I>
FL_INLINE vf add_pairs(vf a, vf b, Lanes<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
#else
  return __builtin_shuffle(a, b, vi{(2 * I)...}) + __builtin_shuffle(a, b, vi{(2 * I + 1)...});
#endif
}

// Tables --------------------------------------------------------------------------------------------------------------

// table[index[i]], each index from 0 to 31.
FL_INLINE vi look_up(const int32_t *table, vi index) {
#if defined(FL_AVX512)
  const __m512i low = _mm512_loadu_si512(table), high = _mm512_loadu_si512(table + 16);
  return (vi)_mm512_permutex2var_epi32(low, (__m512i)index, high);
#elif defined(FL_AVX2)
  return (vi)_mm256_i32gather_epi32(table, (__m256i)index, 4);
#else
  vi found;
  for (int i = 0; i < kLanes; ++i) found[i] = table[index[i]];
  return found;
#endif
}

// N values, 8 or 128, at an address that is a multiple of 64 and has room for 16; each lane's by its index below N. With
// AVX-512 they stay in registers.
template <int N>
class Lookup {
 public:
#if defined(FL_AVX512)
  explicit FL_INLINE Lookup(const float *values) {
    for (int i = 0; i < kCount; ++i) v_[i] = load(values + i * kLanes);
  }

  FL_INLINE vf operator()(vi index) const {
    const __m512i i = (__m512i)index;
    if constexpr (N <= kLanes) {
      return _mm512_permutexvar_ps(i, v_[0]);
    } else {
      const __mmask16 odd = _mm512_test_epi32_mask(i, _mm512_set1_epi32(32));
      const vf low =
          _mm512_mask_mov_ps(_mm512_permutex2var_ps(v_[0], i, v_[1]), odd, _mm512_permutex2var_ps(v_[2], i, v_[3]));
      const vf high =
          _mm512_mask_mov_ps(_mm512_permutex2var_ps(v_[4], i, v_[5]), odd, _mm512_permutex2var_ps(v_[6], i, v_[7]));
      return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(i, _mm512_set1_epi32(64)), high);
    }
  }

 private:
  static constexpr int kCount = N <= kLanes ? 1 : N / kLanes;
  vf v_[kCount];
#else
  explicit FL_INLINE Lookup(const float *values) : values_(values) {}

  FL_INLINE vf operator()(vi index) const {
#if defined(FL_AVX2)
    return _mm256_i32gather_ps(values_, (__m256i)index, 4);
#else
    vf found;
    for (int i = 0; i < kLanes; ++i) found[i] = values_[index[i]];
    return found;
#endif
  }

 private:
  const float *values_;
#endif
};

// Masks ---------------------------------------------------------------------------------------------------------------

// Bit i: a[i] > b[i].
FL_INLINE uint32_t greater_mask(vi a, vi b) {
#if defined(FL_AVX512)
  return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b);
#elif defined(FL_AVX2)
  return uint32_t(_mm256_movemask_ps((__m256)(a > b)));
#elif defined(FL_SSE2)
  return uint32_t(_mm_movemask_ps((__m128)(a > b)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t(a[i] > b[i]) << i;
  return mask;
#endif
}

// count[i] + (a[i] > b[i]).
FL_INLINE vi count_greater(vi count, vi a, vi b) {
#if defined(FL_AVX512)
  return (vi)_mm512_mask_sub_epi32((__m512i)count, _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b), (__m512i)count,
                                   _mm512_set1_epi32(-1));
#else
  return count - (a > b);
#endif
}

// Writes the lanes of v that the mask names, in order, and returns how many; up to kLanes elements may be written.
FL_INLINE int store_lanes(uint32_t *p, vi v, uint32_t mask) {
#if defined(FL_AVX512)
  store(p, _mm512_maskz_compress_epi32(__mmask16(mask), (__m512i)v));
  return __builtin_popcount(mask);
#else
  int n = 0;
  for (; mask; mask &= mask - 1) p[n++] = uint32_t(v[__builtin_ctz(mask)]);
  return n;
#endif
}

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

// The low nibbles of a, and those of b above them; what is above is not zero.
FL_INLINE vi join_nibbles(vi a, vi b) {
#if defined(FL_AVX512)
  return (vi)_mm512_ternarylogic_epi32((__m512i)broadcast(15), (__m512i)a, (__m512i)(b << 4), 0xca);
#else
  return (a & 15) | b << 4;
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
  for (int i = 0; i < 16; ++i) v[i / kLanes][i % kLanes] = int8_t(p[i]);
#endif
}

// 32 half words <-> upper halves of 32 lanes of 32 bits ----------------------------------------------------------------

template <Store kStore>
FL_INLINE void store_high_halves(uint16_t *p, const vi (&v)[kVectors]) {
#if defined(FL_AVX512)
  const vu odd = (iota() * 4 + 1) | (iota() * 4 + 3) << 16;  // of the 64 halves of both
  store<kStore>(p, _mm512_permutex2var_epi16((__m512i)v[0], (__m512i)odd, (__m512i)v[1]));
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
  for (int i = 0; i < kBlock; ++i) v[i / kLanes][i % kLanes] = int32_t(uint32_t(p[i]) << 16);
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
  for (int i = 0; i < kLanes; ++i) wide[i / 2][i % 2] = v[i];
#endif
}

// Element types -------------------------------------------------------------------------------------------------------

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

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

// The upper halves of the products of 16-bit lanes, and the smaller one of two.
FL_INLINE vh high_products(vh a, vh b) {
#if defined(FL_AVX512)
  return (vh)_mm512_mulhi_epu16((__m512i)a, (__m512i)b);
#elif defined(FL_AVX2)
  return (vh)_mm256_mulhi_epu16((__m256i)a, (__m256i)b);
#elif defined(FL_SSE2)
  return (vh)_mm_mulhi_epu16((__m128i)a, (__m128i)b);
#else
  for (int i = 0; i < 2 * kLanes; ++i) a[i] = uint16_t(uint32_t(a[i]) * b[i] >> 16);
  return a;
#endif
}

FL_INLINE vh min(vh a, vh b) {
#if defined(FL_AVX512)
  return (vh)_mm512_min_epu16((__m512i)a, (__m512i)b);
#elif defined(FL_AVX2)
  return (vh)_mm256_min_epu16((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
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
