// The check of the verbs of FL_DELTA.
#pragma once

#include "arguments.h"
#include "delta.h"

namespace fl {

// Both verbs of FL_DELTA, which no other verb takes.
inline int check_delta(const fl_spec *spec, const void *x, const void *base, const fl_messages *messages) {
  if (!spec) return FL_BAD_ARGUMENT;
  if (spec->codec != FL_DELTA) return FL_UNSUPPORTED;
  const uint32_t *param = spec->param;
  if (!known_dtype(spec->dtype) || param[0] || param[1] || param[2] || param[3] || spec->numel < 0)
    return FL_BAD_ARGUMENT;
  if (spec->numel >= kDeltaMaxElements) return FL_UNSUPPORTED;
  if (const int bad = check_messages(*spec, messages)) return bad;
  const int64_t numel = spec->numel * messages->count, size = element_size(spec->dtype);
  return first_error(check_array(x, numel, size), check_optional(base, numel, size));
}

}  // namespace fl
