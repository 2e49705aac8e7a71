// FL_SPARSE: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "sparse.h"

namespace fl {

inline int64_t sparse_bytes(const fl_spec &spec, int p) { return sparse_shape(spec).plane_bytes(p); }

inline int check_sparse(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if (param[0] > FL_SPARSE_SHORT || !known_dtype(param[1]) || param[2] > spec.numel) return FL_BAD_ARGUMENT;
  if (spec.offset < 0 || spec.offset > kMaxElements) return FL_BAD_ARGUMENT;
  return param[1] == FL_F16 || param[3] & ~uint32_t(FL_SPARSE_RANDOM) ? FL_UNSUPPORTED : FL_OK;
}

inline uint32_t sparse_verbs_of(const fl_spec &) { return kSums; }

constexpr Codec sparse_codec = {kSparsePlanes, sparse_bytes, check_sparse, sparse_verbs_of};

}  // namespace fl
