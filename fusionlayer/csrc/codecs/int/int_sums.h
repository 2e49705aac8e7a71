// Sums of `int` messages that become messages of another codec.
#pragma once

#include "int_codec.h"

namespace fl::FL_ISA {

// v = the sum of n elements from number `element` on of all messages of job.source. Returns what to fetch before the next.
using SumOfSource = Ahead(const Job &job, int64_t element, int n, float *v);

template <int kBits, bool kHadamard>
Ahead sum_of_source(const Job &job, int64_t element, int n, float *v) {
  Job reading = job;
  reading.spec = job.source;
  const IntCodec<kBits, kHadamard> codec(reading);
  if constexpr (!kHadamard) __builtin_memset(v, 0, size_t(n) * sizeof(float));
  return codec.sum(*job.in, element / codec.unit(), n, 2, v);
}

inline SumOfSource *sum_of(const fl_spec &source) {
  const bool hadamard = source.param[2] & FL_INT_HADAMARD;
  if (source.param[0] == 2) return hadamard ? sum_of_source<2, true> : sum_of_source<2, false>;
  if (source.param[0] == 3) return hadamard ? sum_of_source<3, true> : sum_of_source<3, false>;
  if (source.param[0] == 4) return hadamard ? sum_of_source<4, true> : sum_of_source<4, false>;
  return hadamard ? sum_of_source<8, true> : sum_of_source<8, false>;
}

}  // namespace fl::FL_ISA
