// Encoding of `zip`: choose (the exponents of a region), count (escapes of a tile), settle (where those of a tile begin in
// its region), place (where those of a region begin, and whether the message is coded at all), write. Every count is exact,
// so bytes do not depend on the order in which warps run.
#include "zip_tile.cuh"

namespace fl {
namespace {

struct EncodeArguments {
  ZipShape shape;
  uint32_t choice;
  uint32_t fixed;  // 1 + lowest exponent of the window, or 0
  const void *x;
  fl_messages out;

  FL_DEVICE const void *of(int64_t message) const { return byte_offset(x, message * shape.raw_bytes()); }
};

FL_DEVICE uint32_t half_of(uint32_t dtype, uint32_t word) { return dtype == FL_F32 ? word >> 16 : word; }

FL_DEVICE uint32_t load_half(const EncodeArguments &a, const void *x, int64_t element) {
  return a.shape.dtype == FL_F32 ? static_cast<const uint32_t *>(x)[element] >> 16
                                 : static_cast<const uint16_t *>(x)[element];
}

FL_DEVICE void sample(const EncodeArguments &a, const void *x, int64_t region, ZipBin *bins, ZipRegion &entry) {
  for (int i = lane_index(); i < kZipBins; i += kLanes) bins[i] = 0;
  meet();
  const int n = a.shape.in_region(region), stride = zip_stride(n);
  int sampled = 0;
  for (int run = 0; run < kZipRuns && run * stride < n; ++run) {
    const int begin = run * stride, left = n - begin;
    if (lane_index() < left) {
      const uint32_t half = load_half(a, x, region * kZipRegion + begin + lane_index());
      atomicAdd(&bins[zip_exponent(a.shape.dtype, half)], zip_weight(zip_byte(a.shape.dtype, half)));
    }
    sampled += left < kZipRun ? left : kZipRun;
  }
  meet();
  if (lane_index() == 0)
    zip_choose(bins, {0, zip_exponents(a.shape.dtype) - 1}, sampled, a.shape.dtype, a.choice, entry.exponent + 1);
  meet();
}

__global__ void __launch_bounds__(kThreads) choose_kernel(const EncodeArguments a) {
  static_assert(kZipRun == kLanes, "a lane for each element of a run");
  __shared__ ZipBin bins[kWarps][kZipBins];
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t region = warp_index(); region < a.shape.regions(); region += warp_count()) {
      ZipRegion &entry = zip_message(a.out, m).regions()[region];
      if (lane_index() == 0) entry.exponent[0] = 0;
      if (!a.fixed)
        sample(a, a.of(m), region, bins[threadIdx.x / kLanes], entry);
      else if (lane_index() == 0)
        zip_window(int(a.fixed) - 1, entry.exponent + 1);
    }
}

// The codes of exponents.
struct Table {
  uint32_t exponent[8];
  bool window;

  FL_DEVICE explicit Table(const ZipRegion &region) : window(true) {
#pragma unroll
    for (int code = 0; code < 8; ++code) {
      exponent[code] = region.exponent[code];
      if (code > 1 && exponent[code] != exponent[code - 1] + 1) window = false;
    }
  }

  FL_DEVICE uint32_t code(uint32_t e) const {
    if (window) {
      const uint32_t c = e - exponent[1] + 1;
      return c <= kZipCodes ? c : 0;
    }
    uint32_t c = 0;
#pragma unroll
    for (int i = 1; i <= kZipCodes; ++i) c = e == exponent[i] ? i : c;
    return c;
  }
};

// The halves of the lane's elements of a step, f32's lower halves, exponents and codes. What fills the last tile up has code
// 1 and is 0 otherwise.
struct Step {
  uint32_t half[kEight], low[kEight], exponent[kEight], code[kEight];
  uint32_t escapes;  // a bit for each

  FL_DEVICE Step(const EncodeArguments &a, const void *x, int64_t tile, int step, const Table &table) : escapes(0) {
    const int element = step * kStep + lane_index() * kEight, count = a.shape.in_tile(tile) - element;
    Words w;
    load_words(a.shape.dtype, x, tile * kZipTile + element, count, w);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      half[i] = half_of(a.shape.dtype, w.word[i]);
      low[i] = w.word[i] & 0xffff;
      exponent[i] = zip_exponent(a.shape.dtype, half[i]);
      if (i >= count) exponent[i] = table.exponent[1];
      code[i] = table.code(exponent[i]);
      escapes |= uint32_t(code[i] == 0) << i;
    }
  }
};

__global__ void __launch_bounds__(kThreads) count_kernel(const EncodeArguments a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.shape.tiles(); tile += warp_count()) {
      const ZipMessage out = zip_message(a.out, m);
      const Table table(out.regions()[tile / kZipTiles]);
      uint32_t mine = 0, all;
      for (int step = 0; step < kSteps; ++step) mine += __popc(Step(a, a.of(m), tile, step, table).escapes);
      count_before(mine, lane_index(), all);
      if (lane_index() == 0) out.index(a.shape)[tile] = uint16_t(all);
    }
}

// Lane l has tiles 2 l and 2 l + 1 of the region.
__global__ void __launch_bounds__(kThreads) settle_kernel(const EncodeArguments a) {
  static_assert(kZipTiles == 2 * kLanes, "two tiles for each lane");
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t region = warp_index(); region < a.shape.regions(); region += warp_count()) {
      const ZipMessage out = zip_message(a.out, m);
      uint16_t *index = out.index(a.shape) + region * kZipTiles;
      const int tile = 2 * lane_index(), tiles = a.shape.tiles_in(region);
      const uint32_t first = tile < tiles ? index[tile] : 0, second = tile + 1 < tiles ? index[tile + 1] : 0;
      uint32_t all;
      const uint32_t before = count_before(first + second, lane_index(), all);
      if (tile < tiles) index[tile] = uint16_t(before);
      if (tile + 1 < tiles) index[tile + 1] = uint16_t(before + first);
      if (lane_index() == 0) out.regions()[region].count = all;
    }
}

__global__ void __launch_bounds__(kThreads) place_kernel(const EncodeArguments a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t region = warp_index(); region < a.shape.regions(); region += warp_count()) {
      const ZipMessage out = zip_message(a.out, m);
      if (a.shape.too_many() == 0) {
        if (region == 0 && lane_index() == 0) *out.head = {kZipRaw, 0, {0, 0}};
        continue;
      }
      int64_t first = 0;
      for (int64_t i = lane_index(); i < region; i += kLanes) first += out.regions()[i].count;
      first = sum_over_lanes(first);
      if (lane_index() == 0) out.regions()[region].first = uint32_t(first);
      if (region != a.shape.regions() - 1) continue;
      const int64_t escapes = first + out.regions()[region].count;
      const bool coded = escapes < a.shape.too_many();
      if (lane_index() == 0) *out.head = {uint32_t(coded ? kZipCoded : kZipRaw), coded ? uint32_t(escapes) : 0, {0, 0}};
      int64_t i = a.shape.index() + 2 * a.shape.tiles() + lane_index();
      if (coded)
        for (; i < a.shape.block(0); i += kLanes) out.data[i] = 0;
    }
}

FL_DEVICE void copy_tile(const EncodeArguments &a, const void *x, const ZipMessage &out, int64_t tile) {
  for (int step = 0; step < kSteps; ++step) {
    const int element = step * kStep + lane_index() * kEight, count = a.shape.in_tile(tile) - element;
    if (count <= 0) break;
    const int64_t at = tile * kZipTile + element;
    Words w;
    load_words(a.shape.dtype, x, at, count, w);
    if (a.shape.dtype == FL_F32)
      store_eight(reinterpret_cast<uint32_t *>(out.data) + at, count, w);
    else
      store_eight(reinterpret_cast<uint16_t *>(out.data) + at, count, w);
  }
}

FL_DEVICE void write_tile(const EncodeArguments &a, const void *x, const ZipMessage &out, int64_t tile) {
  const ZipShape &shape = a.shape;
  const ZipRegion &region = out.regions()[tile / kZipTiles];
  const Table table(region);
  const int lane = lane_index(), filled = ZipShape::filled(shape.in_tile(tile)), plane = filled / 8;
  uint8_t *block = out.data + shape.block(tile), *planes = block + filled, *low = planes + shape.planes() * plane;
  uint8_t *to = out.data + shape.escapes() + region.first + out.index(shape)[tile];
  for (int number = 0; number < kSteps; ++number) {
    const Step step(a, x, tile, number, table);
    const int element = number * kStep + lane * kEight;
    uint32_t all;
    uint8_t *escape = to + count_before(__popc(step.escapes), lane, all);
    to += all;
    if (element >= filled) continue;
    uint32_t byte[kEight], bits[6] = {};
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      byte[i] = zip_byte(shape.dtype, step.half[i]);
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        bits[p] |= (step.code[i] >> p & 1) << i;
        bits[3 + p] |= (step.half[i] >> p & 1) << i;
      }
      if (step.escapes >> i & 1) *escape++ = uint8_t(step.exponent[i]);
    }
    store_bytes(block + element, byte);
#pragma unroll
    for (int p = 0; p < 6; ++p)
      if (p < shape.planes()) planes[p * plane + element / 8] = uint8_t(bits[p]);
    if (shape.dtype != FL_F32) continue;
    const auto pair = [&](int i) { return step.low[i] | step.low[i + 1] << 16; };
    uint2 *halves = reinterpret_cast<uint2 *>(low + 2 * element);
    halves[0] = make_uint2(pair(0), pair(2));
    halves[1] = make_uint2(pair(4), pair(6));
  }
}

__global__ void __launch_bounds__(kThreads) write_kernel(const EncodeArguments a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.shape.tiles(); tile += warp_count()) {
      const ZipMessage out = zip_message(a.out, m);
      out.head->form == kZipRaw ? copy_tile(a, a.of(m), out, tile) : write_tile(a, a.of(m), out, tile);
    }
}

}  // namespace

cudaError_t zip_encode(const fl_spec &spec, const void *x, float *, const fl_messages &out, cudaStream_t stream) {
  const EncodeArguments a{zip_shape(spec), spec.param[1], spec.param[2], x, out};
  const Grid regions(a.shape.regions(), out.count), tiles(a.shape.tiles(), out.count);
  if (regions.error || tiles.error) return regions.error ? regions.error : tiles.error;
  if (a.shape.too_many() > 0) {
    FL_LAUNCH(choose_kernel, regions.blocks, kThreads, stream, a);
    FL_LAUNCH(count_kernel, tiles.blocks, kThreads, stream, a);
    FL_LAUNCH(settle_kernel, regions.blocks, kThreads, stream, a);
  }
  FL_LAUNCH(place_kernel, regions.blocks, kThreads, stream, a);
  FL_LAUNCH(write_kernel, tiles.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

}  // namespace fl
