// Scalar specification of the `qsdp` codec (Markov et al., ICML 2023): points of a grid from the smallest to the largest value
// of a group. The drivers in cpu/ and cuda/ compute the same numbers; what they may not change is written here.
//
//   1. The last group is filled up with its last value.
//   2. Step and origin: qsdp_grid. code = qsdp_code, in two's complement, packed as those of core/int_group.h.
//   3. decode: code * step + origin, qsdp_value, rounded after each operation.
//
// Element i of group g of message m has the number offset + (m * groups + g) * group + i in the seed's sequence.
#pragma once

#include "fusionlayer_codec.h"
#include "int_group.h"

namespace fl {

constexpr int kQsdpMaxGroup = 1024;
constexpr int kQsdpPlanes = 3;

struct QsdpShape {
  int bits;
  int group;
  bool stochastic;  // else the grid is shifted

  FL_HD int group_bytes() const { return group * bits / 8; }
  FL_HD float least() const { return bits == 8 ? -128.0f : -8.0f; }
  FL_HD float most() const { return bits == 8 ? 127.0f : 7.0f; }
  // Steps between the extremes. A grid that is shifted has room for one more, so that no shift moves a value out of it.
  FL_HD float parts() const { return most() - least() - (stochastic ? 0.0f : 1.0f); }
};

inline QsdpShape qsdp_shape(const fl_spec &spec) {
  return {int(spec.param[0]), int(spec.param[1]), (spec.param[2] & FL_QSDP_STOCHASTIC) != 0};
}

// SplitMix64 (Steele et al., OOPSLA 2014).
constexpr uint64_t kQsdpStride = 0x9e3779b97f4a7c15u;

FL_HD uint64_t split_mix(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

FL_HD uint64_t qsdp_key(uint64_t seed) { return split_mix(seed + kQsdpStride); }

// Where in a step a grid begins, 0 to below 1: of the group whose first element has this number.
FL_HD float qsdp_share(uint64_t key, uint64_t element) {
  return float(int32_t(split_mix((element + 1) * kQsdpStride + key) >> 40)) * 0x1p-24f;
}

struct QsdpGrid {
  float step;  // 0 makes every code 0, and so does NaN
  float origin;
};

// `finite`: all values of the group are.
FL_HD QsdpGrid qsdp_grid(bool finite, float low, float high, float parts, float share) {
  if (!finite) return {bits_float(kF32Nan), bits_float(kF32Nan)};
  const float below = low + 0.0f, above = high + 0.0f;  // -0 becomes 0
  const float step = above / parts - below / parts, middle = above * 0.5f + below * 0.5f;
  if (step < 0x1p-100f) return {0.0f, middle};
  return {step, middle + share * step};
}

// The code of a value where step is above 0; `noise` is 0 (shifted grids) or rounding_noise.
FL_HD int32_t qsdp_code(float v, QsdpGrid grid, float noise, float least, float most) {
  float point = (v - grid.origin) / grid.step + noise;
  point = point < most ? point : most;
  return round_even(point > least ? point : least);
}

// What decoding takes for step and origin: NaN if one of them is not finite.
FL_HD QsdpGrid qsdp_sound(QsdpGrid grid) {
  const float nan = bits_float(kF32Nan);
  return is_finite(grid.step) && is_finite(grid.origin) ? grid : QsdpGrid{nan, nan};
}

FL_HD float qsdp_value(int32_t code, QsdpGrid grid) { return float(code) * grid.step + grid.origin; }

}  // namespace fl
