// Scalar specification of the `thc` codec (THC, NSDI 2024): values of random signs, rotated in blocks, on 16 levels of one
// grid, whose places are integers that add up. The drivers in cpu/ and cuda/ compute the same numbers with vectors and
// shuffles; what they may not change is written here.
//
//   1. Plane 0 has a root mean square for each section of kThcSection elements (section_rms), or what ranks agreed on, which is
//      there beforehand. Unless it is from 2^-100 on and finite, the section's codes are 0.
//   2. v = x * thc_scale, zero-padded to whole blocks. Signs change where bits of thc_signs are set, a word for each run.
//   3. Every block becomes H v (hadamard of codecs/block/block_scale.h): units of the grid of levels.
//   4. code: thc_code, of the value's place between the levels and 16 random bits (half_of_bits of core/rng.h).
//   5. decode: H (2 T - top) times thc_factor, T being the codes' integers, or n messages' sum of them less n top.
#pragma once

#include "codecs/block/block_scale.h"
#include "rng.h"

namespace fl {

constexpr int kThcLevels = 16;
constexpr int kThcMaxBlock = 1024;
constexpr int kThcSection = kThcMaxBlock;  // whole blocks, of whatever size

struct ThcShape {
  int64_t numel;    // of a message
  int block;        // elements that are rotated together
  int64_t numbers;  // of a seed's sequence that a message takes: those of whole sections
  bool uniform;
  int ranks;  // whose integers plane 1 has the sum of; 0: codes
  float steps;

  FL_HD int64_t sections() const { return (numel + kThcSection - 1) / kThcSection; }
  FL_HD int64_t blocks() const { return (numel + block - 1) / block; }
  FL_HD int64_t count() const { return blocks() * block; }
  FL_HD int top() const { return uniform ? 15 : 30; }  // the largest integer
  FL_HD int sum_bits(int n) const { return n * top() < 256 ? 8 : n * top() < 4096 ? 12 : 16; }
  FL_HD int bits() const { return ranks ? sum_bits(ranks) : 4; }
  FL_HD int run_bytes() const { return 4 * bits(); }
  FL_HD int runs_of_block() const { return block / kCodeRun; }
};

inline ThcShape thc_shape(const fl_spec &spec) {
  int64_t block = kCodeRun;
  while (block < spec.param[1] && block < spec.numel) block *= 2;
  return {spec.numel,
          int(block),
          (spec.numel + kThcSection - 1) / kThcSection * kThcSection,
          (spec.param[0] & FL_THC_UNIFORM) != 0,
          int(spec.param[0] >> FL_THC_RANKS_SHIFT),
          bits_float(spec.param[2])};
}

// The integer that a code stands for.
FL_HD int thc_integer(bool uniform, int code) {
  // 0 3 5 7 9 11 13 14 and 16 17 19 21 23 25 27 30, a byte each
  const uint64_t half = code < 8 ? 0x0e0d0b0907050300u : 0x1e1b191715131110u;
  return uniform ? code : int(half >> 8 * (code & 7) & 255);
}

// Places between levels are counted in 65536 parts of the way from each level to the next, as many as 16 random bits tell
// apart: rounding is unbiased. With normal levels a step of the grid is 65536 / 3 units, so that a unit is 3, 3 / 2 or 1 parts
// where the levels are 1, 2 or 3 steps apart; with uniform ones a unit is a part.
FL_HD float thc_units_of_half_step(bool uniform) { return uniform ? 32768.0f : 65536.0f / 6.0f; }
FL_HD float thc_outermost(bool uniform) { return uniform ? 491520.0f : 327680.0f; }  // half of the grid, in units
constexpr float kThcMiddle = 491520.0f;                                              // its place
constexpr uint32_t kThcNearest = 0x7fff;  // what is added to a place instead of random bits
constexpr float kThcWhole = 12582912.0f;  // sums with it have a whole number in their low bits
constexpr float kThcPlaces = 8388608.0f;  // likewise, of what is not negative

// v limited to -bound..bound; NaN becomes bound.
FL_HD float thc_limited(float v, float bound) {
#if defined(__CUDA_ARCH__)
  return fmaxf(fminf(v, bound), -bound);
#else
  v = v < bound ? v : bound;
  return v > -bound ? v : -bound;
#endif
}

// Twice the place of a whole number of units, less the middle's. All of it is exact. Levels are 2 steps apart but for the
// second step from the middle, where they are 1 apart, and for the last three, 3 apart.
FL_HD float thc_twice(bool uniform, float units) {
  if (uniform) return units + units;
  const float parts = units * 3.0f;
  return parts + (thc_limited(parts, 131072.0f) - thc_limited(parts, 65536.0f)) -
         (units - thc_limited(units, 262144.0f));
}

// The code of a value in units: the next one if its place and 16 random bits reach that. NaN is the largest.
FL_HD int thc_code(bool uniform, float value, uint32_t random) {
  const float units = (thc_limited(value, thc_outermost(uniform)) + kThcWhole) - kThcWhole;
  const float place = thc_twice(uniform, units) * 0.5f + (kThcMiddle + kThcPlaces);
  return int((float_bits(place) + random) >> kNoiseBits & 15u);
}

FL_HD bool thc_usual(float rms) { return float_bits(rms) >= kTinyBits && float_bits(rms) < kF32Inf; }

// Root mean squares ---------------------------------------------------------------------------------------------------
//
// Values are rounded to whole numbers from -512 to 512 of a step that is a power of two. As their squares are whole numbers, any
// order of adding them gives the same sum; up to 64 of them are exact in f32.

// What values become whole numbers by. `amax` is the largest magnitude's bits, from 2^-100 on and finite.
FL_HD float section_units(uint32_t amax) { return bits_float((262u - (amax >> 23)) << 23); }

// The root mean square of n values by the sum of their squares in units; 0 or NaN where it is of no use.
FL_HD float section_rms(uint32_t amax, int32_t squares, int n) {
  if (amax >= kF32Inf) return bits_float(kF32Nan);
  if (amax < kTinyBits) return 0.0f;
  const float rms = square_root(float(squares) / float(n)) * bits_float(((amax >> 23) - 8u) << 23);
  return float_bits(rms) >= kTinyBits ? rms : 0.0f;
}

// What values are multiplied by before they are rotated.
FL_HD float thc_scale(float rms, const ThcShape &shape) {
  return shape.steps * thc_units_of_half_step(shape.uniform) / rms;
}

// What rotated half steps are multiplied by.
FL_HD float thc_factor(float rms, const ThcShape &shape) {
  const float factor = rms / (shape.steps * float(shape.block));
  return is_finite(factor) ? factor : bits_float(kF32Nan);
}

// Bit i: whether the sign of element i changes of the run whose first element has this number in its message.
FL_HD uint32_t thc_signs(RngKey signs, uint64_t first) { return random_bits(key_at(signs, first), uint32_t(first)); }

// Sums in runs of 32: the low bytes, then the four bits above of 12, in 16 bytes as 4-bit codes, or the high bytes of 16.
FL_HD void pack_sums(int bits, const uint16_t *sums, uint8_t *bytes) {
  for (int i = 0; i < kCodeRun; ++i) bytes[i] = uint8_t(sums[i]);
  for (int i = 0; bits == 16 && i < kCodeRun; ++i) bytes[32 + i] = uint8_t(sums[i] >> 8);
  for (int i = 0; bits == 12 && i < 16; ++i) bytes[32 + i] = uint8_t(sums[i] >> 8 | sums[i + 16] >> 8 << 4);
}

FL_HD void unpack_sums(int bits, const uint8_t *bytes, uint16_t *sums) {
  for (int i = 0; i < kCodeRun; ++i) sums[i] = bytes[i];
  for (int i = 0; bits == 16 && i < kCodeRun; ++i) sums[i] = uint16_t(sums[i] | bytes[32 + i] << 8);
  for (int i = 0; bits == 12 && i < kCodeRun; ++i)
    sums[i] = uint16_t(sums[i] | (bytes[32 + i % 16] >> 4 * (i / 16) & 15) << 8);
}

}  // namespace fl
