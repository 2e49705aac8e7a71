// What the kernels of the `int` codec share: their arguments and the sum over messages.
#pragma once

#include "arguments.h"
#include "cuda/launch.cuh"
#include "cuda/owned.cuh"
#include "int_codes.cuh"

namespace fl {

inline IntLayout int_layout(const fl_spec &spec) {
  int log2_group = 0;
  while (uint32_t(1) << log2_group < spec.param[1]) ++log2_group;
  return {spec.numel, group_count(spec), log2_group, int(spec.param[0])};
}

inline IntMessages int_messages(const fl_messages &m) {
  return {static_cast<float *>(m.plane[0]), static_cast<uint8_t *>(m.plane[1]), m.stride, m.count};
}

// Brings a tile of all messages into the device's cache.
FL_DEVICE void fetch_messages_ahead(const IntLayout &layout, const IntMessages &in, int64_t tile) {
  const int64_t group = tile * kTile >> layout.log2_group;
  if (group >= layout.groups) return;
  const int lane = lane_index(), lines = layout.bits, each = kLanes / lines;
  const int64_t codes = tile * (kTile / 8) * layout.bits;
  for (int64_t m = lane / lines; m < in.count && lane < each * lines; m += each)
    fetch_ahead(in.codes + m * in.stride + codes + lane % lines * 128, 1, 0);
  for (int64_t m = lane; m < in.count; m += kLanes) fetch_ahead(byte_offset(in.scales, m * in.stride) + group, 1, 0);
}

// v = the elements of x, 0 where it is null, plus all messages in their order: core/int_group.h. While one is decoded the bytes
// of the next, or the next two, are on their way.
template <bool kTransform, int kAhead>
FL_DEVICE void sum_messages(const IntLayout &layout, const IntMessages &in, uint32_t dtype, const void *x,
                            const Place &at, int lane, float (&v)[kBlock]) {
  load_or_zero(dtype, kTransform ? nullptr : x, layout.numel, at.first, lane, v);
  Packed coming[kAhead] = {};
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (i < in.count) coming[i] = load_packed(layout, in, i, at);
#pragma unroll 1
  for (int64_t m = 0; m < in.count; ++m) {
    const Packed packed = coming[0];
    if (kAhead > 1) coming[0] = coming[kAhead - 1];
    if (m + kAhead < in.count) coming[kAhead - 1] = load_packed(layout, in, m + kAhead, at);
    uint32_t bytes[kWords];
    unpack_codes(layout, packed, at, bytes);
    const float factor = decode_scale(packed.scale, layout.bits, kTransform);
    add_dequantized(bytes, code_bias(layout.bits), factor, v);
  }
  if constexpr (kTransform) {
    hadamard32(v);
    add_elements(dtype, x, layout.numel, at.first, lane, v);
  }
}

// v = the sum of messages of another layout, one with the transform or without.
FL_DEVICE void sum_foreign_messages(const IntLayout &layout, bool transformed, const IntMessages &in, const Place &at,
                                    float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = 0.0f;
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
    add_dequantized(bytes, code_bias(layout.bits), factor, v);
  }
  if (transformed) hadamard32(v);
}

}  // namespace fl
