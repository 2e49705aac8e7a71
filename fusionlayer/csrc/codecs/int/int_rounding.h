// How the `int` codec makes groups of values into scales and codes. A tile of whole groups is transformed into L1, its scales
// are made side by side, then its codes. Only the first step depends on the type of the elements, only the last one on bits.
#pragma once

#include <type_traits>

#include "cpu/code_runs.h"
#include "cpu/elements.h"
#include "cpu/kernels.h"
#include "cpu/random.h"
#include "int_group.h"

namespace fl::FL_ISA {

constexpr int kMaxGroups = kMaxTile / kBlock;
constexpr int kSideBySide = kLanes / 4;  // blocks in 8 registers

template <int N, bool kHadamard, class T>
FL_INLINE vi transform_blocks(const T *x, float *tile) {
  Block b[N];
  for (int k = 0; k < N; ++k) b[k] = load_block(x + k * kBlock);
  if constexpr (kHadamard) hadamard(b);
  if constexpr (kHadamard || !std::is_same_v<T, float>)
    for (int k = 0; k < N; ++k) store_block(tile + k * kBlock, b[k]);
  vi top[N];
  for (int k = 0; k < N; ++k) top[k] = kHadamard ? largest_of_rotated(b[k]) : largest(b[k]);
  for (int width = N / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) top[k] = max(top[k], top[k + width]);
  return top[0];
}

// Leaves in the tile what is to be quantised, and for each group a vector that holds the largest magnitude in some lane.
// Values that are f32 already and are not rotated stay where they are. Meanwhile half of `ahead` is fetched: memory has few
// lines on their way at a time, and all of the time counts.
template <bool kHadamard, class T>
FL_NOINLINE const float *transform_groups(const T *x, int group, int groups, float *tile, vi *top, Ahead &ahead) {
  const int lines = ahead.share(2 * groups);
  const T *from = x;
  float *to = tile;
  for (int g = 0; g < groups; ++g, from += group, to += group) {
    ahead.fetch(lines);
    if (group >= kSideBySide * kBlock) {
      top[g] = transform_blocks<kSideBySide, kHadamard>(from, to);
      for (int i = kSideBySide * kBlock; i < group; i += kSideBySide * kBlock)
        top[g] = max(top[g], transform_blocks<kSideBySide, kHadamard>(from + i, to + i));
    } else {
      top[g] = vi{};
      for (int i = 0; i < group; i += kBlock) top[g] = max(top[g], transform_blocks<1, kHadamard>(from + i, to + i));
    }
  }
  if constexpr (std::is_same_v<T, float> && !kHadamard)
    return x;
  else
    return tile;
}

// make_scale of core/int_group.h for every group.
template <int kBits>
FL_NOINLINE void scale_groups(const IntLevels &levels, vi *top, int groups, float *scales, float *inverse) {
  constexpr int32_t kStep = 1 << clear_bits(kBits);
  for (int g = groups; g % kLanes; ++g) top[g] = vi{};
  for (int g = 0; g < groups; g += kLanes) {
    const vi amax = max_of_each(top + g);
    const vi up = ((vi)((vf)amax / levels.units) + (kStep - 1)) & -kStep;
    const vi least = (vf)up * levels.units < (vf)amax ? up + kStep : up;
    const vi outermost = (vi)((vf)least * float(outermost_level(kBits)));
    const vi not_finite = (amax >= int32_t(kF32Inf)) | (outermost >= int32_t(kF32Inf));
    const vi usual = ~not_finite & (amax >= int32_t(kTinyBits));
    const vi scale = (least & usual) | (int32_t(kF32Nan) & not_finite);
    store(inverse + g, (vf)((vi)(levels.steps / (vf)least) & usual));
    if (groups - g >= kLanes)
      store(scales + g, (vf)scale);
    else
      __builtin_memcpy(scales + g, &scale, size_t(groups - g) * sizeof(float));
  }
}

// FL_INT_STOCHASTIC, FL_INT_FULL, or neither.
enum class Rounding { kNearest, kStochastic, kFull };

template <int kBits>
class IntRounding {
 public:
  explicit IntRounding(const Job &job)
      : key_(job.key),
        offset_(uint64_t(job.spec->offset)),
        group_(int(job.spec->param[1])),
        stochastic_(job.spec->param[2] & FL_INT_STOCHASTIC),
        full_(job.spec->param[2] & FL_INT_FULL),
        levels_(int_levels(kBits, group_, stochastic_, full_)) {}

  int group() const { return group_; }
  int group_bytes() const { return group_ * kBits / 8; }

  // Where the codes of a block lie among those of a group, i being its first element; of 4 bits, in the first part.
  static constexpr int code_bytes(int i) { return between_integers(kBits) ? i * kBits / 8 : i; }

  // What transform_groups left becomes scales and codes. Meanwhile the rest of `ahead` is fetched.
  FL_NOINLINE void quantize(const float *values, vi *top, int groups, float *scales, uint8_t *codes, int64_t unit,
                            Ahead ahead) const {
    alignas(64) float inverse[kMaxGroups];
    scale_groups<kBits>(levels_, top, groups, scales, inverse);
    if constexpr (!kRuns)
      if (full_) return quantize_groups<Rounding::kFull>(values, inverse, groups, codes, unit, ahead);
    if (stochastic_)
      quantize_groups<Rounding::kStochastic>(values, inverse, groups, codes, unit, ahead);
    else
      quantize_groups<Rounding::kNearest>(values, inverse, groups, codes, unit, ahead);
  }

 private:
  static constexpr IntLevels kLevels = int_levels(kBits, 0, true, false);
  static constexpr float kTop = kLevels.top(), kBelow = kLevels.below;
  static constexpr bool kRuns = between_integers(kBits);  // of 32 codes, one behind the other

  template <Rounding kHow>
  FL_INLINE void quantize_groups(const float *values, const float *inverse, int groups, uint8_t *codes, int64_t unit,
                                 Ahead ahead) const {
    const int group = group_, bytes = group_bytes(), lines = ahead.share(groups);
    for (int g = 0; g < groups; ++g, values += group, codes += bytes) {
      ahead.fetch(lines);
      const uint64_t first = offset_ + uint64_t(unit + g) * group;
      if (__builtin_expect(inverse[g] == 0.0f, 0))
        __builtin_memset(codes, 0, size_t(bytes));
      else if constexpr (kHow == Rounding::kStochastic)
        stochastic_group(values, group, inverse[g], key_at(key_, first), uint32_t(first), codes);
      else
        nearest_group<kHow>(values, group, inverse[g], codes);
    }
  }

  // The codes of some vectors of values in the low bits of the lanes; the bits above are not zero.
  template <Rounding kHow, int N>
  static FL_INLINE void nearest_codes(const float *values, float inverse, vi (&codes)[N]) {
    for (int j = 0; j < N; ++j) {
      vf v = load(values + j * kLanes) * inverse;
      if constexpr (kRuns) v = clamp_number(v, kTop);  // else no code exceeds the outermost
      if constexpr (kHow == Rounding::kFull) v = v < broadcast(kTop) ? v : broadcast(kTop);
      if constexpr (kRuns) v -= kBelow;
      codes[j] = (vi)(v + 12582912.0f);  // round_even of core/int_group.h
    }
  }

  // Stochastic rounding (core/int_group.h) of the 32 values of a run, the first of which has the number that `spread` is of.
  // Codes are in the upper halves of the lanes: what is below is the fraction.
  static FL_INLINE void stochastic_codes(const float *values, float units, RngKey key, vu spread,
                                         vi (&codes)[kVectors]) {
    const auto sum = [&](int j, vi random) FL_LAMBDA {
      codes[j] = nearest_of(load(values + j * kLanes) * units) + random;
      if constexpr (kRuns) codes[j] -= int32_t(kBelow * kNoiseUnits);
    };
    for (int j = 0; j < kQuad; ++j) {
      const Halves random = random_halves(key, spread + j * kLanes * kSpread);
      sum(j, random.first);
      sum(j + kQuad, random.second);
    }
  }

  static FL_INLINE void stochastic_group(const float *values, int group, float inverse, RngKey key, uint32_t first,
                                         uint8_t *codes) {
    const float units = inverse * kNoiseUnits;
    vu spread = iota() * kSpread + (first * kSpread + key.a);
    vi run[kVectors];
    if (kBits != 4 || group == kBlock) {
      for (int i = 0; i < group; i += kBlock, spread += kBlock * kSpread) {
        stochastic_codes(values + i, units, key, spread, run);
        store_codes(codes + code_bytes(i), run);
      }
    } else {
      const int half = group / 2;
      for (int i = 0; i < half; i += kBlock, spread += kBlock * kSpread) {
        vi high[kVectors];
        stochastic_codes(values + i, units, key, spread, run);
        stochastic_codes(values + half + i, units, key, spread + half * kSpread, high);
        store_third_nibbles(codes + i, run, high);
      }
    }
  }

  // Those of a run whose bytes no other one shares.
  static FL_INLINE void store_codes(uint8_t *p, vi (&run)[kVectors]) {
    if constexpr (kBits == 8) return store_third_bytes(p, run);
    for (vi &codes : run) codes >>= kNoiseBits;
    if constexpr (kRuns) {
      store_run<kBits>(p, run);
    } else {
      vi joined[kQuad];
      for (int j = 0; j < kQuad; ++j) joined[j] = join_nibbles(run[j], run[j + kQuad]);
      store_low_bytes(p, joined);
    }
  }

  template <Rounding kHow>
  static FL_INLINE void nearest_group(const float *values, int group, float inverse, uint8_t *codes) {
    vi low[kQuad], high[kQuad];
    if constexpr (kRuns) {
      for (int i = 0; i < group; i += kBlock) {
        vi run[kVectors];
        nearest_codes<kHow>(values + i, inverse, run);
        store_run<kBits>(codes + code_bytes(i), run);
      }
    } else if constexpr (kBits == 8) {
      for (int i = 0; i < group; i += 16) {
        nearest_codes<kHow>(values + i, inverse, low);
        store_low_bytes(codes + i, low);
      }
    } else {
      const int half = group / 2;
      for (int i = 0; i < half; i += 16) {
        nearest_codes<kHow>(values + i, inverse, low);
        nearest_codes<kHow>(values + half + i, inverse, high);
        for (int j = 0; j < kQuad; ++j) low[j] = join_nibbles(low[j], high[j]);
        store_low_bytes(codes + i, low);
      }
    }
  }

  RngKey key_;
  uint64_t offset_;
  int group_;
  bool stochastic_, full_;
  IntLevels levels_;
};

}  // namespace fl::FL_ISA
