// What encoding and decoding of `delta` (codecs/delta/delta.h) share: a warp takes a block, first or last in steps of 512 bytes of its
// elements, of which each lane has 16 bytes in a row. Between them it works on bits (delta_bits.cuh).
#pragma once

#include <type_traits>

#include "arguments.h"
#include "crc.h"
#include "cuda/elements.cuh"
#include "cuda/launch.cuh"
#include "delta.h"

namespace fl {

constexpr int64_t kDeltaWarps = 2048;  // have memory for a block each; more blocks than that wait for one
constexpr int kDeltaGroups = 4;        // of threads on a multiprocessor, at least: then no value leaves the registers
constexpr int kDeltaStep = 16 * kLanes;
constexpr int kDeltaWords = kDeltaBlock / 32;

template <class T>
constexpr int kPerChunk = 16 / int(sizeof(T));  // elements of a lane in a step

// Checksums ---------------------------------------------------------------------------------------------------------------

// What four bits of a register become when it moves on by a step. Each lane has a copy in a bank of its own, so that no
// lane waits for another.
struct DeltaTable {
  uint32_t entry[8][16][kLanes];
  static_assert(sizeof(entry[0][0]) == 1 << 7, "as moved() knows");

  // By each warp for all: they write the same numbers.
  FL_DEVICE void fill();

  FL_DEVICE uint32_t moved(uint32_t v) const {
    const uint8_t *own = reinterpret_cast<const uint8_t *>(&entry[0][0][lane_index()]);
    uint32_t result = 0;
#pragma unroll
    for (int digit = 0; digit < 8; ++digit) {
      // Where the entry is, in two instructions.
      const uint32_t bits = v & 15u << 4 * digit, place = digit < 2 ? bits << (7 - 4 * digit) : bits >> (4 * digit - 7);
      result ^= *reinterpret_cast<const uint32_t *>(own + sizeof entry[0] * digit + place);
    }
    return result;
  }
};

struct DeltaDigits {
  uint32_t entry[8][16];
};

constexpr DeltaDigits delta_digits() {
  constexpr uint32_t kOver = crc_power(8 * kDeltaStep);
  DeltaDigits digits = {};
  for (uint32_t digit = 0; digit < 8; ++digit)
    for (uint32_t value = 0; value < 16; ++value) digits.entry[digit][value] = crc_times(value << 4 * digit, kOver);
  return digits;
}

static __constant__ const DeltaDigits kDeltaDigits = delta_digits();

FL_DEVICE void DeltaTable::fill() {
#pragma unroll
  for (int digit = 0; digit < 8; ++digit)
#pragma unroll
    for (int value = 0; value < 16; ++value) entry[digit][value][lane_index()] = kDeltaDigits.entry[digit][value];
  meet();
}

// The register of lanes in pairs of groups of kWidth, of which the second one's bytes are later.
template <int kWidth>
FL_DEVICE uint32_t joined(uint32_t own) {
  constexpr uint32_t kOver = crc_power(8 * 16 * kWidth);
  const uint32_t other = shuffle_xor(own, kWidth);
  const bool later = lane_index() & kWidth;
  return crc_times(later ? other : own, kOver) ^ (later ? own : other);
}

// The checksum of a block, of which the lanes see steps. Each word of a step has a register of its own.
struct DeltaChecksum {
  uint32_t part[4] = {};

  FL_DEVICE void take(const DeltaTable &table, const Chunk &chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = table.moved(part[i]) ^ chunk.word[i];
  }
};

// What makes checksums of a block of so many bytes of what its lanes have: the last step was filled up by zeros, which are
// taken back, and the register began with ones.
struct DeltaEnds {
  uint32_t last, begin;

  template <class T>
  static FL_DEVICE DeltaEnds of(int bytes) {
    constexpr int kWhole = kDeltaBlock * int(sizeof(T));
    constexpr uint32_t kLast = crc_power(32), kBegin = crc_times(~0u, crc_power(8 * kWhole));
    if (bytes == kWhole) return {kLast, kBegin};
    const int zeros = (kDeltaStep - bytes % kDeltaStep) % kDeltaStep;
    return {crc_power(kCrcOrder + 32 - 8 * zeros), crc_times(~0u, crc_power(8 * bytes))};
  }

  // The block's part of the digest.
  FL_DEVICE uint32_t digest(const DeltaChecksum &sum, int64_t block) const {
    constexpr uint32_t kWord = crc_power(32);
    uint32_t r = sum.part[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) r = crc_times(r, kWord) ^ sum.part[i];
    r = joined<16>(joined<8>(joined<4>(joined<2>(joined<1>(r)))));
    return delta_mixed(~(crc_times(r, last) ^ begin), block);
  }
};

// Elements ----------------------------------------------------------------------------------------------------------------

template <class T>
FL_DEVICE T element_of(const Chunk &chunk, int i) {
  return sizeof(T) == 4 ? T(chunk.word[i % 4]) : T(chunk.word[i / 2] >> i % 2 * 16);
}

template <class T>
FL_DEVICE void put_element(Chunk &chunk, int i, T element) {
  if (sizeof(T) == 4)
    chunk.word[i % 4] = element;
  else
    chunk.word[i / 2] = (chunk.word[i / 2] & 0xffff0000u >> i % 2 * 16) | uint32_t(element) << i % 2 * 16;
}

// The elements of a lane, of which the first `count` exist; the others are 0.
template <class T>
FL_DEVICE Chunk load_elements(const T *x, int count) {
  if (count >= kPerChunk<T> && is_aligned(x, 16)) return load_chunk(x);
  Chunk chunk = {};
#pragma unroll
  for (int i = 0; i < kPerChunk<T>; ++i)
    if (i < count) put_element<T>(chunk, i, x[opaque(i)]);
  return chunk;
}

// Likewise from a base, which may be none: zeros.
template <class T>
FL_DEVICE Chunk load_base(const void *base, int64_t element, int count) {
  return base ? load_elements(static_cast<const T *>(base) + element, count) : Chunk{};
}

template <class T>
FL_DEVICE void store_elements(T *x, int count, const Chunk &chunk) {
  if (count >= kPerChunk<T> && is_aligned(x, 16)) return store_chunk(x, chunk);
#pragma unroll
  for (int i = 0; i < kPerChunk<T>; ++i)
    if (i < count) x[opaque(i)] = element_of<T>(chunk, i);
}

// The message and the workspace ----------------------------------------------------------------------------------------------

struct DeltaMessage {
  DeltaHead *head;
  uint8_t *data;

  DeltaMessage(const fl_messages &messages, int64_t m)
      : head(reinterpret_cast<DeltaHead *>(static_cast<uint8_t *>(messages.plane[0]) + m * messages.stride)),
        data(static_cast<uint8_t *>(messages.plane[1]) + m * messages.stride) {}
};

// What decoding finds out: digests, and what is wrong.
struct DeltaState {
  uint32_t base, result, wrong, unused;
};

// A workspace serves one message after the other. Each warp has room for a block's differences and places, each block for
// its bytes until it is known where they go.
struct DeltaRoom {
  uint8_t *begin;
  DeltaShape shape;

  FL_HD int64_t held() const { return shape.numel < kDeltaBlock ? (shape.numel + 63) / 64 * 64 : kDeltaBlock; }
  FL_HD int64_t warps() const { return shape.blocks() < kDeltaWarps ? shape.blocks() : kDeltaWarps; }
  FL_HD int64_t block_bytes() const { return held() * shape.element_bytes; }
  FL_HD int64_t warp_bytes() const { return block_bytes() + 2 * held(); }
  FL_HD int64_t numbers() const { return (shape.blocks() + 3) / 4 * 4; }
  FL_HD int64_t first_warp() const { return int64_t(sizeof(DeltaState)) + 3 * 4 * numbers(); }
  FL_HD int64_t first_block() const { return first_warp() + warps() * warp_bytes(); }
  FL_HD int64_t bytes() const { return first_block() + shape.blocks() * block_bytes(); }

  FL_DEVICE DeltaState *state() const { return reinterpret_cast<DeltaState *>(begin); }
  // Of each block: the entry of the index, and its parts of both digests.
  FL_DEVICE uint32_t *entries() const { return reinterpret_cast<uint32_t *>(begin + sizeof(DeltaState)); }
  FL_DEVICE uint32_t *of_base() const { return entries() + numbers(); }
  FL_DEVICE uint32_t *of_result() const { return entries() + 2 * numbers(); }
  template <class T>
  FL_DEVICE T *values() const {
    return reinterpret_cast<T *>(begin + first_warp() + warp_index() * warp_bytes());
  }
  FL_DEVICE uint16_t *places() const {
    return reinterpret_cast<uint16_t *>(begin + first_warp() + warp_index() * warp_bytes() + block_bytes());
  }
  FL_DEVICE uint32_t *block(int64_t b) const {
    return reinterpret_cast<uint32_t *>(begin + first_block() + b * block_bytes());
  }
};

// The bytes of blocks in front of one, and of all.
struct DeltaExtent {
  int64_t begin, all;

  template <class Entry>
  FL_DEVICE DeltaExtent(const DeltaShape &shape, const Entry *entries, int64_t block) : begin(0), all(0) {
    for (int64_t b = lane_index(); b < shape.blocks(); b += kLanes) {
      const int bytes = shape.told_bytes(b, entries[b]);
      all += bytes;
      begin += b < block ? bytes : 0;
    }
    begin = sum_over_lanes(begin);
    all = sum_over_lanes(all);
  }
};

}  // namespace fl
