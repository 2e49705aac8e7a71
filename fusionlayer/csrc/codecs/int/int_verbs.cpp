// The C ABI of the verbs that FL_INT alone has, for the CPU.
#include "checks.h"
#include "cpu/calls.h"

extern "C" {

int fl_recode_from(const fl_spec *source, const fl_messages *in, const fl_spec *spec, float *residual,
                   const fl_messages *out, void *) {
  if (const int bad = fl::check_recode_from(source, in, spec, residual, out)) return bad;
  fl::Job job = fl::job_of(spec, in, nullptr, residual, nullptr, out);
  job.source = source;
  return fl::run_own(FL_INT, 0, job);
}

int fl_encode_difference(const fl_spec *spec, const float *x, const void *base, const fl_messages *out, void *) {
  if (const int bad = fl::check_encode_difference(spec, x, base, out)) return bad;
  return fl::run_own(FL_INT, 1, fl::job_of(spec, nullptr, x, nullptr, base, out));
}

}  // extern "C"
