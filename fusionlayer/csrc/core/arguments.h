// Argument checks that every implementation of the C ABI makes first, and sizes that follow from a spec. Host only.
#pragma once

#include "codecs/names.h"

namespace fl {

constexpr int kPlaneAlignment = 16;

inline int plane_count(const fl_spec &spec) { return kCodecs[spec.codec].planes; }

// Bytes of plane p of one message.
inline int64_t plane_bytes(const fl_spec &spec, int p) { return kCodecs[spec.codec].bytes(spec, p); }

inline int check_spec(const fl_spec *spec) {
  if (!spec) return FL_BAD_ARGUMENT;
  if (spec->codec >= kCodecCount) return FL_UNSUPPORTED;
  if (!known_dtype(spec->dtype) || spec->numel < 0 || spec->numel > kMaxElements) return FL_BAD_ARGUMENT;
  return kCodecs[spec->codec].check(*spec);
}

// For shared verbs: whether this spec has all of `verbs`.
inline int check_verbs(const fl_spec *spec, uint32_t verbs) {
  if (const int bad = check_spec(spec)) return bad;
  return verbs & ~kCodecs[spec->codec].verbs(*spec) ? FL_UNSUPPORTED : FL_OK;
}

// For verbs of one codec alone.
inline int check_spec_of(uint32_t codec, const fl_spec *spec) {
  if (const int bad = check_spec(spec)) return bad;
  return spec->codec == codec ? FL_OK : FL_UNSUPPORTED;
}

inline bool aligned(const void *p, int64_t bytes) { return uintptr_t(p) % uintptr_t(bytes) == 0; }

// A flat array argument: null only where it has no elements.
inline int check_array(const void *p, int64_t numel, int64_t size) {
  return numel == 0 || (p && aligned(p, size)) ? FL_OK : FL_BAD_ARGUMENT;
}

inline int check_optional(const void *p, int64_t numel, int64_t size) {
  return p ? check_array(p, numel, size) : FL_OK;
}

// Messages do not overlap: with more than one, each plane ends before the same plane of the next begins.
inline int check_messages(const fl_spec &spec, const fl_messages *messages) {
  if (!messages || messages->count < 0 || messages->count > kMaxElements) return FL_BAD_ARGUMENT;
  if (messages->count == 0 || spec.numel == 0) return FL_OK;
  if (spec.numel > kMaxElements / messages->count) return FL_BAD_ARGUMENT;
  for (int p = 0; p < plane_count(spec); ++p) {
    if (plane_bytes(spec, p) == 0) continue;
    if (!messages->plane[p] || !aligned(messages->plane[p], kPlaneAlignment)) return FL_BAD_ARGUMENT;
    if (messages->count > 1 && messages->stride < plane_bytes(spec, p)) return FL_BAD_ARGUMENT;
  }
  return messages->count > 1 && messages->stride % kPlaneAlignment ? FL_BAD_ARGUMENT : FL_OK;
}

inline int first_error(int a, int b) { return a ? a : b; }

inline int check_encode(const fl_spec *spec, const void *x, const float *residual, const fl_messages *out) {
  if (const int bad = check_verbs(spec, residual ? kEncodes | kFeedback : kEncodes)) return bad;
  if (const int bad = check_messages(*spec, out)) return bad;
  const int64_t numel = spec->numel * out->count;
  return first_error(check_array(x, numel, element_size(spec->dtype)), check_optional(residual, numel, 4));
}

inline int check_decode(const fl_spec *spec, const fl_messages *in, const void *out) {
  if (const int bad = check_verbs(spec, kDecodes)) return bad;
  if (const int bad = check_messages(*spec, in)) return bad;
  return check_array(out, spec->numel * in->count, element_size(spec->dtype));
}

inline int check_decode_sum(const fl_spec *spec, const fl_messages *in, const void *out) {
  if (const int bad = check_verbs(spec, kSums)) return bad;
  return first_error(check_messages(*spec, in), check_array(out, spec->numel, element_size(spec->dtype)));
}

inline int check_recode(const fl_spec *spec, const fl_messages *in, const void *x, const float *residual,
                        const fl_messages *out) {
  if (const int bad = check_verbs(spec, kRecodes)) return bad;
  if (const int bad = first_error(check_messages(*spec, in), check_messages(*spec, out))) return bad;
  if (out->count != 1) return FL_BAD_ARGUMENT;
  return first_error(check_optional(x, spec->numel, element_size(spec->dtype)),
                     check_optional(residual, spec->numel, 4));
}

}  // namespace fl
