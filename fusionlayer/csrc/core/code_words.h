// Runs of 32 codes of a few bits as words: one byte for each code, and as they lie on the wire (docs/wire_format.md). The
// bits of a code are cut into parts of 4, 2 and 1, from the lowest; in a part of k bits, 4 k bytes long, byte j holds the
// bits of codes j, j + 4 k, j + 8 k, .., the first lowest.
#pragma once

#include "portable.h"

namespace fl {

constexpr int kCodeWords = 8;  // that hold the codes of a run, one byte each

template <int kWidth>
FL_HD void pack_part(const uint32_t (&codes)[kCodeWords], int shift, uint32_t *packed) {
  constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
  FL_UNROLL
  for (int w = 0; w < kWidth; ++w) {
    uint32_t word = 0;
    FL_UNROLL
    for (int q = 0; q < kCodeWords / kWidth; ++q) word |= (codes[w + q * kWidth] >> shift & kMask) << q * kWidth;
    packed[w] = word;
  }
}

template <int kWidth>
FL_HD void unpack_part(const uint32_t *packed, int shift, uint32_t (&codes)[kCodeWords]) {
  constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
  FL_UNROLL
  for (int i = 0; i < kCodeWords; ++i) codes[i] |= (packed[i % kWidth] >> i / kWidth * kWidth & kMask) << shift;
}

template <int kBits>
FL_HD void pack_words(const uint32_t (&codes)[kCodeWords], uint32_t (&packed)[kBits]) {
  if constexpr ((kBits & 4) != 0) pack_part<4>(codes, 0, packed);
  if constexpr ((kBits & 2) != 0) pack_part<2>(codes, kBits & 4, packed + (kBits & 4));
  if constexpr ((kBits & 1) != 0) pack_part<1>(codes, kBits & 6, packed + (kBits & 6));
}

template <int kBits>
FL_HD void unpack_words(const uint32_t (&packed)[kBits], uint32_t (&codes)[kCodeWords]) {
  FL_UNROLL
  for (int i = 0; i < kCodeWords; ++i) codes[i] = 0;
  if constexpr ((kBits & 4) != 0) unpack_part<4>(packed, 0, codes);
  if constexpr ((kBits & 2) != 0) unpack_part<2>(packed + (kBits & 4), kBits & 4, codes);
  if constexpr ((kBits & 1) != 0) unpack_part<1>(packed + (kBits & 6), kBits & 6, codes);
}

}  // namespace fl
