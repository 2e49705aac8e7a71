// FL_DELTA: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "delta.h"

namespace fl {

inline int64_t delta_bytes(const fl_spec &spec, int p) {
  if (!spec.numel) return 0;
  return p ? delta_shape(spec).data_bytes() : int64_t(sizeof(DeltaHead));
}

// No shared verb takes it.
inline int check_shared_delta(const fl_spec &) { return FL_UNSUPPORTED; }
inline uint32_t delta_verbs_of(const fl_spec &) { return 0; }

constexpr Codec delta_codec = {2, delta_bytes, check_shared_delta, delta_verbs_of};

}  // namespace fl
