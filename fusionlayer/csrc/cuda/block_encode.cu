// encode and recode of the `block` codec: one launch, and one more before it where all of a message shares a scale.
#include "block_codes.cuh"

namespace fl {
namespace {

struct EncodeArguments {
  BlockLayout layout;
  BlockMessages in;  // recode: added to x
  BlockMessages out;
  uint32_t dtype;
  const void *x;
  int64_t x_stride;  // bytes of the elements of a message
  float *residual;
};

// v = what a lane's run is encoded from.
template <bool kTransform, bool kSum, bool kResidual>
FL_DEVICE void gather_run(const EncodeArguments &a, int64_t message, const Run &run, int lane, float (&v)[kBlock]) {
  const int64_t numel = a.layout.numel;
  if (kSum) {
    load_or_zero(a.dtype, a.x, numel, run.first, lane, v);
    add_messages<kTransform>(a.layout, a.in, run, lane, v);
    clear_padding(v, numel - run.first);
  } else {
    load_block(a.dtype, byte_offset(a.x, message * a.x_stride), numel, run.first, lane, v);
  }
  if (kResidual) add_residual(a.residual + message * numel, numel, run.first, lane, v);
}

template <bool kTransform, bool kSum, bool kResidual>
FL_DEVICE void encode_message(const EncodeArguments &a, int64_t message) {
  const BlockLayout &layout = a.layout;
  const int lane = lane_index(), width = layout.lanes();
  void *scales = byte_offset(a.out.scales, message * a.out.stride);
  uint8_t *codes = a.out.codes + message * a.out.stride;

  for (int64_t tile = warp_index(); tile < layout.tiles(); tile += warp_count()) {
    const Run run(layout, tile, lane);
    float v[kBlock], wanted[kBlock];
    gather_run<kTransform, kSum, kResidual>(a, message, run, lane, v);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) wanted[i] = v[i];
    if (kTransform) {
      hadamard32(v);
      hadamard_over_lanes(v, width, lane);
    }

    const bool whole = layout.scaling.kind == FL_SCALE_MESSAGE;
    const uint32_t amax = whole ? *static_cast<const uint32_t *>(scales) : max_over_lanes(largest_of(v), width);
    const float squares = layout.scaling.kind == FL_SCALE_DUAL ? sum_of_squares(v, width) : 0.0f;
    // Lanes of a block may see what the first of them writes below: it makes the same scale again.
    const uint32_t given = layout.given && run.exists ? static_cast<const uint16_t *>(scales)[run.block] : 0;
    const BlockScale scale =
        layout.given ? given_block_scale(layout.scaling, given, amax) : make_block_scale(layout.scaling, amax, squares);

    if (layout.scaling.kind == FL_SCALE_DUAL) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] *= scale.before;
    }

    with_format(layout.format, [&](auto format) {
      constexpr uint32_t kFormat = decltype(format)::code;
      uint32_t bytes[kWords] = {};
      if (scale.inverse != 0.0f) {
#pragma unroll
        for (int i = 0; i < kWords; ++i)
          bytes[i] = four_codes<kFormat>(v[4 * i] * scale.inverse, v[4 * i + 1] * scale.inverse,
                                         v[4 * i + 2] * scale.inverse, v[4 * i + 3] * scale.inverse);
      }
      if (run.exists) store_run<format_bits(kFormat)>(codes, run.index, bytes);
      if (kResidual) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) four_values<kFormat>(bytes[i], v + 4 * i);
      }
    });
    if (run.exists && (run.index & (width - 1)) == 0) store_block_scale(layout, scales, run.block, scale);
    if (kResidual) {
      finish_values<kTransform>(layout, decode_block_scale(layout.scaling, scale.wire, scale.first), lane, v);
      update_residual(a.residual + message * layout.numel, layout.numel, run.first, lane, wanted, v);
    }
  }
}

template <bool kTransform, bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads) encode_kernel(const EncodeArguments a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) encode_message<kTransform, kSum, kResidual>(a, m);
}

// FL_SCALE_MESSAGE: plane 0, which is zero, becomes the largest magnitude.
template <bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads, 3) look_kernel(const EncodeArguments a) {
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    uint32_t amax = 0;
    for (int64_t tile = warp_index(); tile < a.layout.tiles(); tile += warp_count()) {
      float v[kBlock];
      gather_run<false, kSum, kResidual>(a, m, Run(a.layout, tile, lane), lane, v);
      const uint32_t largest = largest_of(v);
      amax = largest > amax ? largest : amax;
    }
    amax = max_over_lanes(amax, kLanes);
    if (lane == 0)
      atomicMax(static_cast<uint32_t *>(byte_offset(a.out.scales, m * a.out.stride)), amax >= kF32Inf ? kF32Nan : amax);
  }
}

EncodeArguments arguments(const fl_spec &spec, const void *x, float *residual, const fl_messages &out) {
  return {block_layout(spec), {}, block_messages(out), spec.dtype, x, spec.numel * element_size(spec.dtype), residual};
}

template <bool kSum>
cudaError_t launch(const EncodeArguments &a, bool hadamard, cudaStream_t stream) {
  const auto kernel = hadamard ? (a.residual ? encode_kernel<true, kSum, true> : encode_kernel<true, kSum, false>)
                               : (a.residual ? encode_kernel<false, kSum, true> : encode_kernel<false, kSum, false>);
  const Grid grid(a.layout.tiles(), a.out.count);
  if (grid.error) return grid.error;
  if (a.layout.scaling.kind == FL_SCALE_MESSAGE) {
    const size_t stride = a.out.count > 1 ? size_t(a.out.stride) : sizeof(float);
    const cudaError_t error = cudaMemset2DAsync(a.out.scales, stride, 0, sizeof(float), size_t(a.out.count), stream);
    if (error) return error;
    const auto look = a.residual ? look_kernel<kSum, true> : look_kernel<kSum, false>;
    FL_LAUNCH(look, grid.blocks, kThreads, stream, a);
    if (const cudaError_t failed = cudaGetLastError()) return failed;
  }
  FL_LAUNCH(kernel, grid.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t block_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                         cudaStream_t stream) {
  return launch<false>(arguments(spec, x, residual, out), spec.param[3] & FL_BLOCK_HADAMARD, stream);
}

cudaError_t block_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                         const fl_messages &out, cudaStream_t stream) {
  EncodeArguments a = arguments(spec, x, residual, out);
  a.in = block_messages(in);
  return launch<true>(a, spec.param[3] & FL_BLOCK_HADAMARD, stream);
}

}  // namespace fl
