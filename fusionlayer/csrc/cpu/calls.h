// From a call of the C ABI to a codec's verbs.
#pragma once

#include "run.h"

namespace fl {

// What a call gives; null where a verb takes no such argument. Kernels write to `out`, y and the residual alone.
inline Job job_of(const fl_spec *spec, const fl_messages *in, const void *x, const float *residual, const void *y,
                  const fl_messages *out) {
  Job job{};
  job.spec = spec;
  job.in = in;
  job.x = x;
  job.residual = const_cast<float *>(residual);
  job.y = const_cast<void *>(y);
  job.out = out;
  return job;
}

inline int run_own(uint32_t codec, int number, Job &&job) { return run_own(codec, number, job); }

}  // namespace fl
