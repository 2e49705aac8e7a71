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

// v += x, unless x is null.
FL_DEVICE void add_elements(uint32_t dtype, const void *x, int64_t numel, int64_t first, int lane, float (&v)[kBlock]) {
  if (!x) return;
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    with_block<E>(static_cast<const typename E::Bits *>(x), numel, first, lane,
                  [&](int i, float value) { v[i] += value; });
  });
}

// Decoding makes something of the padding too; encoding starts from zeros there.
FL_DEVICE void clear_padding(float (&v)[kBlock], int64_t count) {
  if (count >= kBlock) return;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = i < count ? v[i] : 0.0f;
}

FL_DEVICE void add_residual(const float *residual, int64_t numel, int64_t first, int lane, float (&v)[kBlock]) {
  with_block<F32>(reinterpret_cast<const uint32_t *>(residual), numel, first, lane,
                  [&](int i, float kept) { v[i] += kept; });
}

FL_DEVICE void update_residual(float *residual, int64_t numel, int64_t first, int lane, const float (&wanted)[kBlock],
                               const float (&sent)[kBlock]) {
  uint32_t *bits = reinterpret_cast<uint32_t *>(residual);
  fetch_blocks<F32>(bits, numel, first, lane);
#pragma unroll
  for (int j = 0; j < kChunks<F32>; ++j) {
    Chunk &chunk = chunk_of<kChunks<F32>>(lane, j);
    Chunk kept = chunk;
#pragma unroll
    for (int i = 0; i < kChunk<F32>; ++i) {
      const int at = j * kChunk<F32> + i;
      kept.word[i] = float_bits(residual_after(wanted[at], sent[at], bits_float(kept.word[i])));
    }
    chunk = kept;
  }
  meet();
  bring_blocks_back<F32>(bits, numel, first, lane);
}

FL_DEVICE void put_floats(Chunk &chunk, const float *v) {
  chunk = {{float_bits(v[0]), float_bits(v[1]), float_bits(v[2]), float_bits(v[3])}};
}

FL_DEVICE void take_floats(const Chunk &chunk, float *v) {
  const Chunk c = chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = bits_float(c.word[i]);
}

// Stages of the transform that cross lanes, for blocks of `width` of them, after hadamard32.
// Up to eight lanes, `low` apart, pass their values through shared memory, so that each has the same places of all their
// blocks: chunk `idx` of its own is then one of lane idx % count.
FL_DEVICE void hadamard_over_lanes(float (&v)[kBlock], int width, int lane) {
  constexpr int kParts = kChunks<F32>;
  for (int low = 1; low < width; low *= kParts) {
    const int count = width / low < kParts ? width / low : kParts, digit = lane / low & (count - 1);
    const int base = lane - digit * low, places = kParts / count;
    const auto place = [&](int idx) -> Chunk & {
      return chunk_of<kParts>(base + (idx & (count - 1)) * low, digit * places + idx / count);
    };
#pragma unroll
    for (int j = 0; j < kParts; ++j) put_floats(chunk_of<kParts>(lane, j), v + 4 * j);
    meet();
#pragma unroll
    for (int idx = 0; idx < kParts; ++idx) take_floats(place(idx), v + 4 * idx);
#pragma unroll
    for (int h = 1; h < kParts; h *= 2) {
      if (h >= count) continue;
#pragma unroll
      for (int idx = 0; idx < kParts; ++idx)
        if (!(idx & h))
#pragma unroll
          for (int i = 4 * idx; i < 4 * idx + 4; ++i) {
            const float a = v[i], b = v[i + 4 * h];
            v[i] = a + b;
            v[i + 4 * h] = a - b;
          }
    }
#pragma unroll
    for (int idx = 0; idx < kParts; ++idx) put_floats(place(idx), v + 4 * idx);
    meet();
#pragma unroll
    for (int j = 0; j < kParts; ++j) take_floats(chunk_of<kParts>(lane, j), v + 4 * j);
    meet();
  }
}

// Byte kByte of each of four integers.
template <int kByte = 0>
FL_DEVICE uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kBoth = 0x0040 + 0x0011 * kByte;
  return __byte_perm(__byte_perm(a, b, kBoth), __byte_perm(c, d, kBoth), 0x5410);
}

// a * b + c, for products that are exact: the CPU may multiply and add. It is written in assembly because the compiler is told
// to make no fused multiply-add of its own, and tests look for one outside of this.
FL_DEVICE float add_exact_product(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Byte i less a bias: in the low bits of 2^23 it adds exactly itself.
FL_DEVICE float unsigned_byte(uint32_t bytes, int i, float bias) {
  return bits_float(__byte_perm(bytes, 0x4b000000u, 0x7440 + i)) - (8388608.0f + bias);
}

// max(a, |b|); a NaN if there is one.
FL_DEVICE float larger_magnitude(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(fabsf(b)));
  return a;
#else
  const uint32_t magnitude = float_bits(b) & 0x7fffffffu;
  return magnitude > float_bits(a) ? bits_float(magnitude) : a;
#endif
}

// The largest magnitude, as bits; those of a NaN if there is one.
FL_DEVICE uint32_t largest_of(const float (&v)[kBlock]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) amax = larger_magnitude(amax, v[i]);
  return float_bits(amax);
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
