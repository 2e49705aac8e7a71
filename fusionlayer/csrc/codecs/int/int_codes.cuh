// Messages of the `int` codec as a warp sees them: which block a lane owns, and its codes between memory and registers.
// The arithmetic is core/int_group.h.
#pragma once

#include "code_words.h"
#include "cuda/owned.cuh"
#include "int_group.h"

namespace fl {

constexpr int kTile = kLanes * kBlock;  // elements a warp holds at a time
constexpr int kWords = kBlock / 4;      // words that hold a block's codes, one byte each

struct IntLayout {
  int64_t numel;   // of a message
  int64_t groups;  // of a message
  int log2_group;
  int bits;

  FL_HD int blocks() const { return 1 << (log2_group - 5); }                // in a group
  FL_HD int lanes() const { return log2_group < 10 ? blocks() : kLanes; }   // that hold a group
  FL_HD int tiles() const { return log2_group <= 10 ? 1 : blocks() / 32; }  // that a group is larger than a warp's hold
  FL_HD int64_t span() const { return int64_t(tiles()) * kTile; }           // elements of what a warp treats at once
  FL_HD int64_t spans() const { return ((groups << log2_group) + span() - 1) / span(); }
};

struct IntMessages {
  float *scales;   // of message 0
  uint8_t *codes;  // of message 0
  int64_t stride;
  int64_t count;

  FL_DEVICE IntMessages only(int64_t m) const { return {byte_offset(scales, m * stride), codes + m * stride, 0, 1}; }
};

// The block that a lane owns: its first element, its group and its number in the group.
struct Place {
  int64_t first;
  int64_t group;
  int block;
  bool exists;  // false where the span reaches past the last group
};

// A span that is one tile is taken in order. In a larger one the lower half of the lanes walks through the lower half of
// the group, the upper through the upper: blocks whose 4-bit codes share bytes are then in one tile.
FL_DEVICE Place place_of(const IntLayout &layout, int64_t span, int tile, int lane) {
  const int block = tile * 16 + (lane & 15) + (lane >> 4) * (layout.tiles() * 16);
  const int64_t first = span * layout.span() + block * kBlock;
  const int64_t group = first >> layout.log2_group;
  return {first, group, int(first >> 5) & (layout.blocks() - 1), group < layout.groups};
}

// 4-bit codes: the lower block of a pair and the one half a group higher share 32 bytes; each of the two lanes accesses 16.
struct NibblePair {
  int mask;       // lane ^ mask owns the other block; 0 in a group of one block, whose halves are the pair
  bool upper;     // this lane has the high nibbles, and accesses the second 16 bytes
  int64_t bytes;  // where they lie in the plane

  FL_DEVICE NibblePair(const IntLayout &layout, const Place &at) {
    const int half = layout.blocks() / 2;
    mask = half < 16 ? half : 16;
    upper = (at.block & half) != 0;
    bytes = (at.group << (layout.log2_group - 1)) + (at.block & (half - 1)) * kBlock + (upper ? 16 : 0);
  }
};

// What a lane has loaded of its block: codes as they lie in memory, and the group's scale.
struct Packed {
  Chunk codes[2];  // the second for 8 bits only; of 2 and 3 bits as many words
  float scale;
};

FL_DEVICE Packed load_packed(const IntLayout &layout, const IntMessages &in, int64_t message, const Place &at) {
  Packed packed = {};
  if (!at.exists) return packed;
  const uint8_t *codes = in.codes + message * in.stride;
  if (layout.bits == 8) {
    packed.codes[0] = load_chunk(codes + at.first);
    packed.codes[1] = load_chunk(codes + at.first + 16);
  } else if (between_integers(layout.bits)) {
    const uint32_t *run = reinterpret_cast<const uint32_t *>(codes) + at.first / kBlock * layout.bits;
    packed.codes[0].word[0] = run[0];
    packed.codes[0].word[1] = run[1];
    if (layout.bits == 3) packed.codes[0].word[2] = run[2];
  } else {
    packed.codes[0] = load_chunk(codes + NibblePair(layout, at).bytes);
  }
  packed.scale = byte_offset(in.scales, message * in.stride)[at.group];
  return packed;
}

// The levels of a lane's block, one byte each, made unsigned by adding code_bias.
FL_DEVICE void unpack_codes(const IntLayout &layout, const Packed &packed, const Place &at, uint32_t (&bytes)[kWords]) {
  if (layout.bits == 8) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) bytes[i] = packed.codes[i / 4].word[i % 4] ^ 0x80808080u;
  } else if (between_integers(layout.bits)) {
    const uint32_t *word = packed.codes[0].word;
    const uint32_t words[3] = {word[0], word[1], word[2]};  // the last one is 0 of two bits
    unpack_words<3>(words, bytes);
    const uint32_t sign = layout.bits == 2 ? 0x02020202u : 0x04040404u;
#pragma unroll
    for (int i = 0; i < kWords; ++i) bytes[i] = (bytes[i] ^ sign) << 1;
  } else {
    const NibblePair pair(layout, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = packed.codes[0].word[i] ^ 0x88888888u;
      const uint32_t low = word & 0x0f0f0f0fu, high = (word >> 4) & 0x0f0f0f0fu;
      const uint32_t kept = pair.upper ? high : low, other = shuffle_xor(pair.upper ? low : high, pair.mask);
      bytes[i] = pair.upper ? other : kept;
      bytes[i + 4] = pair.upper ? kept : other;
    }
  }
}

// Where the block of `at` lies in messages of another layout.
FL_DEVICE Place place_in(const IntLayout &layout, const Place &at) {
  const int64_t group = at.first >> layout.log2_group;
  return {at.first, group, int(at.first >> 5) & (layout.blocks() - 1), group < layout.groups};
}

// As load_packed and unpack_codes, for a lane whose neighbours need not have the blocks that share its bytes.
FL_DEVICE Packed load_alone(const IntLayout &layout, const IntMessages &in, int64_t message, const Place &at) {
  if (layout.bits != 4 || !at.exists) return load_packed(layout, in, message, at);
  Packed packed = {};
  const int half = layout.blocks() / 2;
  const uint8_t *group = in.codes + message * in.stride + (at.group << (layout.log2_group - 1));
  const uint8_t *codes = group + (half ? (at.block & (half - 1)) * kBlock : 0);
  packed.codes[0] = load_chunk(codes);
  if (half) packed.codes[1] = load_chunk(codes + 16);
  packed.scale = byte_offset(in.scales, message * in.stride)[at.group];
  return packed;
}

FL_DEVICE void unpack_alone(const IntLayout &layout, const Packed &packed, const Place &at, uint32_t (&bytes)[kWords]) {
  if (layout.bits != 4) return unpack_codes(layout, packed, at, bytes);
  const int half = layout.blocks() / 2;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint32_t later = half ? packed.codes[1].word[i % 4] : packed.codes[0].word[i % 4];
    const uint32_t word = (i < 4 ? packed.codes[0].word[i % 4] : later) ^ 0x88888888u;
    const bool upper = half ? (at.block & half) != 0 : i >= 4;
    bytes[i] = (upper ? word >> 4 : word) & 0x0f0f0f0fu;
  }
}

FL_DEVICE float code_bias(int bits) { return bits == 8 ? 128.0f : bits == 4 ? 8.0f : bits == 3 ? 7.0f : 3.0f; }

// v = decoded values of a lane's block, whose levels plus bias are `bytes`; `factor` is decode_scale of its scale.
template <bool kTransform>
FL_DEVICE void dequantize(const uint32_t (&bytes)[kWords], float bias, float factor, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = unsigned_byte(bytes[i / 4], i % 4, bias);
  if (kTransform) hadamard32(v);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] *= factor;
}

// sum += them, but for the transform.
FL_DEVICE void add_dequantized(const uint32_t (&bytes)[kWords], float bias, float factor, float (&sum)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) sum[i] = add_exact_product(unsigned_byte(bytes[i / 4], i % 4, bias), factor, sum[i]);
}

template <bool kTransform>
FL_DEVICE void decode_block(const IntLayout &layout, const Packed &packed, const Place &at, float (&v)[kBlock]) {
  uint32_t bytes[kWords];
  unpack_codes(layout, packed, at, bytes);
  dequantize<kTransform>(bytes, code_bias(layout.bits), decode_scale(packed.scale, layout.bits, kTransform), v);
}

// bytes = codes of a lane's block, in two's complement.
FL_DEVICE void store_codes(const IntLayout &layout, uint8_t *codes, const Place &at, const uint32_t (&bytes)[kWords]) {
  if (layout.bits == 8) {
    if (!at.exists) return;
    store_chunk(codes + at.first, {{bytes[0], bytes[1], bytes[2], bytes[3]}});
    store_chunk(codes + at.first + 16, {{bytes[4], bytes[5], bytes[6], bytes[7]}});
  } else if (between_integers(layout.bits)) {
    if (!at.exists) return;
    uint32_t *run = reinterpret_cast<uint32_t *>(codes) + at.first / kBlock * layout.bits;
    uint32_t words[3];  // the first two are those of two bits
    pack_words<3>(bytes, words);
    run[0] = words[0];
    run[1] = words[1];
    if (layout.bits == 3) run[2] = words[2];
  } else {
    const NibblePair pair(layout, at);
    Chunk packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t kept = pair.upper ? bytes[i + 4] : bytes[i];
      const uint32_t other = shuffle_xor(pair.upper ? bytes[i] : bytes[i + 4], pair.mask);
      const uint32_t low = pair.upper ? other : kept, high = pair.upper ? kept : other;
      packed.word[i] = (low & 0x0f0f0f0fu) | (high << 4 & 0xf0f0f0f0u);
    }
    if (at.exists) store_chunk(codes + pair.bytes, packed);
  }
}

}  // namespace fl
