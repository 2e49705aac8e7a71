// The `onebit` codec: the sign of each value, and for each group the mean of its magnitudes. The sum is made in 32 lanes of
// f64: lane j adds up elements j, 32 + j, ... in this order. Then halves are added: lanes j and 16 + j, j and 8 + j, ...
#pragma once

#include "floats.h"

namespace fl {

constexpr int kOneBitLanes = 32;

FL_HD double onebit_sum(double *lanes) {
  for (int half = kOneBitLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// The scale of a group of `count` values; NaN where one of them is not finite, whose signs are all written as 0: that of a
// NaN which a processor computes is its own affair.
FL_HD float onebit_scale(double sum, int count) {
  const float mean = float(sum / count);
  return is_finite(mean) ? mean : bits_float(kF32Nan);
}

// What a sign becomes.
FL_HD float onebit_value(float scale, bool minus) {
  if (!is_finite(scale)) return bits_float(kF32Nan);
  return minus ? -scale : scale;
}

}  // namespace fl
