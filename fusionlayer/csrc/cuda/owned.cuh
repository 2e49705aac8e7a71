// The 32 values of the block that a lane owns: where they come from, and what encoding them lost.
#pragma once

#include "block_io.cuh"
#include "residual.h"

namespace fl {

// v = x, or 0 where x is null.
FL_DEVICE void load_or_zero(uint32_t dtype, const void *x, int64_t numel, int64_t first, int lane, float (&v)[kBlock]) {
  if (x) {
    load_block(dtype, x, numel, first, lane, v);
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = 0.0f;
  }
}

// Decoding makes something of the padding too; encoding starts from zeros there.
FL_DEVICE void clear_padding(float (&v)[kBlock], int64_t count) {
  if (count >= kBlock) return;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = i < count ? v[i] : 0.0f;
}

constexpr int kResidualRows = kBlock / kRow<F32>;

FL_DEVICE void add_residual(const float *residual, int64_t numel, int64_t first, int lane, float (&v)[kBlock]) {
#pragma unroll
  for (int row = 0; row < kResidualRows; ++row) {
    float part[kRow<F32>];
    load_row<F32>(reinterpret_cast<const uint32_t *>(residual), numel, first, row, lane, part);
#pragma unroll
    for (int i = 0; i < kRow<F32>; ++i) v[row * kRow<F32> + i] += part[i];
  }
}

FL_DEVICE void update_residual(float *residual, int64_t numel, int64_t first, int lane, const float (&wanted)[kBlock],
                               const float (&sent)[kBlock]) {
#pragma unroll
  for (int row = 0; row < kResidualRows; ++row) {
    uint32_t *bits = reinterpret_cast<uint32_t *>(residual);
    float old[kRow<F32>];
    load_row<F32>(bits, numel, first, row, lane, old);
    Chunk slot[4] = {};
#pragma unroll
    for (int i = 0; i < kRow<F32>; ++i) {
      const int j = row * kRow<F32> + i;
      add_element<F32>(slot[i / 4], i % 4, float_bits(residual_after(wanted[j], sent[j], old[i])));
    }
    store_row<F32>(bits, numel, first, row, lane, slot);
  }
}

// Stages of the transform that cross lanes: hadamard of core/block_scale.h, after
// hadamard32.
FL_DEVICE void hadamard_over_lanes(float (&v)[kBlock], int width, int lane) {
  for (int mask = 1; mask < width; mask *= 2)
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float other = bits_float(shuffle_xor(float_bits(v[i]), mask));
      v[i] = lane & mask ? other - v[i] : v[i] + other;
    }
}

// The largest magnitude, as bits.
FL_DEVICE uint32_t largest_of(const float (&v)[kBlock]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = float_bits(v[i]) & 0x7fffffffu;
    amax = magnitude > amax ? magnitude : amax;
  }
  return amax;
}

// The largest over groups of `width` lanes, a power of two, in all of them.
FL_DEVICE uint32_t max_over_lanes(uint32_t v, int width) {
  for (int mask = 1; mask < width; mask *= 2) {
    const uint32_t other = shuffle_xor(v, mask);
    v = other > v ? other : v;
  }
  return v;
}

}  // namespace fl
