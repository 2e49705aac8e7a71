// FL_CHUNKED: what shared code asks of it.
#pragma once

#include "chunked.h"
#include "codec_entry.h"

namespace fl {

inline int64_t chunked_bytes(const fl_spec &spec, int p) { return chunked_shape(spec).plane_bytes(p); }

inline int check_chunked(const fl_spec &spec) {
  const uint32_t *param = spec.param, bits = param[0];
  if (bits != 2 && bits != 3 && bits != 4 && bits != 8 && bits != 32) return FL_BAD_ARGUMENT;
  if (!power_of_two_within(param[1], kLeastChunk, kMostChunk)) return FL_BAD_ARGUMENT;
  if (param[2] < 1 || param[2] > param[1]) return FL_BAD_ARGUMENT;
  return (param[3] & kMagnitudeBits) < kF32Inf ? FL_OK : FL_BAD_ARGUMENT;
}

constexpr Codec chunked_codec = {kChunkedPlanes, chunked_bytes, check_chunked, dense_verbs};

}  // namespace fl
