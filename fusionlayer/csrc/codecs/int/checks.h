// Checks of the verbs that FL_INT alone has.
#pragma once

#include "arguments.h"

namespace fl {

inline int check_recode_from(const fl_spec *source, const fl_messages *in, const fl_spec *spec, const float *residual,
                             const fl_messages *out) {
  if (const int bad = first_error(check_spec_of(FL_INT, source), check_spec_of(FL_INT, spec))) return bad;
  if (const int bad = first_error(check_messages(*source, in), check_messages(*spec, out))) return bad;
  if (out->count != 1 || source->numel != spec->numel) return FL_BAD_ARGUMENT;
  return check_optional(residual, spec->numel, 4);
}

inline int check_encode_difference(const fl_spec *spec, const float *x, const void *base, const fl_messages *out) {
  if (const int bad = check_spec_of(FL_INT, spec)) return bad;
  if (const int bad = check_messages(*spec, out)) return bad;
  const int64_t numel = spec->numel * out->count;
  return first_error(check_array(x, numel, 4), check_array(base, numel, element_size(spec->dtype)));
}

}  // namespace fl
