// decode and decode_sum of the `tahquant` codec.
#include "tahquant.cuh"

namespace fl {
namespace {

struct DecodeArguments {
  TahShape shape;
  TahMessages in;
  uint32_t dtype;
  void *out;
  int64_t out_stride;  // bytes of the elements of a message
  bool add;            // decode_sum: to what out holds
  int64_t tiles;       // of runs for all lanes
};

__global__ void __launch_bounds__(kThreads, 5) decode_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.tiles; tile += warp_count()) {
      const TahRun run(a.shape, tile, lane);
      float v[kBlock];
      decode_run(a.shape, a.in, m, run, lane, v);
      store_block(a.dtype, byte_offset(a.out, m * a.out_stride), a.shape.numel, run.first, lane, v);
    }
}

__global__ void __launch_bounds__(kThreads) decode_sum_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  for (int64_t tile = warp_index(); tile < a.tiles; tile += warp_count()) {
    const TahRun run(a.shape, tile, lane);
    float v[kBlock];
    load_or_zero(a.dtype, a.add ? a.out : nullptr, a.shape.numel, run.first, lane, v);
    add_messages(a.shape, a.in, run, lane, v);
    store_block(a.dtype, a.out, a.shape.numel, run.first, lane, v);
  }
}

cudaError_t launch(void (*kernel)(DecodeArguments), const fl_spec &spec, const fl_messages &in, void *out, bool add,
                   int64_t outputs, cudaStream_t stream) {
  const TahShape shape = tah_shape(spec);
  const DecodeArguments a = {shape, tah_messages(in), spec.dtype, out, spec.numel * element_size(spec.dtype),
                             add,   warp_tiles(shape)};
  return launch_over(Grid(a.tiles, outputs), kernel, a, stream);
}

}  // namespace

cudaError_t tah_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  return launch(decode_kernel, spec, in, out, false, in.count, stream);
}

cudaError_t tah_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  return launch(decode_sum_kernel, spec, in, out, add, 1, stream);
}

const Decoders tahquant_decoders = {tah_decode, tah_decode_sum};

}  // namespace fl
