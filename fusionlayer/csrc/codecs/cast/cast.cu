// The `cast` codec: every verb is "add up some sources, narrow the sum", except that a message of x's own type is a copy.
#include "arguments.h"
#include "cuda/launch.cuh"
#include "cuda/strip_io.cuh"
#include "residual.h"

namespace fl {
namespace {

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
  return launch_over(Grid(a.strips(), a.outputs), kernel, a, stream);
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

const Encoders cast_encoders = {cast_encode, cast_recode, nullptr};
const Decoders cast_decoders = {cast_decode, cast_decode_sum};

}  // namespace fl
