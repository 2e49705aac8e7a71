// decode and decode_sum of the `chunked_topk` codec.
#include "chunked.cuh"

namespace fl {
namespace {

struct DecodeArguments {
  ChunkedShape shape;
  fl_messages in;
  uint32_t dtype;
  void *out;
  bool add;
  bool one;  // all messages become one sum; else each has its own place
};

__global__ void __launch_bounds__(kLanes) decode_kernel(const DecodeArguments a) {
  __shared__ float sums[kMostChunk];
  const int64_t rows = a.one ? 1 : a.in.count;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    for (int64_t c = blockIdx.x; c < a.shape.chunks; c += gridDim.x) {
      const ChunkForm form = a.shape.form(c);
      const int64_t first = row * a.shape.numel + c * a.shape.full.size;
      set_chunk(a.dtype, a.add ? a.out : nullptr, first, form.size, 1.0f, sums);
      const int64_t begin = a.one ? 0 : row, end = a.one ? a.in.count : row + 1;
      for (int64_t m = begin; m < end; ++m) add_chunk(form, chunk_bytes(a.shape, a.in, m, c), sums);
      with_element(a.dtype, [&](auto type) {
        using E = decltype(type);
        auto *out = static_cast<typename E::Bits *>(a.out) + first;
        for (int i = lane_index(); i < form.size; i += kLanes) out[i] = E::narrow(sums[i]);
      });
      meet();
    }
}

cudaError_t launch(const fl_spec &spec, const fl_messages &in, void *out, bool add, bool one, cudaStream_t stream) {
  const DecodeArguments a{chunked_shape(spec), in, spec.dtype, out, add, one};
  return launch_over(chunk_grid(a.shape, one ? 1 : in.count), decode_kernel, a, stream, kLanes);
}

}  // namespace

cudaError_t chunked_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  return launch(spec, in, out, false, false, stream);
}

cudaError_t chunked_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  return launch(spec, in, out, add, true, stream);
}

const Decoders chunked_decoders = {chunked_decode, chunked_decode_sum};

}  // namespace fl
