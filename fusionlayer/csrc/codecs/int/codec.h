// FL_INT: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "int_group.h"

namespace fl {

inline int64_t int_bytes(const fl_spec &spec, int p) {
  const int64_t groups = group_count(spec);
  return p == 0 ? groups * 4 : groups * spec.param[1] * spec.param[0] / 8;
}

inline int check_int(const fl_spec &spec) {
  const uint32_t *param = spec.param, bits = param[0];
  if (bits != 8 && (bits < 2 || bits > 4)) return FL_BAD_ARGUMENT;
  if (!power_of_two_within(param[1], 32, 4096) || param[3]) return FL_BAD_ARGUMENT;
  if (!starts_group(spec, param[1])) return FL_BAD_ARGUMENT;
  if (param[2] == FL_INT_FULL) return between_integers(int(bits)) ? FL_UNSUPPORTED : FL_OK;
  return param[2] & ~uint32_t(FL_INT_HADAMARD | FL_INT_STOCHASTIC) ? FL_UNSUPPORTED : FL_OK;
}

inline uint32_t int_verbs_of(const fl_spec &spec) {
  return between_integers(int(spec.param[0])) ? kDense : kDense | kTwoShot;
}

constexpr Codec int_codec = {2, int_bytes, check_int, int_verbs_of};

}  // namespace fl
