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
// Of what takes long enough for a call: once in a library, not once for each caller and what it knows.
#if defined(__clang__)
#define FL_NOINLINE __attribute__((noinline))
#else
#define FL_NOINLINE __attribute__((noinline, noclone))
#endif

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

// How far a loop that does little with each byte is to prefetch, in bytes: beyond the page, where processors' own
// prefetchers stop.
constexpr int kFarAhead = 4096;

// Fetches a block's bytes into the caches; they may lie beyond an array.
template <class T>
FL_INLINE void prefetch_block(const T *p) {
  for (int i = 0; i < kBlock * int(sizeof(T)); i += 64) __builtin_prefetch(reinterpret_cast<const char *>(p) + i);
}

// Has the addresses of pages further on translated; called for n elements after the other. A processor waits for a translation
// that it does not remember, which in a virtual machine whose pages lie scattered is a good part of the time that a page takes.
// Several at a time take hardly longer than one, so the pages of a stretch are touched together.
template <class T>
FL_INLINE void translate_ahead(const T *x, int64_t n) {
  constexpr uintptr_t kPage = 4096, kStretch = 8 * kPage;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x), end = begin + uintptr_t(n) * sizeof(T);
  if (begin / kStretch == end / kStretch) return;
  const uintptr_t next = (end / kStretch + 1) * kStretch;
  for (uintptr_t at = next; at < next + kStretch; at += kPage) __builtin_prefetch(reinterpret_cast<const void *>(at));
}

// Runs of bytes, all of one length and a stride apart, that will be read soon. They are prefetched run after run, some lines
// at a time: the processor's own prefetchers follow one run, but not many that are read in turns.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const uint8_t *first, int64_t stride, int runs, int bytes)
      : at_(first), end_(first + bytes), stride_(stride), bytes_(bytes), runs_(runs) {}

  // As many elements as n at x, right behind them.
  template <class T>
  static Ahead behind(const T *x, int n) {
    return {reinterpret_cast<const uint8_t *>(x + n), 0, 1, n * int(sizeof(T))};
  }

  // How many are left.
  int lines() const { return runs_ > 0 ? ((runs_ - 1) * bytes_ + int(end_ - at_)) / 64 : 0; }

  // How many to fetch at a time, so that none is left after so many times.
  int share(int times) const { return (lines() + times - 1) / times; }

  FL_INLINE void fetch(int lines) {
    while (lines > 0 && runs_ > 0) {
      const uint8_t *stop = at_ + 64 * int64_t(lines);
      if (__builtin_expect(stop <= end_, 1)) {
        for (; at_ < stop; at_ += 64) __builtin_prefetch(at_);
        return;
      }
      for (; at_ < end_; at_ += 64, --lines) __builtin_prefetch(at_);
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

// The smaller and the larger one; b where a is NaN.
FL_INLINE vf min(vf a, vf b) {
#if defined(FL_AVX512)
  return _mm512_min_ps(a, b);
#elif defined(FL_AVX2)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

FL_INLINE vf max(vf a, vf b) {
#if defined(FL_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(FL_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// v limited to -bound..bound; NaN becomes bound.
FL_INLINE vf clamp(vf v, float bound) { return max(min(v, broadcast(bound)), broadcast(-bound)); }

// The same of numbers.
FL_INLINE vf clamp_number(vf v, float bound) {
#if defined(FL_AVX512)
  return _mm512_range_ps(v, broadcast(bound), 2);  // the smaller magnitude, with the sign of v
#else
  return clamp(v, bound);
#endif
}

// a * b + c, for products that are exact: fused or not, it is rounded once, so that every instruction set has the same bits.
FL_INLINE vf add_exact_product(vf a, vf b, vf c) {
#if defined(FL_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(FL_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The nearest integer of each lane, ties to even; magnitudes are below 2^23.
FL_INLINE vi nearest_of(vf v) {
#if defined(FL_AVX512)
  return (vi)_mm512_cvtps_epi32(v);
#elif defined(FL_AVX2)
  return (vi)_mm256_cvtps_epi32(v);
#elif defined(FL_SSE2)
  return (vi)_mm_cvtps_epi32(v);
#else
  const vf magic = (vf)(((vi)v & INT32_MIN) | 0x4b000000);  // 2^23 with the sign of v
  return __builtin_convertvector((v + magic) - magic, vi);
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

FL_INLINE vu max(vu a, vu b) {
#if defined(FL_AVX512)
  return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(FL_AVX2)
  return (vu)_mm256_max_epu32((__m256i)a, (__m256i)b);
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

// The operation's result of all lanes.
template <class Combine>
FL_INLINE float fold(vf v, const Combine &combine) {
  if constexpr (kLanes > 8) v = combine(v, swap_lanes<8>(v, AllLanes{}));
  if constexpr (kLanes > 4) v = combine(v, swap_lanes<4>(v, AllLanes{}));
  v = combine(v, swap_lanes<2>(v, AllLanes{}));
  return combine(v, swap_lanes<1>(v, AllLanes{}))[0];
}

#if defined(FL_AVX512) || defined(FL_AVX2)
#define FL_QUOTIENT 1
// a / b rounded to nearest, `inverse` being 1 / b rounded to nearest, for finite a and results that are not subnormal. What is
// rounded last is off by 3 / 2^24 of the distance of two floats at most. Few quotients lie so close to the middle of two floats
// that this could matter, and with all of these it does not (tests/native/quotients.cpp).
FL_INLINE vf quotient(vf a, vf b, vf inverse) {
  const vf near = a * inverse;
#if defined(FL_AVX512)
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(near, b, a), inverse, near);
#else
  return _mm256_fmadd_ps(_mm256_fnmadd_ps(near, b, a), inverse, near);
#endif
}
#endif

// Tables --------------------------------------------------------------------------------------------------------------

#if defined(FL_AVX512)
// table[index[i]]; the lowest five bits of an index count.
FL_INLINE vf look_up(const float *table, vi index) {
  return _mm512_permutex2var_ps(load(table), (__m512i)index, load(table + 16));
}
#endif

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

FL_INLINE vi count_greater(vi count, vf a, vf b) {
#if defined(FL_AVX512)
  return (vi)_mm512_mask_sub_epi32((__m512i)count, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), (__m512i)count,
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

}  // namespace fl::FL_ISA
