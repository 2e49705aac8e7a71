// FL_QSDP: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "qsdp.h"

namespace fl {

inline int64_t qsdp_bytes(const fl_spec &spec, int p) {
  const int64_t groups = group_count(spec);
  return p < 2 ? groups * 4 : groups * spec.param[1] * spec.param[0] / 8;
}

inline int check_qsdp(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if ((param[0] != 4 && param[0] != 8) || param[3]) return FL_BAD_ARGUMENT;
  if (!power_of_two_within(param[1], 32, kQsdpMaxGroup)) return FL_BAD_ARGUMENT;
  if (!starts_group(spec, param[1])) return FL_BAD_ARGUMENT;
  return param[2] & ~uint32_t(FL_QSDP_STOCHASTIC) ? FL_UNSUPPORTED : FL_OK;
}

constexpr Codec qsdp_codec = {kQsdpPlanes, qsdp_bytes, check_qsdp, dense_verbs};

}  // namespace fl
