// The `dynamiq` codec (codecs/dynamiq/dynamiq.h) on vectors, one super-group at a time. Groups g and g + 8 share random numbers.
#pragma once

#include <type_traits>

#include "cpu/elements.h"
#include "cpu/kernels.h"
#include "cpu/random.h"
#include "dynamiq.h"
#include "dynamiq_shared.h"

namespace fl::FL_ISA {

// What a call's kernels share.
struct DynamiqPrepared {
  const DynamiqLevels *levels;
  DynamiqKeys keys;
};

static_assert(kScaleGroup == kQuad * kLanes, "a group is what packing bytes works on");

// 16 values.
struct Sixteen {
  vf v[kQuad];
};

FL_INLINE vf convert(vi v) { return __builtin_convertvector(v, vf); }

// Numbers of levels (codecs/dynamiq/dynamiq.h) for codes of kBits, with the sign.
template <int kBits>
class LevelLanes {
 public:
  explicit LevelLanes(const Levels &levels) : low_(levels.low), step_(levels.step), top_(levels.top) {
    for (int i = 0; i < kDegree; ++i) curve_[i] = levels.curve[i];
  }

  FL_INLINE vi code(vf x, vf factor, vf w) const {
    const vf y = (vf)magnitude_bits(x) * factor;
    const vi sign = (vi)((vu)x >> (32 - kBits)) & 1 << (kBits - 1);
    if constexpr (kBits == 2) return count_greater(sign, y, w - kFirstPlace);
    if constexpr (kBits == 8) return min(truncate(curve(y) + (1.0f + kFirstPlace - w)), broadcast(top_)) | sign;
    const vi r = truncate(curve(y));
    return count_greater(r, y, low_(r) + w * step_(r)) | sign;
  }

 private:
  static constexpr int kDegree = kBits == 8 ? kCurve8 : kCurve4;

  static FL_INLINE vi truncate(vf v) { return __builtin_convertvector(v, vi); }

  FL_INLINE vf curve(vf y) const {
    vf sum = broadcast(curve_[kDegree - 1]);
    for (int i = kDegree - 2; i >= 0; --i) sum = sum * y + curve_[i];
    return sum * y;
  }

  Lookup<8> low_, step_;
  float curve_[kDegree];
  int top_;
};

class DynamiqCodec {
 public:
  struct Message {
    DynamiqMessage planes;
    int64_t group;
  };

  static constexpr bool kCanonical = false;

  explicit DynamiqCodec(const Job &job)
      : levels_(*static_cast<const DynamiqPrepared *>(job.prepared)->levels),
        keys_(static_cast<const DynamiqPrepared *>(job.prepared)->keys),
        groups_(super_groups(job.spec->numel)),
        offset_(uint64_t(job.spec->offset) / kSuperGroup),
        flat_(job.spec->param[0] & FL_DYNAMIQ_FLAT) {}

  int unit() const { return kSuperGroup; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    return {dynamiq_message(messages, message), unit};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t unit, Ahead ahead) const {
    for (int i = 0; i < n; i += kSuperGroup, ++out.group, ++unit) {
      alignas(64) float wide[kSuperGroup];
      vi top[kScaleGroups];
      for (int j = 0; j < kSuperGroup; j += kBlock) {
        ahead.fetch(kBlock * int(sizeof(T)) / 64);
        const Block b = load_block(x + i + j);
        if constexpr (!std::is_same_v<T, float>) store_block(wide + j, b);
        for (int half = 0; half < 2; ++half) {
          vi most = magnitude_bits(b.v[half * kQuad]);
          for (int k = 1; k < kQuad; ++k) most = max(most, magnitude_bits(b.v[half * kQuad + k]));
          top[j / kScaleGroup + half] = most;
        }
      }
      if constexpr (std::is_same_v<T, float>)
        encode_group(x + i, top, out, offset_ + uint64_t(unit));
      else
        encode_group(wide, top, out, offset_ + uint64_t(unit));
    }
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    for (int i = 0; i < n; i += kSuperGroup, ++in.group) {
      alignas(64) float scales[kScaleGroups];
      load_scales(in, scales);
      const CodePlace place = code_place(in.planes.runs, groups_, in.group);
      const uint8_t *codes = in.planes.codes + place.offset;
      if (place.bits == 8)
        decode8(codes, scales, [&](int j, const Block &b) FL_LAMBDA { sink(i + j, b); });
      else if (place.bits == 4)
        decode4(codes, scales, [&](int j, const Block &b) FL_LAMBDA { sink(i + j, b); });
      else
        decode2(codes, scales, [&](int j, const Block &b) FL_LAMBDA { sink(i + j, b); });
    }
  }

 private:
  FL_NOINLINE void encode_group(const float *values, vi *top, const Message &out, uint64_t number) const {
    alignas(64) int32_t amax[kScaleGroups];
    alignas(64) float factor[kScaleGroups];
    for (int g = 0; g < kScaleGroups; g += kLanes) store(amax + g, max_of_each(top + g));
    const CodePlace place = code_place(out.planes.runs, groups_, out.group);
    uint8_t *codes = out.planes.codes + place.offset;
    const Levels &levels = levels_of(levels_, place.bits);
    if (!(flat_ ? make_flat_scales(amax, levels.span, out, factor)
                : make_scales(amax, levels.span, out, number, factor))) {
      __builtin_memset(codes, 0, size_t(code_bytes(place.bits)));
      return;
    }
    if (place.bits == 8)
      encode8(LevelLanes<8>(levels), values, factor, number, codes);
    else if (place.bits == 4)
      encode4(LevelLanes<4>(levels), values, factor, number, codes);
    else
      encode2(LevelLanes<2>(levels), values, factor, number, codes);
  }

  // Fills the factors; false: all codes are 0.
  FL_INLINE bool make_scales(const int32_t *amax, float span, const Message &out, uint64_t number,
                             float *factor) const {
    int32_t most = 0;
    for (int g = 0; g < kScaleGroups; ++g) most = amax[g] > most ? amax[g] : most;
    const uint16_t wire = scale_above(uint32_t(most));
    uint8_t *group_scales = out.planes.group_scales + out.group * kScaleGroups;
    out.planes.scales[out.group] = wire;
    if (wire == 0 || wire == kBf16Nan) {
      __builtin_memset(group_scales, 0, kScaleGroups);
      return false;
    }
    const float inverse = 255.0f / bf16_to_f32(wire);
    const uint64_t first = number * kScaleGroups;
    const RngKey key = key_at(keys_.scale, first);
    vu spread = (iota() + uint32_t(first)) * kSpread + key.a;
    vi scale[kQuad];
    for (int j = 0; j < kQuad; ++j, spread += kLanes * kSpread) {
      const vf magnitude = load(reinterpret_cast<const float *>(amax) + j * kLanes);
      const vf noise = (vf)((random_bits(key, spread) >> 9) | 0x3f800000u) - 1.0f;
      scale[j] = min(__builtin_convertvector(magnitude * inverse + noise, vi), broadcast(255));
      store(factor + j * kLanes, factor_of(magnitude, span));
    }
    store_low_bytes(group_scales, scale);
    return true;
  }

  FL_INLINE bool make_flat_scales(const int32_t *amax, float span, const Message &out, float *factor) const {
    uint16_t *scales = reinterpret_cast<uint16_t *>(out.planes.group_scales) + out.group * kFlatScales;
    bool finite = true;
    for (int g = 0; g < kFlatScales; ++g) {
      scales[g] = scale_above(uint32_t(amax[2 * g] > amax[2 * g + 1] ? amax[2 * g] : amax[2 * g + 1]));
      finite = finite && scales[g] != kBf16Nan;
      factor[2 * g] = factor[2 * g + 1] = bf16_to_f32(scales[g]);
    }
    if (!finite) {
      for (int g = 0; g < kFlatScales; ++g) scales[g] = kBf16Nan;
      return false;
    }
    for (int g = 0; g < kScaleGroups; g += kLanes) store(factor + g, factor_of(load(factor + g), span));
    return true;
  }

  static FL_INLINE vf factor_of(vf amax, float span) {
    const vf factor = span / amax;
    return (vf)((vi)factor & ((vi)amax >= int32_t(kTinyBits)));
  }

  // rounding_places of codecs/dynamiq/dynamiq.h for groups g and g + 8, as numbers.
  class Noise {
   public:
    Noise(const DynamiqKeys &keys, uint64_t number)
        : key_(key_at(keys.noise, number * kPairs)),
          spread_((iota() + uint32_t(number * kPairs)) * kSpread + key_.a),
          factor_(keys.factor),
          moved_(both_halves(keys.moved)),
          cell_(both_halves(keys.cell)) {}

    FL_INLINE void of(int g, Sixteen &low, Sixteen &high) const {
      for (int j = 0; j < kQuad; ++j) {
        const vu bits = random_bits(key_, spread_ + uint32_t(g * kScaleGroup + j * kLanes) * kSpread);
        const vu places = ((bits + moved_) & ~cell_) | (bits * factor_ & cell_);
        low.v[j] = (vf)((places << 7 & 0x007fff80u) | 0x3f800000u);
        high.v[j] = (vf)((places >> 9 & 0x007fff80u) | 0x3f800000u);
      }
    }

   private:
    RngKey key_;
    vu spread_;
    uint32_t factor_, moved_, cell_;
  };

  template <class Lanes>
  static FL_INLINE void codes_of(const Lanes &lanes, const float *values, const float *factor, int g, const Sixteen &w,
                                 vi (&codes)[kQuad]) {
    const vf by = broadcast(factor[g]);
    for (int j = 0; j < kQuad; ++j) codes[j] = lanes.code(load(values + g * kScaleGroup + j * kLanes), by, w.v[j]);
  }

  FL_NOINLINE void encode8(const LevelLanes<8> lanes, const float *values, const float *factor, uint64_t number,
                           uint8_t *codes) const {
    const Noise noise(keys_, number);
    for (int g = 0; g < 8; ++g) {
      Sixteen low, high;
      vi code[kQuad];
      noise.of(g, low, high);
      codes_of(lanes, values, factor, g, low, code);
      store_low_bytes(codes + g * 16, code);
      codes_of(lanes, values, factor, g + 8, high, code);
      store_low_bytes(codes + (g + 8) * 16, code);
    }
  }

  FL_NOINLINE void encode4(const LevelLanes<4> lanes, const float *values, const float *factor, uint64_t number,
                           uint8_t *codes) const {
    const Noise noise(keys_, number);
    for (int g = 0; g < 8; ++g) {
      Sixteen low, high;
      vi first[kQuad], second[kQuad];
      noise.of(g, low, high);
      codes_of(lanes, values, factor, g, low, first);
      codes_of(lanes, values, factor, g + 8, high, second);
      for (int j = 0; j < kQuad; ++j) first[j] |= second[j] << 4;
      store_low_bytes(codes + g * 16, first);
    }
  }

  FL_NOINLINE void encode2(const LevelLanes<2> lanes, const float *values, const float *factor, uint64_t number,
                           uint8_t *codes) const {
    const Noise noise(keys_, number);
    for (int g = 0; g < 4; ++g) {
      Sixteen u[4];
      vi code[4][kQuad];
      noise.of(g, u[0], u[2]);
      noise.of(g + 4, u[1], u[3]);
      for (int k = 0; k < 4; ++k) codes_of(lanes, values, factor, g + 4 * k, u[k], code[k]);
      for (int j = 0; j < kQuad; ++j) code[0][j] |= code[1][j] << 2 | code[2][j] << 4 | code[3][j] << 6;
      store_low_bytes(codes + g * 16, code[0]);
    }
  }

  FL_INLINE void load_scales(const Message &in, float *scales) const {
    if (flat_) {
      const auto *wire = reinterpret_cast<const uint16_t *>(in.planes.group_scales) + in.group * kFlatScales;
      for (int g = 0; g < kScaleGroups; ++g) scales[g] = scale_value(wire[g / 2]);
      return;
    }
    const float unit = scale_value(in.planes.scales[in.group]) / 255.0f;
    vi codes[kQuad];
    load_bytes(in.planes.group_scales + in.group * kScaleGroups, codes);
    for (int j = 0; j < kQuad; ++j) store(scales + j * kLanes, convert(codes[j] & 255) * unit);
  }

  // Two groups, from codes whose sign is the highest bit of the lane once they are shifted by kShift.
  template <int kShift, class Table>
  static FL_INLINE Block two_groups(const vi (&low)[kQuad], const vi (&high)[kQuad], int32_t mask, const Table &table,
                                    const float *scales) {
    Block b;
    for (int j = 0; j < kQuad; ++j) {
      b.v[j] = (vf)((vi)(table(low[j] & mask) * scales[0]) ^ (low[j] << kShift & INT32_MIN));
      b.v[j + kQuad] = (vf)((vi)(table(high[j] & mask) * scales[1]) ^ (high[j] << kShift & INT32_MIN));
    }
    return b;
  }

  template <class Sink>
  FL_INLINE void decode8(const uint8_t *codes, const float *scales, const Sink &sink) const {
    const Lookup<128> table(levels_.eight.value);
    for (int g = 0; g < kScaleGroups; g += 2) {
      vi low[kQuad], high[kQuad];
      load_bytes(codes + g * 16, low);
      load_bytes(codes + g * 16 + 16, high);
      sink(g * kScaleGroup, two_groups<24>(low, high, 127, table, scales + g));
    }
  }

  template <class Sink>
  FL_INLINE void decode4(const uint8_t *codes, const float *scales, const Sink &sink) const {
    const Lookup<8> table(levels_.four.value);
    for (int g = 0; g < 8; g += 2) {
      vi low[kQuad], high[kQuad];
      load_bytes(codes + g * 16, low);
      load_bytes(codes + g * 16 + 16, high);
      sink(g * kScaleGroup, two_groups<28>(low, high, 7, table, scales + g));
      for (int j = 0; j < kQuad; ++j) {
        low[j] = low[j] >> 4;
        high[j] = high[j] >> 4;
      }
      sink(g * kScaleGroup + kPairs, two_groups<28>(low, high, 7, table, scales + g + 8));
    }
  }

  template <class Sink>
  FL_INLINE void decode2(const uint8_t *codes, const float *scales, const Sink &sink) const {
    const Lookup<8> table(levels_.two.value);
    for (int g = 0; g < 4; g += 2) {
      vi low[kQuad], high[kQuad];
      load_bytes(codes + g * 16, low);
      load_bytes(codes + g * 16 + 16, high);
      for (int k = 0; k < 4; ++k) {
        sink((g + 4 * k) * kScaleGroup, two_groups<30>(low, high, 1, table, scales + g + 4 * k));
        for (int j = 0; j < kQuad; ++j) {
          low[j] = low[j] >> 2;
          high[j] = high[j] >> 2;
        }
      }
    }
  }

  const DynamiqLevels &levels_;
  const DynamiqKeys &keys_;
  int64_t groups_;
  uint64_t offset_;  // number of the first super-group
  bool flat_;
};

// The sum over a super-group (codecs/dynamiq/dynamiq.h).
FL_INLINE float sum_of(const vf *v) {
  vf sums[kSuperGroup / kLanes / 2];
  for (int i = 0; i < kSuperGroup / kLanes / 2; ++i) sums[i] = add_pairs(v[2 * i], v[2 * i + 1], AllLanes{});
  for (int n = kSuperGroup / kLanes / 4; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) sums[i] = add_pairs(sums[2 * i], sums[2 * i + 1], AllLanes{});
  for (int n = kLanes; n > 1; n /= 2) sums[0] = add_pairs(sums[0], sums[0], AllLanes{});
  return sums[0][0];
}

template <class T>
void dynamiq_stats(const SuperGroupStats &job, int64_t begin, int64_t end) {
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = group * kSuperGroup, left = job.numel - first;
    const int n = left < kSuperGroup ? int(left) : kSuperGroup;
    const T *x = static_cast<const T *>(job.x) + first;
    vf v[kSuperGroup / kLanes]{};
    Ahead ahead = Ahead::behind(x + kFarAhead / sizeof(T), n);
    for_each_block(n, [&](int i, auto access) FL_LAMBDA {
      ahead.fetch(kBlock * int(sizeof(T)) / 64);
      Block b = access.load(x + i);
      if (job.residual) b = b + access.load(job.residual + first + i);
      for (int j = 0; j < kVectors; ++j) v[i / kLanes + j] = b.v[j];
    });
    job.means[group] = fl::canonical(sum_of(v) / float(n));
    for (vf &each : v) each *= each;
    job.squares[group] = fl::canonical(sum_of(v));
  }
}

}  // namespace fl::FL_ISA
