// FL_THC: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "thc.h"

namespace fl {

inline int64_t thc_bytes(const fl_spec &spec, int p) {
  const ThcShape shape = thc_shape(spec);
  return p ? shape.count() / kCodeRun * shape.run_bytes() : shape.sections() * int64_t(sizeof(float));
}

inline int check_thc(const fl_spec &spec) {
  const uint32_t *param = spec.param, flags = param[0] & ((1u << FL_THC_RANKS_SHIFT) - 1);
  if (!power_of_two_within(param[1], kCodeRun, kThcMaxBlock)) return FL_BAD_ARGUMENT;
  if (flags & ~uint32_t(FL_THC_UNIFORM | FL_THC_STOCHASTIC | FL_THC_GIVEN)) return FL_UNSUPPORTED;
  if (param[2] < 0x00800000u || param[2] >= kF32Inf) return FL_BAD_ARGUMENT;
  const ThcShape shape = thc_shape(spec);
  if (shape.ranks * shape.top() > 0xffff) return FL_BAD_ARGUMENT;
  return starts_group(spec, kCodeRun) ? FL_OK : FL_BAD_ARGUMENT;
}

// Sums of messages are encoded anew, or are sums of codes, which nothing encodes.
inline uint32_t thc_verbs_of(const fl_spec &spec) {
  return kDecodes | kSums | (thc_shape(spec).ranks ? 0 : kEncodes | kFeedback);
}

constexpr Codec thc_codec = {2, thc_bytes, check_thc, thc_verbs_of};

}  // namespace fl
