// The `cast` codec: every verb is "add up some sources, narrow the sum", except that a message of x's own type is a copy.
#include "arguments.h"
#include "elements.cuh"
#include "launch.cuh"
#include "residual.h"

namespace fl {
namespace {

// A warp holds a strip of 512 elements at a time: lane l has elements 4 l .. 4 l + 3 of each of its four parts.
constexpr int kPart = 4 * kLanes;
constexpr int kParts = 4;
constexpr int kStrip = kParts * kPart;
constexpr int kHeld = kStrip / kLanes;  // elements a lane holds

FL_DEVICE void load_four(const uint32_t *x, uint32_t *b) {
  const uint4 u = *reinterpret_cast<const uint4 *>(x);
  b[0] = u.x, b[1] = u.y, b[2] = u.z, b[3] = u.w;
}

FL_DEVICE void load_four(const uint16_t *x, uint16_t *b) {
  const uint2 u = *reinterpret_cast<const uint2 *>(x);
  b[0] = uint16_t(u.x), b[1] = uint16_t(u.x >> 16), b[2] = uint16_t(u.y), b[3] = uint16_t(u.y >> 16);
}

FL_DEVICE void store_four(uint32_t *x, const uint32_t *b) {
  *reinterpret_cast<uint4 *>(x) = make_uint4(b[0], b[1], b[2], b[3]);
}

FL_DEVICE void store_four(uint16_t *x, const uint16_t *b) {
  *reinterpret_cast<uint2 *>(x) = make_uint2(b[0] | uint32_t(b[1]) << 16, b[2] | uint32_t(b[3]) << 16);
}

// Where a strip of an array of numel elements lies for this lane.
template <class Bits>
struct Strip {
  Bits *start;   // the lane's first element
  int64_t left;  // elements of the array from there on
  bool wide;     // the whole strip can be accessed four elements at a time

  FL_DEVICE Strip(Bits *x, int64_t numel, int64_t strip) {
    const int64_t element = opaque(strip * kStrip + 4 * lane_index());
    start = x + element;
    left = numel - element;
    wide = is_aligned(start, 4 * sizeof(Bits)) && left >= kStrip - kPart + 4;
  }

  // How many of the lane's four elements of a part exist.
  FL_DEVICE int count(int part) const {
    const int64_t n = left - part * kPart;
    return n >= 4 ? 4 : int(n);
  }
};

template <class Bits>
FL_DEVICE void load_strip(const Bits *x, int64_t numel, int64_t strip, Bits (&b)[kHeld]) {
  const Strip<const Bits> at(x, numel, strip);
  if (at.wide) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_four(at.start + part * kPart, b + 4 * part);
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) b[i] = i % 4 < at.count(i / 4) ? at.start[i / 4 * kPart + i % 4] : Bits(0);
  }
}

template <class Bits>
FL_DEVICE void store_strip(Bits *x, int64_t numel, int64_t strip, const Bits (&b)[kHeld]) {
  const Strip<Bits> at(x, numel, strip);
  if (at.wide) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) store_four(at.start + part * kPart, b + 4 * part);
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (i % 4 < at.count(i / 4)) at.start[i / 4 * kPart + i % 4] = b[i];
  }
}

FL_DEVICE void load_values(uint32_t dtype, const void *x, int64_t numel, int64_t strip, float (&v)[kHeld]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits b[kHeld];
    load_strip(static_cast<const typename E::Bits *>(x), numel, strip, b);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) v[i] = E::widen(b[i]);
  });
}

// Writes v narrowed, and leaves in v what a reader will make of it.
FL_DEVICE void store_values(uint32_t dtype, void *x, int64_t numel, int64_t strip, float (&v)[kHeld]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits b[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      b[i] = E::narrow(v[i]);
      v[i] = E::widen(b[i]);
    }
    store_strip(static_cast<typename E::Bits *>(x), numel, strip, b);
  });
}

// One or more arrays of the same size, `stride` bytes apart.
struct Arrays {
  void *data;
  int64_t stride;
  uint32_t dtype;
};

FL_DEVICE void *array(const Arrays &arrays, int64_t i) { return byte_offset(arrays.data, i * arrays.stride); }

// out[i] = (x.data ? x[i] : 0) + terms[0] + terms[1] + ... + (residual ? residual[i] : 0), for every i < outputs.
struct SumArguments {
  int64_t numel, outputs;
  Arrays x;
  Arrays terms;
  int64_t term_count;
  float *residual;
  Arrays out;

  FL_HD int64_t strips() const { return (numel + kStrip - 1) / kStrip; }
};

template <class Bits>
__global__ void __launch_bounds__(kThreads) copy_kernel(const SumArguments a) {
  for (int64_t m = blockIdx.y; m < a.outputs; m += gridDim.y)
    for (int64_t strip = warp_index(); strip < a.strips(); strip += warp_count()) {
      Bits b[kHeld];
      load_strip(static_cast<const Bits *>(array(a.x, m)), a.numel, strip, b);
      store_strip(static_cast<Bits *>(array(a.out, m)), a.numel, strip, b);
    }
}

FL_DEVICE void sum_strip(const SumArguments &a, int64_t m, int64_t strip) {
  float v[kHeld] = {};
  if (a.x.data) load_values(a.x.dtype, array(a.x, m), a.numel, strip, v);
#pragma unroll 1
  for (int64_t t = 0; t < a.term_count; ++t) {
    float term[kHeld];
    load_values(a.terms.dtype, array(a.terms, t), a.numel, strip, term);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) v[i] += term[i];
  }
  if (!a.residual) return store_values(a.out.dtype, array(a.out, m), a.numel, strip, v);

  uint32_t *residual = reinterpret_cast<uint32_t *>(a.residual + m * a.numel);
  uint32_t old[kHeld];
  load_strip(residual, a.numel, strip, old);
  float sent[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) sent[i] = v[i] += bits_float(old[i]);
  store_values(a.out.dtype, array(a.out, m), a.numel, strip, sent);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) old[i] = float_bits(residual_after(v[i], sent[i], bits_float(old[i])));
  store_strip(residual, a.numel, strip, old);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const SumArguments a) {
  for (int64_t m = blockIdx.y; m < a.outputs; m += gridDim.y)
    for (int64_t strip = warp_index(); strip < a.strips(); strip += warp_count()) sum_strip(a, m, strip);
}

using Kernel = void (*)(SumArguments);

cudaError_t launch(Kernel kernel, const SumArguments &a, cudaStream_t stream) {
  const Grid grid(a.strips(), a.outputs);
  if (grid.error) return grid.error;
  FL_LAUNCH(kernel, grid.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

// Values of the same type keep their bytes, NaNs included.
cudaError_t launch_one_to_one(const SumArguments &a, cudaStream_t stream) {
  if (a.x.dtype != a.out.dtype || a.residual) return launch(sum_kernel, a, stream);
  return launch(element_size(a.x.dtype) == 4 ? copy_kernel<uint32_t> : copy_kernel<uint16_t>, a, stream);
}

// x or out: contiguous over messages. The kernels write to `out` and the residual alone.
Arrays tensors(const fl_spec &spec, const void *data) {
  return {const_cast<void *>(data), spec.numel * element_size(spec.dtype), spec.dtype};
}

Arrays planes(const fl_spec &spec, const fl_messages &messages) {
  return {messages.plane[0], messages.stride, spec.param[0]};
}

}  // namespace

cudaError_t cast_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                        cudaStream_t stream) {
  return launch_one_to_one({spec.numel, out.count, tensors(spec, x), {}, 0, residual, planes(spec, out)}, stream);
}

cudaError_t cast_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  return launch_one_to_one({spec.numel, in.count, planes(spec, in), {}, 0, nullptr, tensors(spec, out)}, stream);
}

cudaError_t cast_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  const Arrays start = tensors(spec, add ? out : nullptr);
  return launch(sum_kernel, {spec.numel, 1, start, planes(spec, in), in.count, nullptr, tensors(spec, out)}, stream);
}

cudaError_t cast_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                        const fl_messages &out, cudaStream_t stream) {
  return launch(sum_kernel, {spec.numel, 1, tensors(spec, x), planes(spec, in), in.count, residual, planes(spec, out)},
                stream);
}

}  // namespace fl
