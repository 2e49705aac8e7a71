// The kernels of one instruction set that work on blocks of FL_DELTA. Compiled once for each, like kernels.cpp.
#include "delta_decode.h"
#include "delta_kernels.h"

namespace fl::FL_ISA {
namespace {

template <class T>
const T *as(const void *p) {
  return static_cast<const T *>(p);
}

}  // namespace

int run_delta_encode(int element_bytes, const void *x, const void *base, int n, uint8_t *out) {
  return element_bytes == 4 ? encode_delta(as<uint32_t>(x), as<uint32_t>(base), n, out)
                            : encode_delta(as<uint16_t>(x), as<uint16_t>(base), n, out);
}

bool run_delta_decode(int element_bytes, const uint8_t *in, int bytes, const void *base, void *out, int n) {
  return element_bytes == 4 ? decode_delta(in, bytes, as<uint32_t>(base), static_cast<uint32_t *>(out), n)
                            : decode_delta(in, bytes, as<uint16_t>(base), static_cast<uint16_t *>(out), n);
}

}  // namespace fl::FL_ISA
