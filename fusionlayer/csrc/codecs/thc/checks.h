// Checks of the verbs that FL_THC alone has.
#pragma once

#include "arguments.h"
#include "thc.h"

namespace fl {

inline int check_add_codes(const fl_spec *spec, const fl_messages *in, const uint8_t *out) {
  if (const int bad = check_spec_of(FL_THC, spec)) return bad;
  if (thc_shape(*spec).ranks) return FL_UNSUPPORTED;
  if (const int bad = check_messages(*spec, in)) return bad;
  if (in->count * thc_shape(*spec).top() > 0xffff) return FL_BAD_ARGUMENT;
  return check_array(out, in->count ? spec->numel : 0, kPlaneAlignment);
}

inline int check_thc_rms(const fl_spec *spec, const void *x, const float *residual, const float *rms) {
  if (const int bad = check_spec_of(FL_THC, spec)) return bad;
  const int arrays =
      first_error(check_array(x, spec->numel, element_size(spec->dtype)), check_optional(residual, spec->numel, 4));
  return first_error(arrays, check_array(rms, spec->numel, 4));
}

}  // namespace fl
