// decode and decode_sum of the `int` codec.
#include "cuda/owned.cuh"
#include "int_group.cuh"

namespace fl {
namespace {

struct DecodeArguments {
  IntLayout layout;
  IntMessages in;
  uint32_t dtype;
  void *out;
  int64_t out_stride;  // bytes of the elements of a message
  bool add;            // decode_sum: to what out holds
};

template <bool kTransform>
__global__ void __launch_bounds__(kThreads, 6) decode_kernel(const DecodeArguments a) {
  const int lane = lane_index(), tiles = a.layout.tiles();
  const int64_t work = a.layout.spans() * tiles;
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y) {
    void *out = byte_offset(a.out, m * a.out_stride);
    for (int64_t i = warp_index(); i < work; i += warp_count()) {
      const Place at = place_of(a.layout, i / tiles, int(i % tiles), lane);
      float v[kBlock];
      fetch_messages_ahead(a.layout, a.in.only(m), i + warp_count());
      decode_block<kTransform>(a.layout, load_packed(a.layout, a.in, m, at), at, v);
      store_block(a.dtype, out, a.layout.numel, at.first, lane, v);
    }
  }
}

template <bool kTransform>
__global__ void __launch_bounds__(kThreads, kSumBlocks) decode_sum_kernel(const DecodeArguments a) {
  const int lane = lane_index(), tiles = a.layout.tiles();
  const int64_t work = a.layout.spans() * tiles;
  for (int64_t i = warp_index(); i < work; i += warp_count()) {
    const Place at = place_of(a.layout, i / tiles, int(i % tiles), lane);
    float v[kBlock];
    fetch_messages_ahead(a.layout, a.in, i + warp_count());
    sum_messages<kTransform, 2>(a.layout, a.in, a.dtype, a.add ? a.out : nullptr, at, lane, v);
    store_block(a.dtype, a.out, a.layout.numel, at.first, lane, v);
  }
}

DecodeArguments decode_arguments(const fl_spec &spec, const fl_messages &in, void *out, bool add) {
  return {int_layout(spec), int_messages(in), spec.dtype, out, spec.numel * element_size(spec.dtype), add};
}

cudaError_t launch(void (*kernel)(DecodeArguments), const DecodeArguments &a, int64_t outputs, cudaStream_t stream) {
  return launch_over(Grid(a.layout.spans() * a.layout.tiles(), outputs, blocks_for(a.dtype)), kernel, a, stream);
}

}  // namespace

cudaError_t int_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  const auto kernel = spec.param[2] & FL_INT_HADAMARD ? decode_kernel<true> : decode_kernel<false>;
  return launch(kernel, decode_arguments(spec, in, out, false), in.count, stream);
}

cudaError_t int_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  const auto kernel = spec.param[2] & FL_INT_HADAMARD ? decode_sum_kernel<true> : decode_sum_kernel<false>;
  return launch(kernel, decode_arguments(spec, in, out, add), 1, stream);
}

const Decoders int_decoders = {int_decode, int_decode_sum};

}  // namespace fl
