// Checks of sparsification.
#pragma once

#include "arguments.h"
#include "sparse.h"

namespace fl {

inline int check_accumulate(uint32_t dtype, const void *x, int64_t numel, const float *acc) {
  if (!known_dtype(dtype) || numel < 0 || numel > kMaxElements) return FL_BAD_ARGUMENT;
  return first_error(check_array(x, numel, element_size(dtype)), check_array(acc, numel, 4));
}

// A call that looks at acc alone and leaves its result in out.
inline int check_look(const float *acc, int64_t numel, const void *out, const void *workspace) {
  if (numel < 0 || numel > kMaxElements || !out || !aligned(out, 8)) return FL_BAD_ARGUMENT;
  return first_error(check_array(acc, numel, 4), check_array(workspace, numel, kPlaneAlignment));
}

inline int check_count_above(const float *acc, int64_t numel, const uint32_t *thresholds, int count,
                             const int64_t *counts) {
  if (!thresholds || count < 1 || count > FL_MAX_THRESHOLDS) return FL_BAD_ARGUMENT;
  for (int i = 0; i < count; ++i)
    if (thresholds[i] > kMagnitudeBits) return FL_BAD_ARGUMENT;
  return check_look(acc, numel, counts, counts);
}

inline int check_choose_drawn(const fl_spec *spec, const float *acc, int64_t k, const void *workspace,
                              const fl_choice *out) {
  if (const int bad = check_spec_of(FL_SPARSE, spec)) return bad;
  if (!(spec->param[3] & FL_SPARSE_RANDOM)) return FL_UNSUPPORTED;
  if (k < 1 || k > spec->numel) return FL_BAD_ARGUMENT;
  return check_look(acc, spec->numel, out, workspace);
}

inline int check_choose_threshold(const fl_chooser *how, const float *acc, int64_t numel, const float *sample,
                                  const fl_threshold_memory *memory, const void *workspace, const fl_choice *out) {
  if (!how || how->estimator > FL_ESTIMATE_PARETO || how->reuse < 1 || how->count > FL_MAX_ESTIMATES)
    return FL_BAD_ARGUMENT;
  if (numel < 1 || how->k < 1 || how->k > how->capacity || how->capacity > numel) return FL_BAD_ARGUMENT;
  if (how->stages < 1 || how->stages > FL_MAX_STAGES) return FL_BAD_ARGUMENT;
  if (how->published > 1) return FL_BAD_ARGUMENT;
  if (how->most_stages < 1 || how->most_stages > FL_MAX_STAGES) return FL_BAD_ARGUMENT;
  const bool takes_sample = how->estimator == FL_ESTIMATE_SAMPLED;
  if (takes_sample && (how->sampled < 1 || how->sampled > numel || how->sample_k < 1 || how->sample_k > how->sampled))
    return FL_BAD_ARGUMENT;
  const int arrays = first_error(check_array(sample, takes_sample ? how->sampled : 0, 4), check_array(memory, 1, 4));
  return first_error(arrays, check_look(acc, numel, out, workspace));
}

inline int check_sparse_encode(const fl_spec *spec, const void *x, const float *acc, const float *clear,
                               const fl_choice &given, const fl_choice *choice, const void *workspace,
                               const fl_messages *out) {
  if (const int bad = check_spec_of(FL_SPARSE, spec)) return bad;
  if (const int bad = check_messages(*spec, out)) return bad;
  const int64_t most = spec->param[3] & FL_SPARSE_RANDOM ? kNumbers : int64_t(kMagnitudeBits);
  if (given.threshold < 0 || given.threshold > most || given.ties < -1) return FL_BAD_ARGUMENT;
  if (out->count != 1 || !aligned(choice, 8)) return FL_BAD_ARGUMENT;
  const int arrays = first_error(check_array(acc, spec->numel, 4), check_optional(clear, spec->numel, 4));
  return first_error(arrays, first_error(check_optional(x, spec->numel, element_size(spec->dtype)),
                                         check_array(workspace, spec->numel, kPlaneAlignment)));
}

}  // namespace fl
