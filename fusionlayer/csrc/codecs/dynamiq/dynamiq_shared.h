// What all instruction sets share of FL_DYNAMIQ.
#pragma once

#include "dynamiq.h"

namespace fl {

// fl_dynamiq_stats.
struct SuperGroupStats {
  const void *x;
  const float *residual;
  int64_t numel;
  uint32_t dtype;
  float *means, *squares;
};

// The levels that the thread used last: making them takes as long as encoding thousands of elements.
const DynamiqLevels &remembered_levels(uint32_t epsilons);

}  // namespace fl
