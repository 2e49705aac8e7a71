// Scalar specification of the `thc` codec (THC, NSDI 2024): values of random signs, rotated in blocks, on 16 levels of one
// grid, whose places are integers that add up. The drivers in cpu/ and cuda/ compute the same numbers with vectors and
// shuffles; what they may not change is written here.
//
//   1. Plane 0 has the root mean square that all of a message share. Unless it is from 2^-100 on and finite, codes are 0.
//   2. v = x / rms, zero-padded to whole blocks; the signs of elements with a random bit are changed.
//   3. Every block becomes H v (hadamard of core/block_scale.h) times `steps`, limited to -top..top: half steps of the grid.
//   4. code: the level above or below, thc_code.
//   5. decode: H (2 T - top) times thc_factor, T being the codes' integers, or n messages' sum of them less n top.
#pragma once

#include "block_scale.h"
#include "rng.h"

namespace fl {

constexpr int kThcLevels = 16;
constexpr int kThcMaxBlock = 1024;

struct ThcShape {
  int64_t numel;    // of a message
  int block;        // elements that are rotated together
  int64_t numbers;  // of a seed's sequence that a message takes
  bool uniform;
  int ranks;  // whose integers plane 1 has the sum of; 0: codes
  float steps;

  FL_HD int64_t blocks() const { return (numel + block - 1) / block; }
  FL_HD int64_t count() const { return blocks() * block; }
  FL_HD int top() const { return uniform ? 15 : 30; }  // the largest integer
  FL_HD int sum_bits(int n) const { return n * top() < 256 ? 8 : n * top() < 4096 ? 12 : 16; }
  FL_HD int bits() const { return ranks ? sum_bits(ranks) : 4; }
  FL_HD int run_bytes() const { return 4 * bits(); }
  FL_HD int runs_of_block() const { return block / kCodeRun; }
};

inline ThcShape thc_shape(const fl_spec &spec) {
  const int64_t most = spec.param[1];
  int64_t block = kCodeRun;
  while (block < most && block < spec.numel) block *= 2;
  return {spec.numel,
          int(block),
          (spec.numel + most - 1) / most * most,
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

// The highest code whose integer is at most t, and below the highest.
FL_HD int thc_code_below(bool uniform, int t) {
  const int most = uniform ? 14 : 29;
  t = t < most ? t : most;
  const uint64_t half = t < 16 ? 0x7765544332211000u : 0xeeeddccbbaa998u;  // four bits for each t
  return uniform ? t : int(half >> 4 * (t & 15) & 15);
}

// The code of a value in half steps; `noise` is 0 (nearest) or rounding_noise (stochastic). NaN is the largest.
FL_HD int thc_code(bool uniform, float value, float noise) {
  const int top = uniform ? 15 : 30;
  float v = value < float(top) ? value : float(top);
  v = v > float(-top) ? v : float(-top);
  const int cut = int(v), floor = cut - (float(cut) > v);
  const int below = thc_code_below(uniform, (floor + top) >> 1);
  const int low = thc_integer(uniform, below), high = thc_integer(uniform, below + 1);
  const float up = (v - float(2 * low - top)) / float(2 * (high - low)) - 0.5f;
  return below + (noise < up);
}

FL_HD bool thc_usual(float rms) { return float_bits(rms) >= kTinyBits && float_bits(rms) < kF32Inf; }

// What rotated half steps are multiplied by.
FL_HD float thc_factor(float rms, const ThcShape &shape) {
  const float factor = rms / (shape.steps * float(shape.block));
  return is_finite(factor) ? factor : bits_float(kF32Nan);
}

// Whether the sign of the element with this number in its message is changed.
FL_HD uint32_t thc_sign(RngKey signs, uint64_t element) {
  return random_bits(key_at(signs, element), uint32_t(element)) & 0x80000000u;
}

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
