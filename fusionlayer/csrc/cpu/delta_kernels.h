// The kernels of FL_DELTA in kernels_delta.cpp.
#pragma once

#include <cstdint>

namespace fl::FL_ISA {

int run_delta_encode(int element_bytes, const void *x, const void *base, int n, uint8_t *out);
bool run_delta_decode(int element_bytes, const uint8_t *in, int bytes, const void *base, void *out, int n);

}  // namespace fl::FL_ISA
