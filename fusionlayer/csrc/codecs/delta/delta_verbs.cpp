// The C ABI of FL_DELTA for the CPU.
#include "checks.h"
#include "cpu/calls.h"

extern "C" {

int fl_delta_encode(const fl_spec *spec, const void *x, const void *base, const fl_messages *out, void *, void *) {
  if (const int bad = fl::check_delta(spec, x, base, out)) return bad;
  return fl::run_own(FL_DELTA, 0, fl::job_of(spec, nullptr, x, nullptr, base, out));
}

int fl_delta_decode(const fl_spec *spec, const fl_messages *in, const void *base, void *out, void *, int32_t *,
                    void *) {
  if (const int bad = fl::check_delta(spec, out, base, in)) return bad;
  return fl::run_own(FL_DELTA, 1, fl::job_of(spec, in, base, nullptr, out, nullptr));
}

}  // extern "C"
