// FL_RANS: what shared code asks of it.
#pragma once

#include "codecs/zip/codec.h"
#include "rans.h"

namespace fl {

inline int64_t rans_bytes(const fl_spec &spec, int p) {
  if (!spec.numel) return 0;
  return p ? rans_shape(spec).data_bytes() : int64_t(sizeof(ZipHead));
}

inline int check_rans(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if (!known_dtype(param[0]) || param[1] || param[2] || param[3]) return FL_BAD_ARGUMENT;
  return spec.numel > kZipMaxElements ? FL_UNSUPPORTED : FL_OK;
}

constexpr Codec rans_codec = {2, rans_bytes, check_rans, zip_verbs_of};

}  // namespace fl
