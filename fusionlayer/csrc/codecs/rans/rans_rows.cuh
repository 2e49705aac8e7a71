// What encoding and decoding of `rans` (codecs/rans/rans.h) share: a warp takes a block, row by row, of which each lane has a state
// and eight elements in a row. All warps of a thread block work on one message, of which they share tables.
#pragma once

#include <type_traits>

#include "codecs/zip/zip_tile.cuh"
#include "rans.h"

namespace fl {

static_assert(kRansLanes == kLanes && kRansTurns == kEight, "a lane for each state");

// Calls work(whether a lane has all of its eight elements).
template <class Work>
FL_DEVICE void with_count(int count, const Work &work) {
  if (count >= kEight)
    work(std::true_type{});
  else
    work(std::false_type{});
}

FL_DEVICE uint32_t half_of(uint32_t dtype, uint32_t word) { return dtype == FL_F32 ? word >> 16 : word; }

// Those of a lane's eight symbols.
FL_DEVICE void load_frequencies(const uint8_t *frequencies, int lane, uint32_t (&frequency)[kEight]) {
  const Chunk chunk = load_chunk(frequencies + 16 * lane);
#pragma unroll
  for (int i = 0; i < kEight; ++i) frequency[i] = chunk.word[i / 2] >> i % 2 * 16 & 0xffff;
}

FL_DEVICE void store_words(uint32_t dtype, void *x, int64_t element, int count, const Words &w) {
  if (count <= 0) return;
  if (dtype == FL_F32)
    store_eight(static_cast<uint32_t *>(x) + element, count, w);
  else
    store_eight(static_cast<uint16_t *>(x) + element, count, w);
}

// A lane's bytes of a row, of which `count` exist.
FL_DEVICE void store_told(uint8_t *p, int count, const uint32_t (&byte)[kEight]) {
  if (count >= kEight) return store_bytes(p, byte);
#pragma unroll
  for (int i = 0; i < kEight; ++i)
    if (i < count) p[opaque(i)] = uint8_t(byte[i]);
}

FL_DEVICE void load_told(const uint8_t *p, int count, uint32_t (&byte)[kEight]) {
  if (count >= kEight) return load_bytes(p, byte);
#pragma unroll
  for (int i = 0; i < kEight; ++i) byte[i] = i < count ? p[opaque(i)] : 0;
}

// A lane's six bytes of a whole block's last row.
FL_DEVICE void store_six(uint8_t *row, int lane, const uint32_t (&byte)[kEight]) {
  uint16_t *p = reinterpret_cast<uint16_t *>(row) + 3 * lane;
#pragma unroll
  for (int i = 0; i < 3; ++i) p[i] = uint16_t(byte[kRansCarried + 2 * i] | byte[kRansCarried + 2 * i + 1] << 8);
}

FL_DEVICE void load_six(const uint8_t *row, int lane, uint32_t (&byte)[kEight]) {
  const uint16_t *p = reinterpret_cast<const uint16_t *>(row) + 3 * lane;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    byte[kRansCarried + 2 * i] = p[i] & 0xff;
    byte[kRansCarried + 2 * i + 1] = p[i] >> 8;
  }
}

}  // namespace fl
