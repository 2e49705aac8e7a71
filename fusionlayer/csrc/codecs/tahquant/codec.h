// FL_TAHQUANT: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "tahquant.h"

namespace fl {

inline int64_t tahquant_bytes(const fl_spec &spec, int p) {
  const TahShape shape = tah_shape(spec);
  return p == 0 ? shape.mark_bytes() : p == 4 ? shape.code_bytes() : p == 1 ? shape.tiles() : 2 * shape.tiles();
}

inline int check_tahquant(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if ((param[0] != 4 && param[0] != 6) || !power_of_two_within(param[2], 32, kTahMaxTile)) return FL_BAD_ARGUMENT;
  if (!param[1] || param[1] > 16384 || param[1] % param[2]) return FL_BAD_ARGUMENT;
  if (param[3] && param[0] == 6) return FL_BAD_ARGUMENT;
  return param[3] && tah_shape(spec).tokens() > kTahMostTokens ? FL_UNSUPPORTED : FL_OK;
}

inline uint32_t tahquant_verbs_of(const fl_spec &spec) { return tah_shape(spec).coarse ? kDense & ~kRecodes : kDense; }

constexpr Codec tahquant_codec = {5, tahquant_bytes, check_tahquant, tahquant_verbs_of};

}  // namespace fl
