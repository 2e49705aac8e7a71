// decode and decode_sum of the `thc` codec: of codes, and of sums of their integers.
#include "thc.cuh"

namespace fl {
namespace {

struct DecodeArguments {
  ThcShape shape;
  ThcMessages in;
  RngKey signs;
  uint32_t dtype;
  void *out;
  int64_t out_stride;  // bytes of the elements of a message
  bool add;            // decode_sum: to what out holds
};

FL_DEVICE uint32_t byte_of(const Chunk &chunk, int i) { return chunk.word[i / 4] >> 8 * (i % 4) & 255u; }

// v = half steps of a lane's run of sums.
FL_DEVICE void load_sums(const ThcShape &shape, const uint8_t *bytes, float (&v)[kBlock]) {
  const int bits = shape.bits(), all = shape.ranks * shape.top();
  const Chunk low = load_chunk(bytes), high = load_chunk(bytes + 16);
  const Chunk upper_low = bits > 8 ? load_chunk(bytes + 32) : Chunk{};
  const Chunk upper_high = bits == 16 ? load_chunk(bytes + 48) : Chunk{};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t nibbles = byte_of(upper_low, i);
    const uint32_t first = bits == 12 ? nibbles & 15u : nibbles,
                   second = bits == 12 ? nibbles >> 4 : byte_of(upper_high, i);
    v[i] = float(2 * int(byte_of(low, i) | first << 8) - all);
    v[i + 16] = float(2 * int(byte_of(high, i) | second << 8) - all);
  }
}

FL_DEVICE void load_run(const DecodeArguments &a, int64_t message, int64_t tile, const ThcRun &run, int lane,
                        float (&v)[kBlock]) {
  const float rms = byte_offset(a.in.rms, message * a.in.stride)[tile];
  const uint8_t *bytes = a.in.codes + message * a.in.stride + run.index * a.shape.run_bytes();
  if (a.shape.ranks) {
    if (run.exists) {
      load_sums(a.shape, bytes, v);
    } else {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] = 0.0f;
    }
  } else {
    const Chunk packed = run.exists ? load_chunk(bytes) : Chunk{};
    uint32_t codes[kCodeWords];
    unpack_words<4>(packed.word, codes);
    half_steps(a.shape, codes, v);
  }
  reconstruct(a.shape, a.signs, run.first, lane, rms, v);
}

__global__ void __launch_bounds__(kThreads, 5) decode_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.shape.sections(); tile += warp_count()) {
      const ThcRun run(a.shape, tile, lane);
      float v[kBlock];
      load_run(a, m, tile, run, lane, v);
      store_block(a.dtype, byte_offset(a.out, m * a.out_stride), a.shape.numel, run.first, lane, v);
    }
}

__global__ void __launch_bounds__(kThreads) decode_sum_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  for (int64_t tile = warp_index(); tile < a.shape.sections(); tile += warp_count()) {
    const ThcRun run(a.shape, tile, lane);
    float v[kBlock];
    load_or_zero(a.dtype, a.add ? a.out : nullptr, a.shape.numel, run.first, lane, v);
#pragma unroll 1
    for (int64_t m = 0; m < a.in.count; ++m) {
      float part[kBlock];
      load_run(a, m, tile, run, lane, part);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] += part[i];
    }
    store_block(a.dtype, a.out, a.shape.numel, run.first, lane, v);
  }
}

cudaError_t launch(void (*kernel)(DecodeArguments), const fl_spec &spec, const fl_messages &in, void *out, bool add,
                   int64_t outputs, cudaStream_t stream) {
  const DecodeArguments a = {thc_shape(spec),
                             thc_messages(in),
                             make_key(spec.param[3]),
                             spec.dtype,
                             out,
                             spec.numel * element_size(spec.dtype),
                             add};
  return launch_over(Grid(a.shape.sections(), outputs), kernel, a, stream);
}

}  // namespace

cudaError_t thc_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  return launch(decode_kernel, spec, in, out, false, in.count, stream);
}

cudaError_t thc_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  return launch(decode_sum_kernel, spec, in, out, add, 1, stream);
}

const Decoders thc_decoders = {thc_decode, thc_decode_sum};

}  // namespace fl
