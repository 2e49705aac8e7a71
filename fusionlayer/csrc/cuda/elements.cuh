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

// Two 16-bit values as the hardware made them of a and b, with the canonical NaN where it has its own.
FL_DEVICE uint32_t with_nans(uint32_t two, float a, float b, uint16_t nan) {
  if (a != a) two = (two & 0xffff0000u) | nan;
  if (b != b) two = (two & 0x0000ffffu) | uint32_t(nan) << 16;
  return two;
}

struct Bf16 {
  using Bits = uint16_t;
  static FL_DEVICE float widen(Bits b) { return bf16_to_f32(b); }
  static FL_DEVICE Bits narrow(float f) { return f32_to_bf16(f); }
  static FL_DEVICE uint32_t narrow_two(float a, float b) {
#ifdef __CUDA_ARCH__
    uint32_t two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
    return with_nans(two, a, b, kBf16Nan);
#else
    return narrow(a) | uint32_t(narrow(b)) << 16;
#endif
  }
};

struct F16 {
  using Bits = uint16_t;
  static FL_DEVICE float widen(Bits b) { return f16_to_f32(b); }
  static FL_DEVICE Bits narrow(float f) { return f32_to_f16(f); }
  static FL_DEVICE uint32_t narrow_two(float a, float b) {
#ifdef __CUDA_ARCH__
    uint32_t two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
    return with_nans(two, a, b, kF16Nan);
#else
    return narrow(a) | uint32_t(narrow(b)) << 16;
#endif
  }
};

// b[i] = v[i] narrowed.
template <class E, int kCount>
FL_DEVICE void narrow_all(const float (&v)[kCount], typename E::Bits (&b)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(typename E::Bits) == 4) {
      b[i] = E::narrow(v[i]);
    } else if (i % 2 == 0) {
      const uint32_t two = E::narrow_two(v[i], v[i + 1]);
      b[i] = uint16_t(two);
      b[i + 1] = uint16_t(two >> 16);
    }
  }
}

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
