// Messages of the `dynamiq` codec as a warp sees them: it owns a super-group, of which lane l has elements 4 l .. 4 l + 3 and
// 128 + 4 l .. 128 + 4 l + 3. The arithmetic is core/dynamiq.h.
#pragma once

#include "arguments.h"
#include "dynamiq.h"
#include "residual.h"
#include "strip_io.cuh"

namespace fl {

constexpr int kOwned = kSuperGroup / kLanes;
constexpr int kSide = kOwned / 2;  // a lane's elements in each half of a super-group

// What kernels need of core/dynamiq.h's levels: those of 2 bits are 0 and 1.
struct DeviceLevels {
  float value8[128], value4[8], y4[8];
  float curve8[kCurve8], curve4[kCurve4];
  float span8, span4, base4, ratio4;
};

inline DeviceLevels device_levels(uint32_t epsilons) {
  const DynamiqLevels all = dynamiq_levels(epsilons);
  DeviceLevels d;
  std::memcpy(d.value8, all.eight.value, sizeof d.value8);
  std::memcpy(d.value4, all.four.value, sizeof d.value4);
  std::memcpy(d.y4, all.four.y, sizeof d.y4);
  std::memcpy(d.curve8, all.eight.curve, sizeof d.curve8);
  std::memcpy(d.curve4, all.four.curve, sizeof d.curve4);
  d.span8 = all.eight.span;
  d.span4 = all.four.span, d.base4 = all.four.base, d.ratio4 = all.four.ratio;
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

// Tables that each warp has in shared memory.
struct Tables {
  DeviceLevels *levels;

  FL_DEVICE Tables(const DeviceLevels &given, int lane) {
    __shared__ DeviceLevels all[kWarps];
    levels = all + threadIdx.x / kLanes;
    const float *from = reinterpret_cast<const float *>(&given);
    float *to = reinterpret_cast<float *>(levels);
    for (int i = lane; i < int(sizeof(DeviceLevels) / sizeof(float)); i += kLanes) to[i] = from[i];
    meet();
  }
};

// Elements -------------------------------------------------------------------------------------------------------------

template <class Bits>
FL_DEVICE void load_owned(const Bits *x, int64_t numel, int64_t group, int lane, Bits (&b)[kOwned]) {
  const int64_t element = opaque(group * kSuperGroup + kSide * lane), left = numel - element;
  const Bits *start = x + element;
  if (is_aligned(start, 4 * sizeof(Bits)) && numel - group * kSuperGroup >= kSuperGroup) {
    load_four(start, b);
    load_four(start + kPairs, b + kSide);
  } else {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int at = i < kSide ? i : kPairs + i - kSide;
      b[i] = at < left ? start[at] : Bits(0);
    }
  }
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

// v = x, or 0 where x is null, and where there are no elements.
FL_DEVICE void load_super_group(uint32_t dtype, const void *x, int64_t numel, int64_t group, int lane,
                                float (&v)[kOwned]) {
#pragma unroll
  for (int i = 0; i < kOwned; ++i) v[i] = 0.0f;
  if (!x) return;
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits b[kOwned];
    load_owned(static_cast<const typename E::Bits *>(x), numel, group, lane, b);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v[i] = E::widen(b[i]);
  });
}

FL_DEVICE void store_super_group(uint32_t dtype, void *x, int64_t numel, int64_t group, int lane,
                                 const float (&v)[kOwned]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits b[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) b[i] = E::narrow(v[i]);
    store_owned(static_cast<typename E::Bits *>(x), numel, group, lane, b);
  });
}

FL_DEVICE void load_residual(const float *residual, int64_t numel, int64_t group, int lane, float (&v)[kOwned]) {
  uint32_t b[kOwned];
  load_owned(reinterpret_cast<const uint32_t *>(residual), numel, group, lane, b);
#pragma unroll
  for (int i = 0; i < kOwned; ++i) v[i] = bits_float(b[i]);
}

// Codes ----------------------------------------------------------------------------------------------------------------

FL_DEVICE bool inside(const DynamiqLayout &layout, const CodePlace &place) {
  return place.offset >= 0 && place.offset + code_bytes(place.bits) <= layout.room;
}

// The code of a value; see level_number of core/dynamiq.h.
FL_DEVICE uint32_t level_code(const DeviceLevels &d, int bits, float x, float factor, float u) {
  const float y = bits_float(float_bits(x) & 0x7fffffffu) * factor;
  const uint32_t sign = float_bits(x) >> 31 << (bits - 1);
  if (bits == 2) return sign | uint32_t(y > u);
  if (bits == 8) {
    const int r = int(curve_at<kCurve8>(d.curve8, y) + (1.0f - u));
    return sign | uint32_t(r < 127 ? r : 127);
  }
  int r = int(curve_at<kCurve4>(d.curve4, y));
  r = r < 6 ? r : 6;
  const float below = d.y4[r], step = d.base4 + d.ratio4 * below;
  return sign | uint32_t(r + (y > below + u * step));
}

FL_DEVICE float code_value(const DeviceLevels &d, int bits, uint32_t code, float scale) {
  const uint32_t r = code & ((1u << (bits - 1)) - 1);
  const float level = bits == 8 ? d.value8[r] : bits == 4 ? d.value4[r] : float(r);
  return signed_value(level * scale, code >> (bits - 1) & 1);
}

FL_DEVICE void store_codes(uint8_t *codes, int bits, int lane, const uint32_t (&code)[kOwned]) {
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    first |= code[i] << 8 * i;
    second |= code[kSide + i] << 8 * i;
  }
  uint32_t *words = reinterpret_cast<uint32_t *>(codes);
  const uint32_t both = first | second << 4, other = shuffle_xor(both, kLanes / 2);
  if (bits == 8) {
    words[lane] = first;
    words[kLanes + lane] = second;
  } else if (bits == 4) {
    words[lane] = both;
  } else if (lane < kLanes / 2) {
    words[lane] = both | other << 2;
  }
}

FL_DEVICE void load_codes(const uint8_t *codes, int bits, int lane, uint32_t (&code)[kOwned]) {
  const uint32_t *words = reinterpret_cast<const uint32_t *>(codes);
  uint32_t first, second;
  if (bits == 8) {
    first = words[lane];
    second = words[kLanes + lane];
  } else if (bits == 4) {
    first = words[lane] & 0x0f0f0f0fu;
    second = words[lane] >> 4 & 0x0f0f0f0fu;
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
    low = scale_value(scales[first]);
    high = scale_value(scales[first + kScaleGroups / 2]);
  } else {
    const float unit = scale_value(m.scales[group]) / 255.0f;
    low = float(m.group_scales[first]) * unit;
    high = float(m.group_scales[first + kScaleGroups / 2]) * unit;
  }
}

FL_DEVICE void decode_super_group(const DynamiqLayout &layout, const DeviceLevels &levels, const DynamiqMessage &m,
                                  int64_t group, int lane, float (&v)[kOwned]) {
  const CodePlace place = code_place(m.runs, layout.groups, group);
  uint32_t code[kOwned] = {};
  float low, high;
  load_group_scales(layout, m, group, lane, low, high);
  if (inside(layout, place)) load_codes(m.codes + place.offset, place.bits, lane, code);
#pragma unroll
  for (int i = 0; i < kOwned; ++i) v[i] = code_value(levels, place.bits, code[i], i < kSide ? low : high);
}

}  // namespace fl
