// The check of the verb that FL_DYNAMIQ alone has.
#pragma once

#include "arguments.h"

namespace fl {

inline int check_dynamiq_stats(uint32_t dtype, const void *x, const float *residual, int64_t numel, const float *means,
                               const float *squares) {
  if (!known_dtype(dtype) || numel < 0 || numel > kMaxElements) return FL_BAD_ARGUMENT;
  const int arrays = first_error(check_array(x, numel, element_size(dtype)), check_optional(residual, numel, 4));
  return first_error(arrays, first_error(check_array(means, numel, 4), check_array(squares, numel, 4)));
}

}  // namespace fl
