// encode and recode of the `block` codec: one launch, and one more before it where all of a message shares a scale.
#include "block_encode.cuh"

namespace fl {
namespace {

template <bool kTransform, bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads) encode_kernel(const BlockEncoding a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    const BlockPiece piece = piece_of<kResidual>(a, m);
    for (int64_t tile = warp_index(); tile < a.layout.tiles(); tile += warp_count()) {
      if (!kSum && !kResidual)
        fetch_elements_ahead(a.dtype, piece.x, (tile + warp_count()) * (kLanes * kBlock), a.layout.numel);
      encode_tile<kTransform, kSum, kResidual>(a, piece, tile);
    }
  }
}

// FL_SCALE_MESSAGE: plane 0, which is zero, becomes the largest magnitude.
template <bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads, 3) look_kernel(const BlockEncoding a) {
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    uint32_t amax = 0;
    for (int64_t tile = warp_index(); tile < a.layout.tiles(); tile += warp_count()) {
      float v[kBlock];
      gather_run<false, kSum, kResidual>(a, piece_of<kResidual>(a, m), Run(a.layout, tile, lane), lane, v);
      const uint32_t largest = largest_of(v);
      amax = largest > amax ? largest : amax;
    }
    amax = max_over_lanes(amax, kLanes);
    if (lane == 0)
      atomicMax(static_cast<uint32_t *>(byte_offset(a.out.scales, m * a.out.stride)), amax >= kF32Inf ? kF32Nan : amax);
  }
}

template <bool kSum>
cudaError_t launch(const BlockEncoding &a, bool hadamard, cudaStream_t stream) {
  const auto kernel = hadamard ? (a.residual ? encode_kernel<true, kSum, true> : encode_kernel<true, kSum, false>)
                               : (a.residual ? encode_kernel<false, kSum, true> : encode_kernel<false, kSum, false>);
  const Grid grid(a.layout.tiles(), a.out.count, blocks_for(a.dtype));
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
  return launch<false>(block_encoding(spec, x, residual, out), spec.param[3] & FL_BLOCK_HADAMARD, stream);
}

cudaError_t block_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                         const fl_messages &out, cudaStream_t stream) {
  BlockEncoding a = block_encoding(spec, x, residual, out);
  a.in = block_messages(in);
  return launch<true>(a, spec.param[3] & FL_BLOCK_HADAMARD, stream);
}

const Encoders block_encoders = {block_encode, block_recode, block_two_shot};

}  // namespace fl
