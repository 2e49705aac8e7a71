// What the kernels of the `int` codec share: their arguments and the sum over messages.
#pragma once

#include "arguments.h"
#include "int_codes.cuh"
#include "launch.cuh"

namespace fl {

inline IntLayout int_layout(const fl_spec &spec) {
  int log2_group = 0;
  while (uint32_t(1) << log2_group < spec.param[1]) ++log2_group;
  return {spec.numel, group_count(spec), log2_group, int(spec.param[0])};
}

inline IntMessages int_messages(const fl_messages &m) {
  return {static_cast<float *>(m.plane[0]), static_cast<uint8_t *>(m.plane[1]), m.stride, m.count};
}

// Adds all messages to v in their order. While one is decoded the bytes of the next two are on their way.
template <bool kTransform>
FL_DEVICE void add_messages(const IntLayout &layout, const IntMessages &in, const Place &at, float (&v)[kBlock]) {
  Packed next = {}, after = {};
  if (in.count > 0) next = load_packed(layout, in, 0, at);
  if (in.count > 1) after = load_packed(layout, in, 1, at);
#pragma unroll 1
  for (int64_t m = 0; m < in.count; ++m) {
    const Packed packed = next;
    next = after;
    if (m + 2 < in.count) after = load_packed(layout, in, m + 2, at);
    uint32_t bytes[kWords];
    unpack_codes(layout, packed, at, bytes);
    const float factor = decode_scale(packed.scale, layout.bits, kTransform);
    add_dequantized<kTransform>(bytes, code_bias(layout.bits), factor, v);
  }
}

// The same of messages of another layout, one with the transform or without.
FL_DEVICE void add_foreign_messages(const IntLayout &layout, bool transformed, const IntMessages &in, const Place &at,
                                    float (&v)[kBlock]) {
  const Place there = place_in(layout, at);
  Packed next = {};
  if (in.count > 0) next = load_alone(layout, in, 0, there);
#pragma unroll 1
  for (int64_t m = 0; m < in.count; ++m) {
    const Packed packed = next;
    if (m + 1 < in.count) next = load_alone(layout, in, m + 1, there);
    uint32_t bytes[kWords];
    unpack_alone(layout, packed, there, bytes);
    const float factor = decode_scale(packed.scale, layout.bits, transformed);
    if (transformed)
      add_dequantized<true>(bytes, code_bias(layout.bits), factor, v);
    else
      add_dequantized<false>(bytes, code_bias(layout.bits), factor, v);
  }
}

}  // namespace fl
