// FL_BLOCK: what shared code asks of it.
#pragma once

#include "block_scale.h"
#include "codec_entry.h"

namespace fl {

inline int64_t block_bytes(const fl_spec &spec, int p) {
  const int64_t blocks = group_count(spec);
  if (p == 1) return blocks * spec.param[1] * format_bits(spec.param[0]) / 8;
  const uint32_t kind = scale_kind(spec.param);
  return kind == FL_SCALE_MESSAGE ? (spec.numel ? 4 : 0) : blocks * scale_bytes(kind);
}

inline int check_block(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  const uint32_t format = param[0], scale = scale_kind(param), flags = param[3] & 0xffffu;
  const uint32_t tau = param[2] >> 16, epsilon = param[3] >> 16, largest = kF32Inf >> 16;
  if (scale != FL_SCALE_DUAL && (tau || epsilon || flags & FL_BLOCK_UNLIMITED)) return FL_UNSUPPORTED;
  if (tau >= largest || epsilon >= largest) return FL_BAD_ARGUMENT;
  if (format > FL_E2M1 || scale > FL_SCALE_MESSAGE) return FL_BAD_ARGUMENT;
  if (!power_of_two_within(param[1], 32, kMaxBlock)) return FL_BAD_ARGUMENT;
  if (flags & ~uint32_t(FL_BLOCK_HADAMARD | FL_BLOCK_GIVEN | FL_BLOCK_UNLIMITED)) return FL_UNSUPPORTED;
  if (flags & FL_BLOCK_GIVEN && scale != FL_SCALE_BF16) return FL_UNSUPPORTED;
  if (format == FL_INT8 && (scale == FL_SCALE_E8M0 || scale == FL_SCALE_BF16)) return FL_UNSUPPORTED;
  const bool hadamard = flags & FL_BLOCK_HADAMARD;
  return hadamard && (format_bits(format) != 8 || scale > FL_SCALE_DUAL) ? FL_UNSUPPORTED : FL_OK;
}

inline uint32_t block_verbs_of(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  const bool shared = scale_kind(param) == FL_SCALE_MESSAGE || param[3] & FL_BLOCK_GIVEN;
  return shared || format_bits(param[0]) == 6 ? kDense : kDense | kTwoShot;
}

constexpr Codec block_codec = {2, block_bytes, check_block, block_verbs_of};

}  // namespace fl
