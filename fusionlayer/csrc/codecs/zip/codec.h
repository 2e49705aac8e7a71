// FL_ZIP: what shared code asks of it.
#pragma once

#include "codec_entry.h"
#include "zip.h"

namespace fl {

inline int64_t zip_bytes(const fl_spec &spec, int p) {
  return p || !spec.numel ? zip_shape(spec).bytes() : int64_t(sizeof(ZipHead));
}

inline int check_zip(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if (!known_dtype(param[0]) || param[1] > FL_ZIP_TABLE || param[3]) return FL_BAD_ARGUMENT;
  if (param[2] > uint32_t(zip_exponents(param[0]) + 1 - kZipCodes)) return FL_BAD_ARGUMENT;
  return spec.numel > kZipMaxElements ? FL_UNSUPPORTED : FL_OK;
}

// Lossless: elements are encoded as what they are, and sums are encoded anew.
inline uint32_t zip_verbs_of(const fl_spec &spec) {
  return kDecodes | kSums | (spec.dtype == spec.param[0] ? kEncodes : 0);
}

constexpr Codec zip_codec = {2, zip_bytes, check_zip, zip_verbs_of};

}  // namespace fl
