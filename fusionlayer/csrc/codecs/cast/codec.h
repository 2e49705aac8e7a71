// FL_CAST: what shared code asks of it.
#pragma once

#include "codec_entry.h"

namespace fl {

inline int64_t cast_bytes(const fl_spec &spec, int) { return spec.numel * element_size(spec.param[0]); }

inline int check_cast(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  return known_dtype(param[0]) && !param[1] && !param[2] && !param[3] ? FL_OK : FL_BAD_ARGUMENT;
}

constexpr Codec cast_codec = {1, cast_bytes, check_cast, dense_verbs};

}  // namespace fl
