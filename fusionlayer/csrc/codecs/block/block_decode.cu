// decode and decode_sum of the `block` codec.
#include "block_codes.cuh"

namespace fl {
namespace {

struct DecodeArguments {
  BlockLayout layout;
  BlockMessages in;
  uint32_t dtype;
  void *out;
  int64_t out_stride;  // bytes of the elements of a message
  bool add;            // decode_sum: to what out holds
};

template <bool kTransform>
__global__ void __launch_bounds__(kThreads, 4) decode_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y) {
    void *out = byte_offset(a.out, m * a.out_stride);
    for (int64_t tile = warp_index(); tile < a.layout.tiles(); tile += warp_count()) {
      const Run run(a.layout, tile, lane);
      float v[kBlock];
      fetch_messages_ahead(a.layout, a.in.only(m), tile + warp_count());
      decode_run<kTransform>(a.layout, load_run(a.layout, a.in, m, run), lane, v);
      store_block(a.dtype, out, a.layout.numel, run.first, lane, v);
    }
  }
}

template <bool kTransform>
__global__ void __launch_bounds__(kThreads, 3) decode_sum_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  for (int64_t tile = warp_index(); tile < a.layout.tiles(); tile += warp_count()) {
    const Run run(a.layout, tile, lane);
    float v[kBlock];
    fetch_messages_ahead(a.layout, a.in, tile + warp_count());
    sum_messages<kTransform>(a.layout, a.in, a.dtype, a.add ? a.out : nullptr, run, lane, v);
    store_block(a.dtype, a.out, a.layout.numel, run.first, lane, v);
  }
}

DecodeArguments decode_arguments(const fl_spec &spec, const fl_messages &in, void *out, bool add) {
  return {block_layout(spec), block_messages(in), spec.dtype, out, spec.numel * element_size(spec.dtype), add};
}

cudaError_t launch(void (*kernel)(DecodeArguments), const DecodeArguments &a, int64_t outputs, cudaStream_t stream) {
  return launch_over(Grid(a.layout.tiles(), outputs, blocks_for(a.dtype)), kernel, a, stream);
}

}  // namespace

cudaError_t block_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  const auto kernel = spec.param[3] & FL_BLOCK_HADAMARD ? decode_kernel<true> : decode_kernel<false>;
  return launch(kernel, decode_arguments(spec, in, out, false), in.count, stream);
}

cudaError_t block_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  const auto kernel = spec.param[3] & FL_BLOCK_HADAMARD ? decode_sum_kernel<true> : decode_sum_kernel<false>;
  return launch(kernel, decode_arguments(spec, in, out, add), 1, stream);
}

const Decoders block_decoders = {block_decode, block_decode_sum};

}  // namespace fl
