// decode_sum of sparse messages: a warp sums a tile of the tensor in shared memory, message after message. What a message
// says is trusted nowhere: a pair outside the planes, or a position outside the tile, is left out.
#include "arguments.h"
#include "cuda/elements.cuh"
#include "cuda/launch.cuh"
#include "sparse.h"

namespace fl {
namespace {

constexpr int kTile = 2048;                  // elements
constexpr int kTiles = kSuperblock / kTile;  // of a superblock: one for each lane
constexpr int kTileBlocks = kTile / kCounted;
constexpr int kTileWords = kTile / 32;  // of a bitmap
static_assert(kTiles == kLanes, "lane t has the counts of tile t");

struct DecodeArguments {
  SparseShape shape;
  fl_messages in;
  uint32_t dtype;
  void *out;
  bool add;
};

struct Tile {
  int64_t superblock;
  int number;  // in the superblock
  int size;
  float *sums;

  FL_DEVICE int64_t first() const { return superblock * kSuperblock + number * kTile; }
};

// Pairs of a message.
struct Range {
  int64_t begin, end;
};

FL_DEVICE Range pairs_of(const SparseShape &shape, const SparsePlanes &message, int64_t superblock) {
  const int64_t begin = superblock ? message.ends[superblock - 1] : 0, end = message.ends[superblock];
  return {begin, end < shape.capacity ? end : shape.capacity};
}

FL_DEVICE float value_of(const SparseShape &shape, const SparsePlanes &message, int64_t pair) {
  return shape.values == FL_F32 ? static_cast<const float *>(message.values)[pair]
                                : bf16_to_f32(static_cast<const uint16_t *>(message.values)[pair]);
}

FL_DEVICE void add_pair(const DecodeArguments &a, const SparsePlanes &message, const Tile &tile, int64_t pair,
                        int place) {
  if (place >= 0 && place < tile.size) tile.sums[place] += value_of(a.shape, message, pair);
}

// The first of ascending positions begin..end - 1 that is not below `bound`: all lanes look, then all know.
FL_DEVICE int64_t first_from(const uint16_t *positions, Range range, int bound) {
  while (range.begin < range.end) {
    const int64_t step = (range.end - range.begin + kLanes - 1) / kLanes;
    const int64_t at = range.begin + lane_index() * step;
    const int below = __popc(ballot(at < range.end && positions[at] < bound));
    if (below == 0) break;
    const int64_t end = range.begin + below * step;
    range = {end - step + 1, end < range.end ? end : range.end};
  }
  return range.begin;
}

FL_DEVICE void add_short(const DecodeArguments &a, const SparsePlanes &message, const Tile &tile) {
  const uint16_t *positions = static_cast<const uint16_t *>(message.positions);
  const Range all = pairs_of(a.shape, message, tile.superblock);
  const int first = tile.number * kTile;
  const int64_t begin = first_from(positions, all, first);
  const int64_t end = first_from(positions, {begin, all.end}, first + kTile);
  for (int64_t pair = begin + lane_index(); pair < end; pair += kLanes)
    add_pair(a, message, tile, pair, positions[pair] - first);
}

// Lane t adds up the counts of tile t, so that each tile's first pair is the sum over lower lanes.
FL_DEVICE void add_byte(const DecodeArguments &a, const SparsePlanes &message, const Tile &tile) {
  const int lane = lane_index();
  const Range all = pairs_of(a.shape, message, tile.superblock);
  const int64_t start = tile.superblock * (kSuperblock / kCounted) + lane * kTileBlocks;
  uint32_t counts[2] = {0, 0};  // four of them in each
  int64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kTileBlocks; ++i) {
    const uint32_t count = start + i < a.shape.blocks() ? message.counts[start + i] : 0;
    counts[i / 4] |= count << 8 * (i % 4);
    sum += count;
  }
  const uint32_t before = shuffle(uint32_t(sum_before(sum, lane)), tile.number);
  const int total = int(shuffle(uint32_t(sum), tile.number));
  const uint32_t mine[2] = {shuffle(counts[0], tile.number), shuffle(counts[1], tile.number)};
  const uint8_t *positions = static_cast<const uint8_t *>(message.positions);
  for (int i = lane; i < total; i += kLanes) {
    const int64_t pair = all.begin + before + i;
    int block = 0, end = 0;  // its block is the first that ends behind it
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) {
      end += int(mine[b / 4] >> 8 * (b % 4) & 0xff);
      block += i >= end;
    }
    if (pair < all.end) add_pair(a, message, tile, pair, block * kCounted + positions[pair]);
  }
}

// Word w of a bitmap, zeros behind its last byte.
FL_DEVICE uint32_t word_at(const DecodeArguments &a, const SparsePlanes &message, int64_t w) {
  const uint8_t *bytes = static_cast<const uint8_t *>(message.positions) + 4 * w;
  const int64_t left = a.shape.plane_bytes(2) - 4 * w;
  if (left >= 4) return *reinterpret_cast<const uint32_t *>(bytes);
  uint32_t word = 0;
  for (int i = 0; i < left; ++i) word |= uint32_t(bytes[i]) << 8 * i;
  return word;
}

FL_DEVICE void add_bitmap(const DecodeArguments &a, const SparsePlanes &message, const Tile &tile) {
  const int lane = lane_index();
  const Range all = pairs_of(a.shape, message, tile.superblock);
  const int64_t start = tile.superblock * (kSuperblock / 32);
  int64_t before = 0;
  for (int w = lane; w < tile.number * kTileWords; w += kLanes) before += __popc(word_at(a, message, start + w));
  int64_t first = all.begin + sum_over_lanes(before);
  for (int w = lane; w < kTileWords; w += kLanes) {
    uint32_t word = word_at(a, message, start + tile.number * kTileWords + w);
    const int64_t count = __popc(word);
    int64_t pair = first + sum_before(count, lane);
    for (; word && pair < all.end; word &= word - 1) add_pair(a, message, tile, pair++, w * 32 + __ffs(word) - 1);
    first += sum_over_lanes(count);
  }
}

FL_DEVICE void load_tile(const DecodeArguments &a, const Tile &tile) {
  with_element(a.dtype, [&](auto type) {
    using E = decltype(type);
    const auto *out = static_cast<const typename E::Bits *>(a.out) + tile.first();
    for (int i = lane_index(); i < tile.size; i += kLanes) tile.sums[i] = a.add ? E::widen(out[i]) : 0.0f;
  });
}

FL_DEVICE void store_tile(const DecodeArguments &a, const Tile &tile) {
  with_element(a.dtype, [&](auto type) {
    using E = decltype(type);
    auto *out = static_cast<typename E::Bits *>(a.out) + tile.first();
    for (int i = lane_index(); i < tile.size; i += kLanes) out[i] = E::narrow(tile.sums[i]);
  });
}

__global__ void __launch_bounds__(kThreads) sparse_decode_kernel(const DecodeArguments a) {
  __shared__ float sums[kWarps][kTile];
  for (int64_t t = warp_index(); t * kTile < a.shape.numel; t += warp_count()) {
    const int64_t left = a.shape.numel - t * kTile;
    const Tile tile{t / kTiles, int(t % kTiles), left < kTile ? int(left) : kTile, sums[threadIdx.x / kLanes]};
    load_tile(a, tile);
    for (int64_t m = 0; m < a.in.count; ++m) {
      const SparsePlanes message = sparse_planes(a.in, m);
      meet();
      if (a.shape.form == FL_SPARSE_SHORT)
        add_short(a, message, tile);
      else if (a.shape.form == FL_SPARSE_BYTE)
        add_byte(a, message, tile);
      else
        add_bitmap(a, message, tile);
    }
    meet();
    store_tile(a, tile);
    meet();
  }
}

}  // namespace

cudaError_t sparse_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  const DecodeArguments a{sparse_shape(spec), in, spec.dtype, out, add};
  return launch_over(Grid(ceil_div(spec.numel, kTile), 1), sparse_decode_kernel, a, stream);
}

const Decoders sparse_decoders = {nullptr, sparse_decode_sum};

}  // namespace fl
