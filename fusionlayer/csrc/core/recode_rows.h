// fl_recode_rows of both libraries: row after row, by the verbs of one row. On CUDA each row is a launch of its own.
#pragma once

#include "fusionlayer_codec.h"

namespace fl {

// One message of many, `bytes` behind the first.
inline fl_messages messages_at(const fl_messages &all, int64_t bytes) {
  fl_messages moved = all;
  for (void *&plane : moved.plane)
    if (plane) plane = static_cast<uint8_t *>(plane) + bytes;
  return moved;
}

inline int recode_rows(const fl_spec *source, const fl_messages *in, int64_t step, const fl_spec *spec,
                       const int64_t *starts, float *residual, const fl_messages *out, void *stream) {
  if (!in || !spec || !out || out->count < 0 || (out->count > 0 && !starts)) return FL_BAD_ARGUMENT;
  for (int64_t row = 0; row < out->count; ++row) {
    fl_spec at = *spec;
    at.offset += starts[row];
    float *kept = residual ? residual + starts[row] : nullptr;
    const fl_messages summands = messages_at(*in, row * step);
    fl_messages sum = messages_at(*out, row * out->stride);
    sum.count = 1;
    const int status = source ? fl_recode_from(source, &summands, &at, kept, &sum, stream)
                              : fl_recode(&at, &summands, nullptr, kept, &sum, stream);
    if (status) return status;
  }
  return FL_OK;
}

}  // namespace fl
