// The C ABI of the verbs that FL_THC alone has, for the CPU.
#include "checks.h"
#include "cpu/calls.h"

extern "C" {

int fl_add_codes(const fl_spec *spec, const fl_messages *in, uint8_t *out, void *) {
  if (const int bad = fl::check_add_codes(spec, in, out)) return bad;
  return fl::run_own(FL_THC, 0, fl::job_of(spec, in, nullptr, nullptr, out, nullptr));
}

int fl_thc_rms(const fl_spec *spec, const void *x, const float *residual, float *rms, void *) {
  if (const int bad = fl::check_thc_rms(spec, x, residual, rms)) return bad;
  return fl::run_own(FL_THC, 1, fl::job_of(spec, nullptr, x, residual, rms, nullptr));
}

}  // extern "C"
