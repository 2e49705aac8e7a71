// FL_ONEBIT: what shared code asks of it.
#pragma once

#include "codec_entry.h"

namespace fl {

inline int64_t onebit_bytes(const fl_spec &spec, int p) { return p ? (spec.numel + 7) / 8 : group_count(spec) * 4; }

inline int check_onebit(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if (param[0] || param[2] || param[3]) return FL_BAD_ARGUMENT;
  return power_of_two_within(param[1], 32, 4096) ? FL_OK : FL_BAD_ARGUMENT;
}

constexpr Codec onebit_codec = {2, onebit_bytes, check_onebit, dense_verbs};

}  // namespace fl
