// Messages of the `thc` codec as a warp sees them: a lane owns a run of 32 elements, 1 to 32 neighbouring lanes a block. The
// arithmetic is codecs/thc/thc.h.
#pragma once

#include "arguments.h"
#include "code_words.h"
#include "cuda/launch.cuh"
#include "cuda/owned.cuh"
#include "thc.h"

namespace fl {

struct ThcMessages {
  float *rms;      // of message 0, one for each tile
  uint8_t *codes;  // of message 0
  int64_t stride;
  int64_t count;
};

inline ThcMessages thc_messages(const fl_messages &m) {
  return {static_cast<float *>(m.plane[0]), static_cast<uint8_t *>(m.plane[1]), m.stride, m.count};
}

// The run that a lane owns.
struct ThcRun {
  int64_t index;  // in the message
  int64_t first;  // its first element
  bool exists;    // false where the tile reaches past the last block

  FL_DEVICE ThcRun(const ThcShape &shape, int64_t tile, int lane)
      : index(tile * kLanes + lane), first(index * kBlock), exists(first < shape.count()) {}
};

// The tile of a warp is a section, so that all lanes share a root mean square.
static_assert(kLanes * kBlock == kThcSection);

// section_rms of codecs/thc/thc.h of a tile of a message; v is a lane's run, zeros behind the last element.
FL_DEVICE float tile_rms(const ThcShape &shape, int64_t tile, const float (&v)[kBlock]) {
  const uint32_t amax = largest_of_lanes(largest_of(v));
  const int64_t left = shape.numel - tile * kThcSection;
  const float units = amax >= kTinyBits && amax < kF32Inf ? section_units(amax) : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float whole = add_exact_product(v[i], units, kThcWhole) - kThcWhole;
    squares = add_exact_product(whole, whole, squares);
  }
  return section_rms(amax, sum_of_lanes(amax < kF32Inf ? int32_t(squares) : 0),
                     int(left < kThcSection ? left : kThcSection));
}

// Of the run that begins with the element of this number.
FL_DEVICE void change_signs(RngKey signs, int64_t first, float (&v)[kBlock]) {
  const uint32_t changed = thc_signs(signs, uint64_t(first));
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = bits_float(float_bits(v[i]) ^ (changed << (31 - i) & 0x80000000u));
}

// v = H v, over all lanes of a block.
FL_DEVICE void rotate(const ThcShape &shape, int lane, float (&v)[kBlock]) {
  hadamard32(v);
  hadamard_over_lanes(v, shape.runs_of_block(), lane);
}

// From half steps to values.
FL_DEVICE void reconstruct(const ThcShape &shape, RngKey signs, int64_t first, int lane, float rms,
                           float (&v)[kBlock]) {
  rotate(shape, lane, v);
  const float factor = thc_factor(rms, shape);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] *= factor;
  change_signs(signs, first, v);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] += 0.0f;  // -0 becomes 0
}

// v = the half steps that codes, one byte each, stand for.
FL_DEVICE void half_steps(const ThcShape &shape, const uint32_t (&codes)[kCodeWords], float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i)
    v[i] = float(2 * thc_integer(shape.uniform, int(codes[i / 4] >> 8 * (i % 4) & 255u)) - shape.top());
}

}  // namespace fl
