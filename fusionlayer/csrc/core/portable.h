// What host and device code share: the function qualifier and bit casts.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FL_HD __host__ __device__ __forceinline__
#else
#define FL_HD inline __attribute__((always_inline))
#endif

// Before a loop of few steps whose arrays are to be registers.
#if defined(__CUDACC__) || defined(__clang__)
#define FL_UNROLL _Pragma("unroll")
#else
#define FL_UNROLL _Pragma("GCC unroll 32")
#endif

namespace fl {

FL_HD uint32_t float_bits(float f) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(f);
#else
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
#endif
}

FL_HD float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
#endif
}

FL_HD uint64_t double_bits(double v) {
#if defined(__CUDA_ARCH__)
  return uint64_t(__double_as_longlong(v));
#else
  uint64_t u;
  std::memcpy(&u, &v, sizeof u);
  return u;
#endif
}

FL_HD double bits_double(uint64_t u) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(int64_t(u));
#else
  double v;
  std::memcpy(&v, &u, sizeof v);
  return v;
#endif
}

// Rounded to nearest.
FL_HD float square_root(float f) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(f);
#else
  return __builtin_sqrtf(f);
#endif
}

}  // namespace fl
