// What encoding and decoding of `zip` (codecs/zip/zip.h) share: a warp takes a tile in four steps of 256 elements, of which each
// lane has eight in a row.
#pragma once

#include "arguments.h"
#include "cuda/elements.cuh"
#include "cuda/launch.cuh"
#include "zip.h"

namespace fl {

constexpr int kEight = 8;
constexpr int kStep = kEight * kLanes;
constexpr int kSteps = kZipTile / kStep;

// Bits of f32, or 16 bits of the others.
struct Words {
  uint32_t word[kEight];
};

// Eight elements, the first `count` of which exist.
template <class Bits>
FL_DEVICE void load_eight(const Bits *x, int count, Words &w) {
  if (count >= kEight && is_aligned(x, 16)) {
    Chunk chunk[sizeof(Bits) / 2];
#pragma unroll
    for (int i = 0; i < int(sizeof(Bits) / 2); ++i) chunk[i] = load_chunk(x + i * (16 / sizeof(Bits)));
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (sizeof(Bits) == 4)
        w.word[i] = chunk[i / 4 % (sizeof(Bits) / 2)].word[i % 4];
      else
        w.word[i] = chunk[0].word[i / 2] >> i % 2 * 16 & 0xffff;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) w.word[i] = i < count ? x[opaque(i)] : 0;
  }
}

// Eight elements as they lie in memory, the first `count` of which exist; the others are `fill`.
template <class Bits>
FL_DEVICE void load_filled(const Bits *x, int count, Bits fill, uint32_t (&word)[2 * sizeof(Bits)]) {
  if (count >= kEight && is_aligned(x, 16)) {
#pragma unroll
    for (int i = 0; i < int(sizeof(Bits) / 2); ++i) {
      const Chunk chunk = load_chunk(x + i * (16 / sizeof(Bits)));
#pragma unroll
      for (int j = 0; j < 4; ++j) word[4 * i + j] = chunk.word[j];
    }
  } else {
    constexpr int kOfWord = 4 / sizeof(Bits);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const uint32_t bits = i < count ? x[opaque(i)] : fill;
      word[i / kOfWord] = i % kOfWord ? word[i / kOfWord] | bits << 16 : bits;
    }
  }
}

template <class Bits>
FL_DEVICE void store_eight(Bits *x, int count, const Words &w) {
  if (count >= kEight && is_aligned(x, 16)) {
    Chunk chunk[sizeof(Bits) / 2] = {};
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (sizeof(Bits) == 4)
        chunk[i / 4 % (sizeof(Bits) / 2)].word[i % 4] = w.word[i];
      else
        chunk[0].word[i / 2] |= w.word[i] << i % 2 * 16;
    }
#pragma unroll
    for (int i = 0; i < int(sizeof(Bits) / 2); ++i) store_chunk(x + i * (16 / sizeof(Bits)), chunk[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i)
      if (i < count) x[opaque(i)] = Bits(w.word[i]);
  }
}

FL_DEVICE void load_words(uint32_t dtype, const void *x, int64_t element, int count, Words &w) {
  dtype == FL_F32 ? load_eight(static_cast<const uint32_t *>(x) + element, count, w)
                  : load_eight(static_cast<const uint16_t *>(x) + element, count, w);
}

// Eight bytes at a multiple of 8.
FL_DEVICE void load_bytes(const uint8_t *p, uint32_t (&byte)[kEight]) {
  const uint2 u = *reinterpret_cast<const uint2 *>(p);
#pragma unroll
  for (int i = 0; i < kEight; ++i) byte[i] = (i < 4 ? u.x : u.y) >> i % 4 * 8 & 0xff;
}

FL_DEVICE void store_bytes(uint8_t *p, const uint32_t (&byte)[kEight]) {
  uint32_t half[2] = {};
#pragma unroll
  for (int i = 0; i < kEight; ++i) half[i / 4] |= byte[i] << i % 4 * 8;
  *reinterpret_cast<uint2 *>(p) = make_uint2(half[0], half[1]);
}

// The value of an element's bits, and the bits of what is nearest to a value.
FL_DEVICE float widened(uint32_t dtype, uint32_t word) {
  return dtype == FL_F32    ? bits_float(word)
         : dtype == FL_BF16 ? bf16_to_f32(uint16_t(word))
                            : f16_to_f32(uint16_t(word));
}

FL_DEVICE uint32_t narrowed(uint32_t dtype, float f) {
  return dtype == FL_F32 ? F32::narrow(f) : dtype == FL_BF16 ? Bf16::narrow(f) : F16::narrow(f);
}

}  // namespace fl
