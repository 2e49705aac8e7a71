// Error feedback: what the residual becomes after `value` (x + residual) went on the wire as `decoded`. Where no finite
// loss exists (the group or the value is not finite, or the wire type overflowed) the old residual stays.
#pragma once

#include "floats.h"

namespace fl {

FL_HD float residual_after(float value, float decoded, float residual) {
  const float lost = value - decoded;
  return is_finite(lost) ? lost : residual;
}

}  // namespace fl
