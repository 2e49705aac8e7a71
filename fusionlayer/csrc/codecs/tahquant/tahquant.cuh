// Messages of the `tahquant` codec as a warp sees them: a lane owns a run of 32 elements, 1 to 4 neighbouring lanes a tile.
// The arithmetic is codecs/tahquant/tahquant.h.
#pragma once

#include "arguments.h"
#include "code_words.h"
#include "cuda/launch.cuh"
#include "cuda/owned.cuh"
#include "tahquant.h"

namespace fl {

// Planes of message 0.
struct TahMessages {
  uint32_t *marks;
  uint8_t *pivots;
  uint16_t *offsets, *steps;
  uint8_t *codes;
  int64_t stride;
  int64_t count;
};

inline TahMessages tah_messages(const fl_messages &m) {
  return {static_cast<uint32_t *>(m.plane[0]),
          static_cast<uint8_t *>(m.plane[1]),
          static_cast<uint16_t *>(m.plane[2]),
          static_cast<uint16_t *>(m.plane[3]),
          static_cast<uint8_t *>(m.plane[4]),
          m.stride,
          m.count};
}

inline int64_t warp_tiles(const TahShape &shape) {
  return (shape.tokens() * (shape.channels / kBlock) + kLanes - 1) / kLanes;
}

// The run that a lane owns.
struct TahRun {
  int64_t index;  // in the message
  int64_t first;  // its first element
  int64_t tile;
  int64_t token;     // the last one where the run does not exist
  int64_t in_token;  // number of the run in its token
  int width;         // lanes of a tile
  bool exists;

  FL_DEVICE TahRun(const TahShape &shape, int64_t warp_tile, int lane)
      : index(warp_tile * kLanes + lane), first(index * kBlock) {
    const int64_t runs = shape.channels / kBlock, last = shape.tokens() - 1;
    width = shape.tile / kBlock;
    tile = index / width;
    token = index / runs;
    in_token = index - token * runs;
    exists = token <= last;
    token = exists ? token : last;
  }

  FL_DEVICE int lane_of_tile() const { return int(index) & (width - 1); }
};

// Where a lane's codes lie.
FL_DEVICE TahPlace place_of(const TahShape &shape, const TahMessages &messages, int64_t message, const TahRun &run) {
  const uint32_t *words = byte_offset(messages.marks, message * messages.stride);
  const uint32_t marks = shape.coarse ? words[run.token / kTahSection] : 0u;
  const int before = __popc(marks & tah_marks_before(int(run.token % kTahSection)));
  TahPlace place = tah_place(shape, run.token, marks, before);
  place.offset += run.in_token * (4 * place.bits);
  return place;
}

template <int kBits>
FL_DEVICE void store_codes(uint8_t *codes, const uint32_t (&bytes)[kCodeWords]) {
  uint32_t packed[kBits];
  pack_words<kBits>(bytes, packed);
#pragma unroll
  for (int i = 0; i < kBits; ++i) reinterpret_cast<uint32_t *>(codes)[i] = packed[i];
}

template <int kBits>
FL_DEVICE void load_codes(const uint8_t *codes, uint32_t (&bytes)[kCodeWords]) {
  uint32_t packed[kBits];
#pragma unroll
  for (int i = 0; i < kBits; ++i) packed[i] = reinterpret_cast<const uint32_t *>(codes)[i];
  unpack_words<kBits>(packed, bytes);
}

// v = H v / sqrt(tile) over all lanes of a tile, where `wanted`.
FL_DEVICE void rotate(const TahShape &shape, int width, bool wanted, int lane, float (&v)[kBlock]) {
  if (wanted) hadamard32(v);
  for (int mask = 1; mask < width; mask *= 2)
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float other = bits_float(shuffle_xor(float_bits(v[i]), mask));
      if (wanted) v[i] = lane & mask ? other - v[i] : v[i] + other;
    }
  const float root = wanted ? tah_root(shape.tile) : 1.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] *= root;
}

// Element `place` of a tile and its first one change places where `wanted`.
FL_DEVICE void swap_elements(const TahRun &run, int place, bool wanted, int lane, float (&v)[kBlock]) {
  const int own = place - run.lane_of_tile() * kBlock;
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) found = i == own ? float_bits(v[i]) : found;
  found = max_over_lanes(found, run.width);
  const float first = bits_float(shuffle(float_bits(v[0]), lane & ~(run.width - 1)));
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = wanted && i == own ? first : v[i];
  if (wanted && run.lane_of_tile() == 0) v[0] = bits_float(found);
}

// v = decoded values of a lane's run, whose codes are one byte each.
FL_DEVICE void decode_codes(const TahShape &shape, const TahRun &run, const uint32_t (&bytes)[kCodeWords],
                            uint16_t offset, uint16_t step, int pivot, int lane, float (&v)[kBlock]) {
  const float start = tah_value(offset), size = tah_value(step);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = float(bytes[i / 4] >> 8 * (i % 4) & 255u) * size + start;
  const bool rotated = pivot < shape.tile;
  if (!ballot(rotated)) return;
  rotate(shape, run.width, rotated, lane, v);
  swap_elements(run, pivot, rotated, lane, v);
}

FL_DEVICE void decode_run(const TahShape &shape, const TahMessages &in, int64_t message, const TahRun &run, int lane,
                          float (&v)[kBlock]) {
  const TahPlace place = place_of(shape, in, message, run);
  uint32_t bytes[kCodeWords] = {};
  uint16_t offset = 0, step = 0;
  int pivot = kNoPivot;
  if (run.exists) {
    const uint8_t *codes = in.codes + message * in.stride + place.offset;
    if (place.bits == 3)
      load_codes<3>(codes, bytes);
    else if (place.bits == 4)
      load_codes<4>(codes, bytes);
    else
      load_codes<6>(codes, bytes);
    offset = byte_offset(in.offsets, message * in.stride)[run.tile];
    step = byte_offset(in.steps, message * in.stride)[run.tile];
    pivot = in.pivots[message * in.stride + run.tile];
  }
  decode_codes(shape, run, bytes, offset, step, pivot, lane, v);
}

FL_DEVICE void add_messages(const TahShape &shape, const TahMessages &in, const TahRun &run, int lane,
                            float (&v)[kBlock]) {
#pragma unroll 1
  for (int64_t m = 0; m < in.count; ++m) {
    float part[kBlock];
    decode_run(shape, in, m, run, lane, part);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] += part[i];
  }
}

}  // namespace fl
