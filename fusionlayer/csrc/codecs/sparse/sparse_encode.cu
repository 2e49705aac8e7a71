// fl_sparse_encode: mark (count per block of 256), settle (ties and the limit of a block), place (where the pairs of a
// superblock begin), write. Every count is exact, so bytes do not depend on the order in which warps run.
#include "checks.h"
#include "cuda/elements.cuh"
#include "cuda/launch.cuh"
#include "rng.h"
#include "sparse.h"

namespace fl {
namespace {

constexpr int kHeld = kCounted / kLanes;         // elements of a block that a lane has
constexpr int kBlocks = kSuperblock / kCounted;  // of a superblock
constexpr int kLaneBlocks = kBlocks / kLanes;    // that a lane settles

// What is known of a block: from marking, then from settling.
struct BlockPlan {
  uint32_t marked;  // selected elements | those that equal the threshold << 16; 0: nothing happens in this block
  uint32_t ties;    // of which so many go
  uint32_t first;   // its first pair, counted from the superblock's
};

struct SuperblockPlan {
  int64_t first;  // its first pair
  uint32_t equal, pairs;
};

struct Selection {
  SparseShape shape;
  bool random;
  fl_choice given;
  const fl_choice *choice;  // in place of what is given
  RngKey key;
  uint64_t offset;
  const void *x;
  uint32_t dtype;
  float scale;
  float *acc, *clear;
  SparsePlanes out;
  BlockPlan *blocks;
  SuperblockPlan *superblocks;
};

// Copied member by member: a pointer to either would be one to any kind of memory, and its loads slower.
FL_DEVICE Bound bound_of(const Selection &s) {
  fl_choice choice = s.given;
  if (s.choice) {
    choice.threshold = s.choice->threshold;
    choice.ties = s.choice->ties;
  }
  return fl::bound_of(choice, s.random);
}

// A lane's elements of a block: element i of them is number i * kLanes + lane.
struct Held {
  float v[kHeld];
  uint32_t exist;  // a bit for each
};

FL_DEVICE int64_t element_of(int64_t block, int i) { return block * kCounted + i * kLanes + lane_index(); }

FL_DEVICE Held load(const Selection &s, int64_t block) {
  Held held = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t element = element_of(block, i);
    if (element >= s.shape.numel) continue;
    held.v[i] = s.acc[element];
    held.exist |= 1u << i;
  }
  return held;
}

FL_DEVICE void add_x(const Selection &s, int64_t block, Held &held) {
  with_element(s.dtype, [&](auto type) {
    using E = decltype(type);
    const auto *x = static_cast<const typename E::Bits *>(s.x);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!(held.exist >> i & 1)) continue;
      held.v[i] = accumulated(held.v[i], E::widen(x[element_of(block, i)]), s.scale);
      s.acc[element_of(block, i)] = held.v[i];
    }
  });
}

FL_DEVICE bool selected(const Selection &s, const Bound &bound, int64_t block, const Held &held, int i) {
  const int bits = int(magnitude(held.v[i]));
  if (!(held.exist >> i & 1)) return false;
  if (!s.random) return bits > bound.threshold;
  const uint64_t number = s.offset + uint64_t(element_of(block, i));
  return bits >= int(kF32Inf) || random_bits(key_at(s.key, number), uint32_t(number)) < bound.limit;
}

FL_DEVICE bool equal(const Bound &bound, const Held &held, int i) {
  return bound.ties > 0 && (held.exist >> i & 1) && int(magnitude(held.v[i])) == bound.threshold;
}

__global__ void __launch_bounds__(kThreads) mark_kernel(const Selection s) {
  const Bound bound = bound_of(s);
  for (int64_t block = warp_index(); block < s.shape.blocks(); block += warp_count()) {
    Held held = load(s, block);
    if (s.x) add_x(s, block, held);
    uint32_t marked = 0;
    bool wild = false;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      marked += __popc(ballot(selected(s, bound, block, held, i)));
      marked += uint32_t(__popc(ballot(equal(bound, held, i)))) << 16;
      wild = wild || !is_finite(held.v[i]);
    }
    const bool any_wild = ballot(wild) != 0;
    if (lane_index() == 0) s.blocks[block] = {marked | uint32_t(any_wild) << 31, 0, 0};
  }
}

FL_DEVICE uint32_t selected_in(const BlockPlan &plan) { return plan.marked & 0xffffu; }
FL_DEVICE uint32_t equal_in(const BlockPlan &plan) { return plan.marked >> 16 & 0x7fffu; }

// How many elements of each superblock equal the threshold.
__global__ void __launch_bounds__(kThreads) tie_kernel(const Selection s) {
  if (bound_of(s).ties <= 0) return;
  for (int64_t superblock = warp_index(); superblock < s.shape.superblocks(); superblock += warp_count()) {
    int64_t sum = 0;
    for (int i = lane_index(); i < kBlocks; i += kLanes) {
      const int64_t block = superblock * kBlocks + i;
      if (block < s.shape.blocks()) sum += equal_in(s.blocks[block]);
    }
    sum = sum_over_lanes(sum);
    if (lane_index() == 0) s.superblocks[superblock].equal = uint32_t(sum);
  }
}

FL_DEVICE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

FL_DEVICE int64_t ties_left(const Selection &s, const Bound &bound, int64_t superblock) {
  if (bound.ties <= 0) return 0;
  int64_t before = 0;
  for (int64_t i = lane_index(); i < superblock; i += kLanes) before += s.superblocks[i].equal;
  before = sum_over_lanes(before);
  return before < bound.ties ? bound.ties - before : 0;
}

FL_DEVICE void place(const Selection &s, int64_t superblock, int64_t first) {
  s.superblocks[superblock].first = first;
  s.out.ends[superblock] = uint32_t(least(first + s.superblocks[superblock].pairs, s.shape.capacity));
}

// Lane l settles blocks 8 l to 8 l + 7 of the superblock.
__global__ void __launch_bounds__(kThreads) settle_kernel(const Selection s) {
  const Bound bound = bound_of(s);
  const int lane = lane_index();
  const uint32_t most = s.shape.form == FL_SPARSE_BYTE ? kMostCounted : kCounted;
  for (int64_t superblock = warp_index(); superblock < s.shape.superblocks(); superblock += warp_count()) {
    const int64_t start = superblock * kBlocks + lane * kLaneBlocks, left = s.shape.blocks() - start;
    const int count = left < 0 ? 0 : int(least(left, kLaneBlocks));
    int64_t ties = ties_left(s, bound, superblock);
    if (bound.ties > 0) {
      int64_t equals = 0;
      for (int i = 0; i < count; ++i) equals += equal_in(s.blocks[start + i]);
      ties -= sum_before(equals, lane);
    }
    uint32_t pairs = 0;
    for (int i = 0; i < count; ++i) {
      BlockPlan &plan = s.blocks[start + i];
      const uint32_t granted = ties > 0 ? uint32_t(least(ties, equal_in(plan))) : 0;
      ties -= granted;
      const uint32_t go = selected_in(plan) + granted;
      plan.ties = granted;
      plan.first = pairs;
      pairs += go < most ? go : most;
    }
    const uint32_t before = uint32_t(sum_before(pairs, lane));
    for (int i = 0; i < count; ++i) s.blocks[start + i].first += before;
    if (lane == kLanes - 1) {
      s.superblocks[superblock].pairs = before + pairs;
      if (s.shape.superblocks() == 1) place(s, superblock, 0);
    }
  }
}

__global__ void __launch_bounds__(kThreads) place_kernel(const Selection s) {
  for (int64_t superblock = warp_index(); superblock < s.shape.superblocks(); superblock += warp_count()) {
    int64_t first = 0;
    for (int64_t i = lane_index(); i < superblock; i += kLanes) first += s.superblocks[i].pairs;
    first = sum_over_lanes(first);
    if (lane_index() == 0) place(s, superblock, first);
  }
}

// Writes a pair, and returns what is kept of the value.
FL_DEVICE float write_pair(const Selection &s, int64_t pair, int64_t element, float value) {
  if (s.shape.form == FL_SPARSE_BYTE)
    static_cast<uint8_t *>(s.out.positions)[pair] = uint8_t(element);
  else if (s.shape.form == FL_SPARSE_SHORT)
    static_cast<uint16_t *>(s.out.positions)[pair] = uint16_t(element);
  if (s.shape.values == FL_F32) {
    static_cast<float *>(s.out.values)[pair] = canonical(value);
    return 0.0f;
  }
  const uint16_t sent = f32_to_bf16(value);
  static_cast<uint16_t *>(s.out.values)[pair] = sent;
  return kept(value, bf16_to_f32(sent));
}

// A block's 32 bytes of a bitmap, one for each lane. Lane l has byte l % 4 of word l / 4.
FL_DEVICE void write_bits(const Selection &s, int64_t block, uint32_t word) {
  const int64_t byte = block * (kCounted / 8) + lane_index();
  if (byte < s.shape.plane_bytes(2))
    static_cast<uint8_t *>(s.out.positions)[byte] = uint8_t(word >> lane_index() % 4 * 8);
}

FL_DEVICE void write_block(const Selection &s, const Bound &bound, int64_t block, int64_t first) {
  const BlockPlan plan = s.blocks[block];
  const int64_t room = s.shape.capacity - first;
  const int64_t most = least(s.shape.form == FL_SPARSE_BYTE ? kMostCounted : kCounted, room > 0 ? room : 0);
  const int lane = lane_index();
  uint32_t mine = 0;          // of a bitmap: the word that holds this lane's byte
  int64_t taken = 0;          // elements so far that are selected
  uint32_t ties = plan.ties;  // left
  if (plan.marked != 0) {
    const Held held = load(s, block);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const uint32_t same = ballot(equal(bound, held, i));
      const bool granted = (same >> lane & 1) && uint32_t(__popc(below(same, lane))) < ties;
      ties -= uint32_t(__popc(same)) < ties ? uint32_t(__popc(same)) : ties;
      const uint32_t go = ballot(selected(s, bound, block, held, i) || granted);
      const int64_t rank = taken + __popc(below(go, lane));
      const bool sent = (go >> lane & 1) && rank < most;
      taken += __popc(go);
      const uint32_t word = ballot(sent);
      mine = lane / 4 == i ? word : mine;
      const bool wild = !is_finite(held.v[i]);
      if (sent || wild) {
        const int64_t element = element_of(block, i);
        s.acc[element] = sent ? write_pair(s, first + rank, element, held.v[i]) : 0.0f;
        if (s.clear) s.clear[element] = 0.0f;
      }
    }
  }
  if (s.shape.form == FL_SPARSE_BITMAP) write_bits(s, block, mine);
  if (s.shape.form == FL_SPARSE_BYTE && lane == 0) s.out.counts[block] = uint8_t(least(taken, most));
}

// Zeros behind the last pair.
FL_DEVICE void clear_behind(const Selection &s) {
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  int64_t pair = s.out.ends[s.shape.superblocks() - 1] + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  for (; pair < s.shape.capacity; pair += stride) {
    if (s.shape.form == FL_SPARSE_BYTE) static_cast<uint8_t *>(s.out.positions)[pair] = 0;
    if (s.shape.form == FL_SPARSE_SHORT) static_cast<uint16_t *>(s.out.positions)[pair] = 0;
    if (s.shape.values == FL_F32)
      static_cast<float *>(s.out.values)[pair] = 0.0f;
    else
      static_cast<uint16_t *>(s.out.values)[pair] = 0;
  }
}

__global__ void __launch_bounds__(kThreads) write_kernel(const Selection s) {
  const Bound bound = bound_of(s);
  for (int64_t block = warp_index(); block < s.shape.blocks(); block += warp_count())
    write_block(s, bound, block, s.superblocks[block / kBlocks].first + s.blocks[block].first);
  clear_behind(s);
}

int64_t block_bytes(int64_t numel) { return ceil_div(ceil_div(numel, kCounted) * int64_t(sizeof(BlockPlan)), 16) * 16; }

Selection selection_of(const fl_spec &spec, const void *x, float scale, float *acc, float *clear,
                       const fl_choice &given, const fl_choice *choice, void *workspace, const fl_messages &out) {
  uint8_t *memory = static_cast<uint8_t *>(workspace);
  return {
      sparse_shape(spec),
      bool(spec.param[3] & FL_SPARSE_RANDOM),
      given,
      choice,
      make_key(spec.seed),
      uint64_t(spec.offset),
      x,
      spec.dtype,
      scale,
      acc,
      clear,
      sparse_planes(out, 0),
      reinterpret_cast<BlockPlan *>(memory),
      reinterpret_cast<SuperblockPlan *>(memory + block_bytes(spec.numel)),
  };
}

cudaError_t encode(const Selection &s, cudaStream_t stream) {
  const Grid blocks(s.shape.blocks(), 1), superblocks(s.shape.superblocks(), 1);
  if (blocks.error || superblocks.error) return blocks.error ? blocks.error : superblocks.error;
  FL_LAUNCH(mark_kernel, blocks.blocks, kThreads, stream, s);
  const bool several = s.shape.superblocks() > 1;  // else nothing comes before a superblock, and settling places it
  if (several && (s.choice || s.given.ties > 0)) FL_LAUNCH(tie_kernel, superblocks.blocks, kThreads, stream, s);
  FL_LAUNCH(settle_kernel, superblocks.blocks, kThreads, stream, s);
  if (several) FL_LAUNCH(place_kernel, superblocks.blocks, kThreads, stream, s);
  FL_LAUNCH(write_kernel, blocks.blocks, kThreads, stream, s);
  return cudaGetLastError();
}

}  // namespace

int64_t encode_workspace(int64_t numel) {
  return block_bytes(numel) + ceil_div(numel, kSuperblock) * int64_t(sizeof(SuperblockPlan));
}

const Encoders sparse_encoders = {};

}  // namespace fl

extern "C" int fl_sparse_encode(const fl_spec *spec, const void *x, float scale, float *acc, float *clear,
                                int64_t threshold, int64_t ties, const fl_choice *choice, void *workspace,
                                const fl_messages *out, void *stream) {
  const fl_choice given{threshold, ties};
  if (const int bad = fl::check_sparse_encode(spec, x, acc, clear, given, choice, workspace, out)) return bad;
  if (spec->numel == 0) return FL_OK;
  const fl::Selection s = fl::selection_of(*spec, x, scale, acc, clear, given, choice, workspace, *out);
  return fl::finish(fl::encode(s, fl::as_stream(stream)));
}
