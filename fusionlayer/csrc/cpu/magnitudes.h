// What the sparsifiers' thresholds are made of: sums, counts and candidates (codecs/sparse/sparse.h), and accumulation.
#pragma once

#include "elements.h"
#include "kernels.h"

namespace fl::FL_ISA {

FL_INLINE Block accumulated(Block acc, const Block &x, float scale) {
  for (int j = 0; j < kVectors; ++j) acc.v[j] = canonical(acc.v[j] + x.v[j] * scale);
  return acc;
}

// add_momentum of codecs/sparse/sparse.h.
FL_INLINE void add_momentum(const Block &x, const Accumulation &job, Block &velocity, Block &acc) {
  for (int j = 0; j < kVectors; ++j) {
    const vf scaled = x.v[j] * job.scale, u = velocity.v[j];
    const vf next = canonical(job.nesterov ? (u + scaled) * job.momentum : u * job.momentum + scaled);
    velocity.v[j] = next;
    acc.v[j] = canonical(acc.v[j] + (job.nesterov ? next + scaled : next));
  }
}

template <class X>
void accumulate(const Accumulation &job, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * kCastUnit, left = job.numel - first;
    const X *x = static_cast<const X *>(job.x) + first;
    float *acc = job.acc + first, *velocity = job.velocity ? job.velocity + first : nullptr;
    for_each_block(left < kCastUnit ? int(left) : kCastUnit, [&](int i, auto access) FL_LAMBDA {
      Block sum = access.load(acc + i);
      if (velocity) {
        Block u = access.load(velocity + i);
        add_momentum(access.load(x + i), job, u, sum);
        access.store(velocity + i, u);
      } else {
        sum = accumulated(sum, access.load(x + i), job.scale);
      }
      access.store(acc + i, sum);
    });
  }
}

FL_INLINE uint32_t largest_lane(vi v) {
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = uint32_t(v[i]) > largest ? uint32_t(v[i]) : largest;
  return largest;
}

FL_INLINE int64_t sum_of_lanes(vi v) {
  int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

template <int N>
FL_INLINE double fold(double (&sums)[N]) {
  for (int h = 1; h < N; h *= 2)
    for (int i = 0; i < N; i += 2 * h) sums[i] += sums[i + h];
  return sums[0];
}

// The lanes of v above `low` and below `high`; 0 for the others.
FL_INLINE vi between(vi v, vi low, int32_t high) {
#if defined(FL_AVX512)
  const __mmask16 above = _mm512_cmpgt_epi32_mask((__m512i)v, (__m512i)low);
  return (vi)_mm512_maskz_mov_epi32(_mm512_mask_cmplt_epi32_mask(above, (__m512i)v, (__m512i)broadcast(high)),
                                    (__m512i)v);
#else
  return v & (v > low) & (v < high);
#endif
}

// sum + v * v. The square of what was f32 is exact, so it does not matter whether it is rounded before it is added.
FL_INLINE vd add_square(vd sum, vd v) {
#if defined(FL_AVX512)
  return _mm512_fmadd_pd(v, v, sum);
#elif defined(FL_AVX2)
  return _mm256_fmadd_pd(v, v, sum);
#else
  return sum + v * v;
#endif
}

template <int N>
double fold_lanes(const vd (&sums)[N]) {
  double each[N * (kLanes / 2)];
  __builtin_memcpy(each, sums, sizeof each);
  return fold(each);
}

inline Magnitudes stats(const float *run, int n, uint32_t above) {
  const vi bound = broadcast(int32_t(above) - 1);
  vi count{}, largest{};
  vd total[2 * kQuad]{}, squares[2 * kQuad]{};  // the partial sums of a run, lane by lane
  const auto add = [&](const float *x) FL_LAMBDA {
    for (int q = 0; q < kQuad; ++q) {
      const vi bits = magnitude_bits(load(x + q * kLanes));
      count = count_greater(count, bits, bound);
      largest = max(largest, bits);
      vd wide[2];
      widen((vf)between(bits, bound, int32_t(kF32Inf)), wide);
      for (int h = 0; h < 2; ++h) {
        total[2 * q + h] += wide[h];
        squares[2 * q + h] = add_square(squares[2 * q + h], wide[h]);
      }
    }
  };
  const int rest = n % kRunSums;
  for (int i = 0; i < n - rest; i += kRunSums) {  // a line of the caches
    __builtin_prefetch(reinterpret_cast<const char *>(run + i) + kFarAhead);
    add(run + i);
  }
  if (rest) {
    float last[kRunSums] = {};
    __builtin_memcpy(last, run + n - rest, rest * sizeof(float));
    add(last);
  }
  Magnitudes result = {fold_lanes(total), fold_lanes(squares), sum_of_lanes(count), largest_lane(largest)};
  if (rest && above == 0) result.count -= kRunSums - rest;
  return result;
}

// counts[i] += number of magnitudes above bounds[i], which may be -1.
inline void count_above(const float *x, int64_t n, const int32_t *bounds, int groups, int64_t *counts) {
  constexpr int kTile = 2048;  // stays in L1 while the groups take turns
  while (n > 0) {
    const int tile = n < kTile ? int(n) : kTile, rest = tile % kLanes;
    for (int g = 0; g < groups; ++g) {
      const int32_t *bound = bounds + g * kBoundGroup;
      vi count[kBoundGroup] = {};
      for (int i = 0; i < tile - rest; i += kLanes) {
        const vi bits = magnitude_bits(load(x + i));
        for (int t = 0; t < kBoundGroup; ++t) count[t] = count_greater(count[t], bits, broadcast(bound[t]));
      }
      for (int t = 0; t < kBoundGroup; ++t) {
        int64_t sum = sum_of_lanes(count[t]);
        for (int i = tile - rest; i < tile; ++i) sum += int32_t(magnitude(x[i])) > bound[t];
        counts[g * kBoundGroup + t] += sum;
      }
    }
    x += tile;
    n -= tile;
  }
}

inline void gather(const float *x, int64_t n, Bracket &bracket) {
  constexpr int kTile = 4096;
  const vi below = broadcast(int32_t(bracket.low) - 1), high = broadcast(int32_t(bracket.high));
  int64_t above = 0;
  while (n > 0) {
    uint32_t found[kTile + kLanes];
    const int tile = n < kTile ? int(n) : kTile, rest = tile % kLanes;
    int count = 0;
    for (int i = 0; i < tile - rest; i += kLanes) {
      const vi bits = magnitude_bits(load(x + i));
      const uint32_t enough = greater_mask(bits, below);
      if (kLanes < 16 && enough == 0) continue;  // where lanes are stored one by one
      const uint32_t more = greater_mask(bits, high);
      above += __builtin_popcount(more);
      count += store_lanes(found + count, bits, enough & ~more);
    }
    for (int i = tile - rest; i < tile; ++i) {
      const uint32_t bits = magnitude(x[i]);
      above += bits > bracket.high;
      if (bits >= bracket.low && bits <= bracket.high) found[count++] = bits;
    }
    const int64_t place = count ? bracket.count.fetch_add(count, std::memory_order_relaxed) : 0;
    if (place + count <= bracket.room)
      __builtin_memcpy(bracket.gathered + place, found, size_t(count) * sizeof(uint32_t));
    x += tile;
    n -= tile;
  }
  bracket.above.fetch_add(above, std::memory_order_relaxed);
}

}  // namespace fl::FL_ISA
