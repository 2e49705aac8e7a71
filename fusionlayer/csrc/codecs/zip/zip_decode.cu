// Decoding of `zip`. What a message says is trusted nowhere: an escape that it does not have is exponent 0.
#include "zip_tile.cuh"

namespace fl {
namespace {

struct DecodeArguments {
  ZipShape shape;
  fl_messages in;
  uint32_t dtype;  // of out
  void *out;
  bool add;
};

// Calls sink(step, words) for each step of a tile.
template <class Sink>
FL_DEVICE void decode_tile(const ZipShape &shape, const ZipMessage &in, int64_t tile, const Sink &sink) {
  const int lane = lane_index(), n = shape.in_tile(tile), filled = ZipShape::filled(n), plane = filled / 8;
  const bool raw = in.head->form == kZipRaw;
  const ZipRegion &region = in.regions()[tile / kZipTiles];
  uint64_t table = 0;
#pragma unroll
  for (int code = 1; code < 8; ++code) table |= uint64_t(region.exponent[code]) << 8 * code;
  const uint8_t *block = in.data + shape.block(tile), *planes = block + filled, *low = planes + shape.planes() * plane;
  const int64_t room = shape.bytes() - shape.escapes();
  int64_t position = int64_t(region.first) + in.index(shape)[tile];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int element = step * kStep + lane * kEight;
    Words w = {};
    uint32_t bits[6] = {}, codes[kEight] = {}, missing = 0, all;
    if (raw) {
      load_words(shape.dtype, in.data, tile * kZipTile + element, n - element, w);
    } else if (element < filled) {
#pragma unroll
      for (int p = 0; p < 6; ++p)
        if (p < shape.planes()) bits[p] = planes[p * plane + element / 8];
      missing = ~(bits[0] | bits[1] | bits[2]) & 0xff;
    }
    int64_t from = position + count_before(__popc(missing), lane, all);
    position += all;
    if (!raw && element < filled) {
      uint32_t byte[kEight], pairs[4] = {};
      load_bytes(block + element, byte);
      if (shape.dtype == FL_F32) {
        const uint2 *halves = reinterpret_cast<const uint2 *>(low + 2 * element);
        const uint2 first = halves[0], second = halves[1];
        pairs[0] = first.x, pairs[1] = first.y, pairs[2] = second.x, pairs[3] = second.y;
      }
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        codes[i] = (bits[0] >> i & 1) | (bits[1] >> i & 1) << 1 | (bits[2] >> i & 1) << 2;
        uint32_t exponent = uint32_t(table >> 8 * codes[i]) & 0xff;
        if (missing >> i & 1) {
          exponent = from < room ? in.data[shape.escapes() + from] : 0;
          ++from;
        }
        const uint32_t rest = (bits[3] >> i & 1) | (bits[4] >> i & 1) << 1 | (bits[5] >> i & 1) << 2;
        w.word[i] = zip_half(shape.dtype, exponent, byte[i], rest);
        if (shape.dtype == FL_F32) w.word[i] = w.word[i] << 16 | (pairs[i / 2] >> i % 2 * 16 & 0xffff);
      }
    }
    sink(step, w);
  }
}

FL_DEVICE void store_words(const DecodeArguments &a, int64_t first, int count, const Words &w) {
  if (count <= 0) return;
  if (a.dtype == FL_F32)
    store_eight(static_cast<uint32_t *>(a.out) + first, count, w);
  else
    store_eight(static_cast<uint16_t *>(a.out) + first, count, w);
}

__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeArguments a) {
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.shape.tiles(); tile += warp_count())
      decode_tile(a.shape, zip_message(a.in, m), tile, [&](int step, Words &w) {
        const int element = step * kStep + lane_index() * kEight;
        if (a.dtype != a.shape.dtype) {
#pragma unroll
          for (int i = 0; i < kEight; ++i) w.word[i] = narrowed(a.dtype, widened(a.shape.dtype, w.word[i]));
        }
        store_words(a, m * a.shape.numel + tile * kZipTile + element, a.shape.in_tile(tile) - element, w);
      });
}

__global__ void __launch_bounds__(kThreads) decode_sum_kernel(const DecodeArguments a) {
  for (int64_t tile = warp_index(); tile < a.shape.tiles(); tile += warp_count()) {
    const int n = a.shape.in_tile(tile);
    float sum[kSteps][kEight] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int element = step * kStep + lane_index() * kEight;
      if (!a.add || element >= n) continue;
      Words w;
      load_words(a.dtype, a.out, tile * kZipTile + element, n - element, w);
#pragma unroll
      for (int i = 0; i < kEight; ++i) sum[step][i] = widened(a.dtype, w.word[i]);
    }
#pragma unroll 1
    for (int64_t m = 0; m < a.in.count; ++m)
      decode_tile(a.shape, zip_message(a.in, m), tile, [&](int step, const Words &w) {
#pragma unroll
        for (int i = 0; i < kEight; ++i) sum[step][i] += widened(a.shape.dtype, w.word[i]);
      });
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int element = step * kStep + lane_index() * kEight;
      Words w;
#pragma unroll
      for (int i = 0; i < kEight; ++i) w.word[i] = narrowed(a.dtype, sum[step][i]);
      store_words(a, tile * kZipTile + element, n - element, w);
    }
  }
}

cudaError_t launch(void (*kernel)(DecodeArguments), const DecodeArguments &a, int64_t messages, cudaStream_t stream) {
  return launch_over(Grid(a.shape.tiles(), messages), kernel, a, stream);
}

}  // namespace

cudaError_t zip_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  return launch(decode_kernel, {zip_shape(spec), in, spec.dtype, out, false}, in.count, stream);
}

cudaError_t zip_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  return launch(decode_sum_kernel, {zip_shape(spec), in, spec.dtype, out, add}, 1, stream);
}

const Decoders zip_decoders = {zip_decode, zip_decode_sum};

}  // namespace fl
