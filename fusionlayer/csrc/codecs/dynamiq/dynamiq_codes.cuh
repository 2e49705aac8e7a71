// Messages of the `dynamiq` codec as a warp sees them: it owns a super-group, of which lane l has elements 4 l .. 4 l + 3 and
// 128 + 4 l .. 128 + 4 l + 3. The arithmetic is codecs/dynamiq/dynamiq.h.
#pragma once

#include "arguments.h"
#include "cuda/owned.cuh"
#include "cuda/strip_io.cuh"
#include "dynamiq.h"
#include "residual.h"

namespace fl {

constexpr int kOwned = kSuperGroup / kLanes;
constexpr int kSide = kOwned / 2;  // a lane's elements in each half of a super-group

// What y is compared with where the level below it has 4 bits; see Levels of codecs/dynamiq/dynamiq.h.
struct alignas(8) Step {
  float low, size;
};

constexpr uint32_t kEighths4 = 7 << 3;  // a level of 4 bits, in eighths

// What is looked up by values: what codes of each width stand for, signs included (of 2 bits 0 and 1), and levels of 4 bits.
struct Tables {
  float value8[256], value4[16], value2[4];
  Step steps4[8];

  // That of the level of which these are the bits, and others that do not matter.
  FL_DEVICE const Step &step4(uint32_t bits) const {
    return *reinterpret_cast<const Step *>(reinterpret_cast<const char *>(steps4) + (bits & kEighths4));
  }

  template <int kBits>
  FL_DEVICE const float *values() const {
    return kBits == 8 ? value8 : kBits == 4 ? value4 : value2;
  }
};

// What kernels need of codecs/dynamiq/dynamiq.h's levels.
struct DeviceLevels {
  float curve8[kCurve8], curve4[kCurve4];
  float span8, span4;
  Tables tables;
};

inline DeviceLevels device_levels(uint32_t epsilons) {
  const DynamiqLevels all = dynamiq_levels(epsilons);
  DeviceLevels d;
  std::memcpy(d.curve8, all.eight.curve, sizeof d.curve8);
  std::memcpy(d.curve4, all.four.curve, sizeof d.curve4);
  d.span8 = all.eight.span, d.span4 = all.four.span;
  const auto fill = [](const float *level, float *value, int count) {
    for (int code = 0; code < count; ++code) value[code] = signed_value(level[code % (count / 2)], code >= count / 2);
  };
  const float two[2] = {0.0f, 1.0f};
  fill(all.eight.value, d.tables.value8, 256);
  fill(all.four.value, d.tables.value4, 16);
  fill(two, d.tables.value2, 4);
  for (int r = 0; r < 8; ++r) d.tables.steps4[r] = {all.four.low[r], all.four.step[r]};
  return d;
}

struct DynamiqLayout {
  int64_t numel;   // of a message
  int64_t groups;  // super-groups of a message
  int64_t room;    // bytes of plane 3
  uint64_t first;  // number of the first super-group of the first message
  bool flat;
};

inline DynamiqLayout dynamiq_layout(const fl_spec &spec) {
  return {spec.numel, super_groups(spec.numel), int64_t(spec.param[1]) * kLeastCodes,
          uint64_t(spec.offset) / kSuperGroup, (spec.param[0] & FL_DYNAMIQ_FLAT) != 0};
}

// The tables in shared memory, the same for all warps of a thread block: all of them call this first.
FL_DEVICE const Tables &share_tables(const DeviceLevels &given) {
  __shared__ Tables tables;
  const float *from = reinterpret_cast<const float *>(&given.tables);
  float *to = reinterpret_cast<float *>(&tables);
  for (int i = int(threadIdx.x); i < int(sizeof(Tables) / sizeof(float)); i += kThreads) to[i] = from[i];
  meet_all();
  return tables;
}

// Elements -------------------------------------------------------------------------------------------------------------

// A lane's elements as they lie in memory, so that nothing waits for them before they are used: f32 in all words, 16-bit
// types in the first four.
struct RawGroup {
  uint32_t word[kOwned];
};

template <class Bits>
FL_DEVICE RawGroup load_wide(const Bits *start) {
  constexpr int kWords = kSide * int(sizeof(Bits)) / 4;  // of each half
  RawGroup raw;
  load_words(start, raw.word);
  load_words(start + kPairs, raw.word + kWords);
  return raw;
}

template <class Bits>
FL_DEVICE RawGroup load_ragged(const Bits *start, int64_t left) {
  constexpr int kPerWord = 4 / int(sizeof(Bits)), kWords = kSide / kPerWord;
  RawGroup raw;
#pragma unroll
  for (int w = 0; w < 2 * kWords; ++w) {
    raw.word[w] = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int at = (w < kWords ? 0 : kPairs) + w % kWords * kPerWord + j;
      if (at < left) raw.word[w] |= uint32_t(start[at]) << 16 * j;
    }
  }
  return raw;
}

// The super-groups from `first` to `end` of an array, one after another; zeros where it is null, and where it has ended.
class Source {
 public:
  FL_DEVICE Source(uint32_t dtype, const void *x, int64_t numel, int64_t first, int64_t end, int lane)
      : bytes_(dtype == FL_F32 ? 4 : 2), there_(x != nullptr) {
    const int64_t element = opaque(first * kSuperGroup + kSide * lane);
    at_ = static_cast<const char *>(x) + element * bytes_;
    left_ = numel - element;
    wide_ = is_aligned(at_, 4 * bytes_) && end * kSuperGroup <= numel;
  }

  FL_DEVICE RawGroup next() {
    RawGroup raw = {};
    if (!there_) return raw;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(at_);
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(at_);
    if (wide_)
      raw = bytes_ == 4 ? load_wide(words) : load_wide(halves);
    else
      raw = bytes_ == 4 ? load_ragged(words, left_) : load_ragged(halves, left_);
    at_ += kSuperGroup * bytes_;
    left_ -= kSuperGroup;
    return raw;
  }

 private:
  const char *at_;
  int64_t left_;
  int bytes_;
  bool there_, wide_;
};

FL_DEVICE void widen(uint32_t dtype, const RawGroup &raw, float (&v)[kOwned]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    constexpr int kPerWord = 4 / int(sizeof(Bits));
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v[i] = E::widen(Bits(raw.word[i / kPerWord] >> 16 * (i % kPerWord)));
  });
}

template <class Bits>
FL_DEVICE void store_owned(Bits *x, int64_t numel, int64_t group, int lane, const Bits (&b)[kOwned]) {
  const int64_t element = opaque(group * kSuperGroup + kSide * lane), left = numel - element;
  Bits *start = x + element;
  if (is_aligned(start, 4 * sizeof(Bits)) && numel - group * kSuperGroup >= kSuperGroup) {
    store_four(start, b);
    store_four(start + kPairs, b + kSide);
  } else {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int at = i < kSide ? i : kPairs + i - kSide;
      if (at < left) start[at] = b[i];
    }
  }
}

FL_DEVICE void store_super_group(uint32_t dtype, void *x, int64_t numel, int64_t group, int lane,
                                 const float (&v)[kOwned]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits b[kOwned];
    narrow_all<E>(v, b);
    store_owned(static_cast<typename E::Bits *>(x), numel, group, lane, b);
  });
}

FL_DEVICE void load_residual(const float *residual, int64_t numel, int64_t group, int lane, float (&v)[kOwned]) {
  widen(FL_F32, Source(FL_F32, residual, numel, group, group + 1, lane).next(), v);
}

// Codes ----------------------------------------------------------------------------------------------------------------

// Where codes lie that a warp goes through: lane l looks up super-group base + l % kBatch of message l / kBatch, and all get
// it from there.
constexpr int kBatch = 8;
constexpr int kLookedUp = kLanes / kBatch;  // messages

struct Places {
  uint32_t unit;  // of kLeastCodes; kNowhere outside the room
  int bits;

  static constexpr uint32_t kNowhere = 0xffffffffu;

  FL_DEVICE Places(const DynamiqLayout &layout, const fl_messages &messages, int64_t message, int64_t base, int lane)
      : unit(kNowhere), bits(2) {
    const int64_t group = base + lane % kBatch, from = message + lane / kBatch;
    if (group >= layout.groups || from >= messages.count) return;
    const CodePlace place = code_place(dynamiq_message(messages, from).runs, layout.groups, group);
    bits = place.bits;
    if (place.offset >= 0 && place.offset + code_bytes(place.bits) <= layout.room)
      unit = uint32_t(place.offset / kLeastCodes);
  }
};

// One of them, in all lanes.
struct Place {
  int64_t offset;  // in plane 3
  int bits;
  bool inside;

  FL_DEVICE Place(const Places &places, int message, int64_t group)
      : bits(int(shuffle(uint32_t(places.bits), message * kBatch + (int(group) & (kBatch - 1))))) {
    const uint32_t unit = shuffle(places.unit, message * kBatch + (int(group) & (kBatch - 1)));
    offset = int64_t(unit) * kLeastCodes;
    inside = unit != Places::kNowhere;
  }
};

template <int kBits>
struct Width {
  static constexpr int bits = kBits;
};

// f(Width<bits>()): the same for all lanes.
template <class F>
FL_DEVICE void with_width(int bits, F f) {
  if (bits == 8)
    f(Width<8>());
  else if (bits == 4)
    f(Width<4>());
  else
    f(Width<2>());
}

FL_DEVICE float absolute(float x) {
#ifdef __CUDA_ARCH__
  return fabsf(x);
#else
  return bits_float(float_bits(x) & 0x7fffffffu);
#endif
}

// The integer part of 0 <= v < 2^22, in the lower half of the word.
FL_DEVICE uint32_t whole_part(float v) {
#ifdef __CUDA_ARCH__
  return float_bits(__fadd_rz(v, 8388608.0f));
#else
  return float_bits(8388608.0f) + uint32_t(v);
#endif
}

// Eighths of 0 <= v < 2^16, likewise: the integer part begins at bit 3.
FL_DEVICE uint32_t eighths(float v) {
#ifdef __CUDA_ARCH__
  return float_bits(__fadd_rz(v, 1048576.0f));
#else
  return float_bits(1048576.0f) + uint32_t(8.0f * v);
#endif
}

// In the lowest byte the code of a value without its sign, of 4 bits times 8; see codecs/dynamiq/dynamiq.h.
template <int kBits>
FL_DEVICE uint32_t level_code(const DeviceLevels &given, const Tables &tables, float x, float factor, float w) {
  constexpr uint32_t kZero = 0x4b000000u;  // of whole_part
  const float y = absolute(x) * factor;
  if constexpr (kBits == 2) {
    return y > w - kFirstPlace;
  } else if constexpr (kBits == 8) {
    const uint32_t r = whole_part(curve_at<kCurve8>(given.curve8, y) + (1.0f + kFirstPlace - w));
    return r < kZero + 127 ? r : kZero + 127;
  } else {
    const uint32_t r = eighths(curve_at<kCurve4>(given.curve4, y)) & kEighths4;
    const Step step = tables.step4(r);
    return y > step.low + w * step.size ? r + 8 : r;
  }
}

// The lowest bytes of four.
FL_DEVICE uint32_t four_bytes(const uint32_t *word) {
  return __byte_perm(__byte_perm(word[0], word[1], 0x0040), __byte_perm(word[2], word[3], 0x0040), 0x5410);
}

// The codes of four values, of what level_code makes.
template <int kBits>
FL_DEVICE uint32_t four_codes(const uint32_t *code, const float *v) {
  const uint32_t top = __byte_perm(__byte_perm(float_bits(v[0]), float_bits(v[1]), 0x0073),
                                   __byte_perm(float_bits(v[2]), float_bits(v[3]), 0x0073), 0x5410);
  const uint32_t levels = kBits == 4 ? four_bytes(code) >> 3 : four_bytes(code);
  return levels | (top & 0x80808080u) >> (8 - kBits);
}

template <int kBits>
FL_DEVICE void store_codes(uint8_t *codes, int lane, uint32_t first, uint32_t second) {
  uint32_t *words = reinterpret_cast<uint32_t *>(codes);
  if constexpr (kBits == 8) {
    words[lane] = first;
    words[kLanes + lane] = second;
  } else if constexpr (kBits == 4) {
    words[lane] = first | second << 4;
  } else {
    const uint32_t both = first | second << 4, other = shuffle_xor(both, kLanes / 2);
    if (lane < kLanes / 2) words[lane] = both | other << 2;
  }
}

template <int kBits>
FL_DEVICE void load_codes(const uint8_t *codes, int lane, uint32_t (&code)[kOwned]) {
  const uint32_t *words = reinterpret_cast<const uint32_t *>(codes);
  uint32_t first, second;
  if constexpr (kBits == 8) {
    first = words[lane];
    second = words[kLanes + lane];
  } else if constexpr (kBits == 4) {
    const uint32_t both = words[lane];
    first = both & 0x0f0f0f0fu;
    second = both >> 4 & 0x0f0f0f0fu;
  } else {
    const uint32_t both = words[lane % (kLanes / 2)] >> (lane < kLanes / 2 ? 0 : 2);
    first = both & 0x03030303u;
    second = both >> 4 & 0x03030303u;
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    code[i] = first >> 8 * i & 255;
    code[kSide + i] = second >> 8 * i & 255;
  }
}

// The scales of the lane's two groups.
FL_DEVICE void load_group_scales(const DynamiqLayout &layout, const DynamiqMessage &m, int64_t group, int lane,
                                 float &low, float &high) {
  const int64_t first = group * kScaleGroups + lane / 4;
  if (layout.flat) {
    const uint16_t *scales = reinterpret_cast<const uint16_t *>(m.group_scales);
    low = scale_value(scales[first / 2]);
    high = scale_value(scales[(first + kScaleGroups / 2) / 2]);
  } else {
    const float unit = scale_value(m.scales[group]) / 255.0f;
    low = float(m.group_scales[first]) * unit;
    high = float(m.group_scales[first + kScaleGroups / 2]) * unit;
  }
}

FL_DEVICE void decode_super_group(const DynamiqLayout &layout, const Tables &tables, const DynamiqMessage &m,
                                  const Place &place, int64_t group, int lane, float (&v)[kOwned]) {
  float low, high;
  load_group_scales(layout, m, group, lane, low, high);
  with_width(place.bits, [&](auto width) {
    constexpr int kBits = decltype(width)::bits;
    uint32_t code[kOwned] = {};
    if (place.inside) load_codes<kBits>(m.codes + place.offset, lane, code);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v[i] = tables.values<kBits>()[code[i]] * (i < kSide ? low : high);
  });
}

}  // namespace fl
