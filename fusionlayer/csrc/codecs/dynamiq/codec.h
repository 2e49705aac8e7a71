// FL_DYNAMIQ: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "dynamiq.h"

namespace fl {

inline int64_t dynamiq_bytes(const fl_spec &spec, int p) {
  const int64_t groups = super_groups(spec.numel);
  const bool flat = spec.param[0] & FL_DYNAMIQ_FLAT;
  if (p == 0) return width_runs(groups) * int64_t(sizeof(WidthRun));
  if (p == 1) return flat ? 0 : groups * 2;
  return p == 2 ? groups * kScaleGroups : int64_t(spec.param[1]) * kLeastCodes;
}

inline int check_dynamiq(const fl_spec &spec) {
  const uint32_t *param = spec.param, rank = param[2] & 0xffff, ranks = param[2] >> 16;
  if (param[1] < uint64_t(super_groups(spec.numel)) || rank >= ranks || ranks > kMostRanks) return FL_BAD_ARGUMENT;
  if (spec.offset > kMaxElements || !starts_group(spec, kSuperGroup)) return FL_BAD_ARGUMENT;
  if (!epsilons_fit(param[3])) return FL_BAD_ARGUMENT;
  return param[0] & ~uint32_t(FL_DYNAMIQ_FLAT) ? FL_UNSUPPORTED : FL_OK;
}

constexpr Codec dynamiq_codec = {kDynamiqPlanes, dynamiq_bytes, check_dynamiq, dense_verbs};

}  // namespace fl
