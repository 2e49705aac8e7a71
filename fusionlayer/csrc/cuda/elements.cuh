// The element types of x, out and cast messages, and the choice among them at run time: the dtype is the same for a whole
// launch, so the branch never diverges.
#pragma once

#include "floats.h"
#include "fusionlayer_codec.h"
#include "warp.cuh"

namespace fl {

struct F32 {
  using Bits = uint32_t;
  static FL_DEVICE float widen(Bits b) { return bits_float(b); }
  static FL_DEVICE Bits narrow(float f) { return float_bits(canonical(f)); }
};

struct Bf16 {
  using Bits = uint16_t;
  static FL_DEVICE float widen(Bits b) { return bf16_to_f32(b); }
  static FL_DEVICE Bits narrow(float f) { return f32_to_bf16(f); }
};

struct F16 {
  using Bits = uint16_t;
  static FL_DEVICE float widen(Bits b) { return f16_to_f32(b); }
  static FL_DEVICE Bits narrow(float f) { return f32_to_f16(f); }
};

// Calls work(F32{}), work(Bf16{}) or work(F16{}).
template <class Work>
FL_DEVICE void with_element(uint32_t dtype, const Work &work) {
  if (dtype == FL_F32)
    work(F32{});
  else if (dtype == FL_BF16)
    work(Bf16{});
  else
    work(F16{});
}

FL_DEVICE bool is_aligned(const void *p, int bytes) { return (reinterpret_cast<uintptr_t>(p) & (bytes - 1)) == 0; }

// p, `bytes` bytes further on.
template <class T>
FL_DEVICE T *byte_offset(T *p, int64_t bytes) {
  return reinterpret_cast<T *>(reinterpret_cast<char *>(p) + bytes);
}

FL_DEVICE void *byte_offset(void *p, int64_t bytes) { return static_cast<char *>(p) + bytes; }
FL_DEVICE const void *byte_offset(const void *p, int64_t bytes) { return static_cast<const char *>(p) + bytes; }

}  // namespace fl
