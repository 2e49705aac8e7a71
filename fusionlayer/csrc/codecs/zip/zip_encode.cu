// Encoding of `zip`: choose (the exponents of a region), code (the blocks of tiles, and how many escapes they have), settle
// (where those of a tile begin in its region), place (where those of a region begin, and whether the message is coded at
// all), finish (the escapes, or the elements as they are). Every count is exact, so bytes do not depend on the order in
// which warps run.
#include <type_traits>

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

FL_DEVICE uint32_t load_half(const EncodeArguments &a, const void *x, int64_t element) {
  return a.shape.dtype == FL_F32 ? static_cast<const uint32_t *>(x)[element] >> 16
                                 : static_cast<const uint16_t *>(x)[element];
}

// What a warp counts of a region's sample: atomic operations on shared memory are fast for 32 bits alone.
struct Sample {
  uint32_t count[kZipBins], squares[kZipBins];
  ZipBin bins[kZipBins];
};

FL_DEVICE void choose(const EncodeArguments &a, const void *x, int64_t region, Sample &sample, uint8_t *exponents) {
  static_assert(kZipRun == kLanes, "a lane for each element of a run");
  const int lane = lane_index(), n = a.shape.in_region(region), stride = zip_stride(n);
  for (int i = lane; i < kZipBins; i += kLanes) sample.count[i] = sample.squares[i] = 0;
  meet();
  uint32_t half[kZipRuns];
#pragma unroll
  for (int run = 0; run < kZipRuns; ++run) {
    const int element = run * stride + lane;
    half[run] = element < n ? load_half(a, x, region * kZipRegion + element) : 0;
  }
  int sampled = 0;
#pragma unroll
  for (int run = 0; run < kZipRuns; ++run) {
    const int left = n - run * stride;
    sampled += left < 0 ? 0 : left < kZipRun ? left : kZipRun;
    if (lane >= left) continue;
    const uint32_t exponent = zip_exponent(a.shape.dtype, half[run]);
    atomicAdd(&sample.count[exponent], 1u);
    atomicAdd(&sample.squares[exponent], uint32_t(zip_weight(zip_byte(a.shape.dtype, half[run]))));
  }
  meet();
  uint32_t below = 0, high = 0;  // how many bins from the lowest one to the last, and the highest one
  for (int i = lane; i < kZipBins; i += kLanes) {
    sample.bins[i] = ZipBin(sample.count[i]) << 32 | sample.squares[i];
    if (sample.count[i] == 0) continue;
    if (below == 0) below = kZipBins - i;
    high = i;
  }
  const ZipRange range{kZipBins - int(largest_of_lanes(below)), int(largest_of_lanes(high))};
  meet();
  if (lane == 0) zip_choose(sample.bins, range, sampled, a.shape.dtype, a.choice, exponents);
  meet();
}

__global__ void __launch_bounds__(kThreads) choose_kernel(const EncodeArguments a) {
  __shared__ Sample samples[kWarps];
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t region = warp_index(); region < a.shape.regions(); region += warp_count()) {
      ZipRegion &entry = zip_message(a.out, m).regions()[region];
      if (lane_index() == 0) entry.exponent[0] = 0;
      if (!a.fixed)
        choose(a, a.of(m), region, samples[threadIdx.x / kLanes], entry.exponent + 1);
      else if (lane_index() == 0)
        zip_window(int(a.fixed) - 1, entry.exponent + 1);
    }
}

// Blocks: four elements at a time, a byte of a word each ---------------------------------------------------------------

constexpr uint32_t kHighest = 0x80808080u;  // bit of each byte

FL_DEVICE uint32_t four_of(uint32_t byte) { return byte * 0x01010101u; }

// The bits of a that the mask has, the others of b.
FL_DEVICE uint32_t mixed(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t v;  // the compiler makes two instructions of the line below
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(v) : "r"(mask), "r"(a), "r"(b));
  return v;
#else
  return (a & mask) | (b & ~mask);
#endif
}

// The highest bit of each byte that is not zero.
FL_DEVICE uint32_t not_zero(uint32_t v) { return (((v & ~kHighest) + ~kHighest) | v) & kHighest; }

// The upper and lower bytes of four halves, which are two words.
struct Four {
  uint32_t upper, lower;

  FL_DEVICE Four(uint32_t first, uint32_t second) {
    upper = __byte_perm(first, second, 0x7531);
    lower = __byte_perm(first, second, 0x6420);
  }

  template <uint32_t kType>
  FL_DEVICE uint32_t exponents() const {
    return kType == FL_F16 ? upper >> 2 & four_of(31) : mixed(four_of(0xfe), upper << 1, lower >> 7);
  }

  // zip_byte of each.
  template <uint32_t kType>
  FL_DEVICE uint32_t bytes() const {
    return mixed(kHighest, upper, kType == FL_F16 ? mixed(four_of(0x60), upper << 5, lower >> 3) : lower);
  }
};

// The codes of a region's exponents.
struct Table {
  uint32_t exponent[8];

  FL_DEVICE explicit Table(const ZipRegion &region) {
#pragma unroll
    for (int code = 0; code < 8; ++code) exponent[code] = region.exponent[code];
  }

  FL_DEVICE bool is_window() const {
    bool window = true;
#pragma unroll
    for (int code = 2; code < 8; ++code) window = window && exponent[code] == exponent[code - 1] + 1;
    return window;
  }

  template <bool kWindow>
  FL_DEVICE uint32_t codes(uint32_t exponents) const {
    uint32_t codes = 0;
    if constexpr (kWindow) {
      // Modulo 256: e - (first - 1) without borrows from the next byte, then with the highest bits right.
      const uint32_t less = four_of((exponent[1] - 1) & 0xff);
      codes = ((exponents | kHighest) - (less & ~kHighest)) ^ ((exponents ^ ~less) & kHighest);
      codes &= four_of(7) & ~((not_zero(codes & four_of(0xf8)) >> 7) * 7);
    } else {
#pragma unroll
      for (int code = 1; code <= kZipCodes; ++code)
        codes |= ((~not_zero(exponents ^ four_of(exponent[code])) & kHighest) >> 7) * code;
    }
    return codes;
  }
};

// Bit p of eight numbers of four bits. Numbers 0 to 3 are the lower halves of bytes, 4 to 7 the upper ones. The product
// has them in its highest byte, in order, and no two bits of it meet.
FL_DEVICE uint32_t plane_of(uint32_t numbers, int p) {
  return ((numbers & 0x11111111u << p) * (0x01020408u >> p)) >> 24;
}

// A lane's eight elements of a step, as they lie in memory.
template <class Bits>
struct Eight {
  uint32_t word[2 * sizeof(Bits)];

  // The halves of four of them: f32's upper ones.
  FL_DEVICE Four four(int i) const {
    if constexpr (sizeof(Bits) == 2)
      return {word[2 * i], word[2 * i + 1]};
    else
      return {__byte_perm(word[4 * i], word[4 * i + 1], 0x7632), __byte_perm(word[4 * i + 2], word[4 * i + 3], 0x7632)};
  }

  // f32's lower halves.
  FL_DEVICE uint32_t low(int i) const { return __byte_perm(word[2 * i], word[2 * i + 1], 0x5410); }
};

// Returns how many escapes the tile has. What fills the last tile up has code 1 and is 0 otherwise.
template <uint32_t kType, bool kWindow>
FL_DEVICE int code_tile(const ZipShape &shape, const void *x, const Table &table, uint8_t *data, int64_t tile) {
  using Bits = std::conditional_t<kType == FL_F32, uint32_t, uint16_t>;
  constexpr int kPlanes = kType == FL_F16 ? 6 : 3;
  const int lane = lane_index(), n = shape.in_tile(tile), filled = ZipShape::filled(n);
  const Bits *elements = static_cast<const Bits *>(x) + tile * kZipTile + lane * kEight;
  const Bits fill = Bits(table.exponent[1] << (kType == FL_F32 ? 23 : kType == FL_F16 ? 10 : 7));
  Eight<Bits> eight[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    load_filled(elements + step * kStep, n - lane * kEight - step * kStep, fill, eight[step].word);
  uint8_t *block = data + shape.block(tile), *plane[kPlanes];
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) plane[p] = block + filled + p * (filled / 8) + lane;
  uint2 *bytes = reinterpret_cast<uint2 *>(block) + lane;
  uint2 *low = reinterpret_cast<uint2 *>(block + filled + kPlanes * (filled / 8)) + 2 * lane;
  int coded = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const Eight<Bits> &e = eight[step];
    const Four first = e.four(0), second = e.four(1);
    const uint32_t codes =
        table.codes<kWindow>(first.exponents<kType>()) | table.codes<kWindow>(second.exponents<kType>()) << 4;
    if (step * kStep + lane * kEight >= filled) continue;
    bytes[step * kLanes] = make_uint2(first.bytes<kType>(), second.bytes<kType>());
    const uint32_t rests = mixed(four_of(15), first.lower, second.lower << 4);
    uint32_t any = 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const uint32_t bits = p < 3 ? plane_of(codes, p) : plane_of(rests, p - 3);
      if (p < 3) any |= bits;
      plane[p][step * kLanes] = uint8_t(bits);
    }
    coded += __popc(any);
    if constexpr (kType == FL_F32) {
      low[2 * step * kLanes] = make_uint2(e.low(0), e.low(1));
      low[2 * step * kLanes + 1] = make_uint2(e.low(2), e.low(3));
    }
  }
  return filled - sum_of_lanes(coded);
}

// Calls work(a constant that is the type).
template <class Work>
FL_DEVICE void with_type(uint32_t dtype, const Work &work) {
  if (dtype == FL_F32)
    work(std::integral_constant<uint32_t, FL_F32>{});
  else if (dtype == FL_BF16)
    work(std::integral_constant<uint32_t, FL_BF16>{});
  else
    work(std::integral_constant<uint32_t, FL_F16>{});
}

__global__ void __launch_bounds__(kThreads) code_kernel(const EncodeArguments a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.shape.tiles(); tile += warp_count()) {
      const ZipMessage out = zip_message(a.out, m);
      const Table table(out.regions()[tile / kZipTiles]);
      with_type(a.shape.dtype, [&](auto type) {
        const bool window = a.choice == FL_ZIP_WINDOW || table.is_window();
        const int escapes = window ? code_tile<type.value, true>(a.shape, a.of(m), table, out.data, tile)
                                   : code_tile<type.value, false>(a.shape, a.of(m), table, out.data, tile);
        if (lane_index() == 0) out.index(a.shape)[tile] = uint16_t(escapes);
      });
    }
}

// Escapes --------------------------------------------------------------------------------------------------------------

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

// An element has an escape where its code, in the first three planes, is 0. Each lane looks at 32 elements.
FL_DEVICE void write_escapes(const EncodeArguments &a, const void *x, const ZipMessage &out, int64_t tile,
                             uint16_t (&found)[kZipTile]) {
  const int lane = lane_index(), filled = ZipShape::filled(a.shape.in_tile(tile)), plane = filled / 32;
  uint32_t missing = 0, all;
  if (lane < plane) {
    const uint32_t *words = reinterpret_cast<const uint32_t *>(out.data + a.shape.block(tile) + filled) + lane;
    missing = ~(words[0] | words[plane] | words[2 * plane]);
  }
  for (uint32_t at = count_before(__popc(missing), lane, all); missing != 0; missing &= missing - 1)
    found[at++] = uint16_t(lane * 32 + __ffs(missing) - 1);
  meet();
  uint8_t *to = out.data + a.shape.escapes() + out.regions()[tile / kZipTiles].first + out.index(a.shape)[tile];
  for (uint32_t i = lane; i < all; i += kLanes)
    to[i] = uint8_t(zip_exponent(a.shape.dtype, load_half(a, x, tile * kZipTile + found[i])));
  meet();
}

__global__ void __launch_bounds__(kThreads, 12) finish_kernel(const EncodeArguments a) {
  __shared__ uint16_t found[kWarps][kZipTile];
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.shape.tiles(); tile += warp_count()) {
      const ZipMessage out = zip_message(a.out, m);
      if (out.head->form == kZipRaw)
        copy_tile(a, a.of(m), out, tile);
      else
        write_escapes(a, a.of(m), out, tile, found[threadIdx.x / kLanes]);
    }
}

}  // namespace

cudaError_t zip_encode(const fl_spec &spec, const void *x, float *, const fl_messages &out, cudaStream_t stream) {
  const EncodeArguments a{zip_shape(spec), spec.param[1], spec.param[2], x, out};
  const Grid regions(a.shape.regions(), out.count), tiles(a.shape.tiles(), out.count);
  if (regions.error || tiles.error) return regions.error ? regions.error : tiles.error;
  if (a.shape.too_many() > 0) {
    FL_LAUNCH(choose_kernel, regions.blocks, kThreads, stream, a);
    FL_LAUNCH(code_kernel, tiles.blocks, kThreads, stream, a);
    FL_LAUNCH(settle_kernel, regions.blocks, kThreads, stream, a);
  }
  FL_LAUNCH(place_kernel, regions.blocks, kThreads, stream, a);
  FL_LAUNCH(finish_kernel, tiles.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

const Encoders zip_encoders = {zip_encode, nullptr, nullptr};

}  // namespace fl
