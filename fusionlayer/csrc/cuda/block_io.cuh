// Blocks of 32 elements, one to a lane, between memory and f32 registers. A lane owns a whole block, so a transform of the
// block needs no shuffles; global accesses are 16 bytes wide and coalesced all the same, because the warp passes its blocks
// through shared memory: lanes fetch neighbouring chunks, and each then reads the chunks of its own block.
#pragma once

#include "elements.cuh"
#include "launch.cuh"

namespace fl {

constexpr int kBlock = 32;  // elements a lane owns
constexpr int kHalf = kLanes / 2;

template <class E>
constexpr int kChunk = 16 / int(sizeof(typename E::Bits));  // elements in a chunk

template <class E>
constexpr int kChunks = kBlock / kChunk<E>;  // of a block: 8 in f32, 4 in 16-bit types

// A chunk of elements, narrowed.
template <class E>
FL_DEVICE Chunk narrow_chunk(const float *v) {
  Chunk chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(typename E::Bits) == 4)
      chunk.word[i] = E::narrow(v[i]);
    else
      chunk.word[i] = E::narrow_two(v[2 * i], v[2 * i + 1]);
  }
  return chunk;
}

// The warp's part of shared memory: room for its blocks in f32.
FL_DEVICE Chunk *shared_chunks() {
  __shared__ Chunk space[kWarps][kLanes * 8];
  return space[threadIdx.x / kLanes];
}

// A chunk of a lane's block there. Chunks lie in another order in each block, so that eight lanes which access the same chunk
// of their blocks, or neighbouring chunks, meet all banks.
template <int kCount>
FL_DEVICE Chunk &chunk_of(int block, int chunk) {
  static_assert(kCount == 8 || kCount == 4);
  const int place = chunk ^ ((kCount == 8 ? block : block >> 1) & (kCount - 1));
  return shared_chunks()[block * kCount + place];
}

// Element i of a chunk, as bits.
template <class E>
FL_DEVICE typename E::Bits element_of(const Chunk &c, int i) {
  constexpr int kPerWord = 4 / int(sizeof(typename E::Bits));
  return typename E::Bits(c.word[i / kPerWord] >> (16 * (i % kPerWord)));
}

template <class E>
FL_DEVICE void add_element(Chunk &c, int i, typename E::Bits bits) {
  constexpr int kPerWord = 4 / int(sizeof(typename E::Bits));
  c.word[i / kPerWord] |= uint32_t(bits) << (16 * (i % kPerWord));
}

// Where the warp's blocks lie in an array of `numel` elements; `first` is the first element of the lane's own. Those of the
// lower half of the lanes are neighbours, and so are those of the upper half. In turn t lane l accesses chunk 32 t + l.
template <class E, class Bits>
struct Blocks {
  static constexpr int kTurns = kChunks<E>;

  Bits *low, *high;             // this lane's first chunk of each half
  int64_t low_left, high_left;  // elements of the array from there on
  bool wide;                    // all of it can be accessed in chunks

  FL_DEVICE Blocks(Bits *x, int64_t numel, int64_t first, int lane) {
    const int64_t lower = shuffle(first, 0), upper = shuffle(first, kHalf), mine = lane * kChunk<E>;
    wide = is_aligned(x + lower, 16) && is_aligned(x + upper, 16) && lower + kHalf * kBlock <= numel &&
           upper + kHalf * kBlock <= numel;
    low = x + opaque(lower + mine), high = x + opaque(upper + mine);
    low_left = numel - lower - mine, high_left = numel - upper - mine;
  }

  static FL_DEVICE int step(int turn) { return turn % (kTurns / 2) * (kLanes * kChunk<E>); }
  FL_DEVICE Bits *at(int turn) const { return (turn < kTurns / 2 ? low : high) + step(turn); }
  FL_DEVICE int64_t left(int turn) const { return (turn < kTurns / 2 ? low_left : high_left) - step(turn); }

  static FL_DEVICE Chunk &shared(int turn, int lane) {
    const int chunk = turn * kLanes + lane;
    return chunk_of<kTurns>(chunk / kTurns, chunk % kTurns);
  }
};

// Brings the warp's blocks into shared memory; elements past numel are 0.
template <class E>
FL_DEVICE void fetch_blocks(const typename E::Bits *x, int64_t numel, int64_t first, int lane) {
  using At = Blocks<E, const typename E::Bits>;
  const At at(x, numel, first, lane);
  Chunk got[At::kTurns] = {};
  if (at.wide) {
#pragma unroll
    for (int t = 0; t < At::kTurns; ++t) got[t] = load_chunk(at.at(t));
  } else {
#pragma unroll
    for (int t = 0; t < At::kTurns; ++t)
#pragma unroll
      for (int i = 0; i < kChunk<E>; ++i)
        if (i < at.left(t)) add_element<E>(got[t], i, at.at(t)[i]);
  }
#pragma unroll
  for (int t = 0; t < At::kTurns; ++t) At::shared(t, lane) = got[t];
  meet();
}

// The reverse, once every lane has written its block; what is past numel is not written.
template <class E>
FL_DEVICE void bring_blocks_back(typename E::Bits *x, int64_t numel, int64_t first, int lane) {
  using At = Blocks<E, typename E::Bits>;
  const At at(x, numel, first, lane);
  if (at.wide) {
#pragma unroll
    for (int t = 0; t < At::kTurns; ++t) store_chunk(at.at(t), At::shared(t, lane));
  } else {
#pragma unroll
    for (int t = 0; t < At::kTurns; ++t) {
      const Chunk chunk = At::shared(t, lane);
#pragma unroll
      for (int i = 0; i < kChunk<E>; ++i)
        if (i < at.left(t)) at.at(t)[i] = element_of<E>(chunk, i);
    }
  }
  meet();
}

// Elements of 16 bits, a tile from number `first` on, on their way into the device's cache. Those of f32 come as fast without.
FL_DEVICE void fetch_elements_ahead(uint32_t dtype, const void *x, int64_t first, int64_t numel) {
  if (dtype == FL_F32) return;
  const int64_t left = numel - first, count = left < kLanes * kBlock ? left : kLanes * kBlock;
  fetch_ahead(static_cast<const uint16_t *>(x) + first, 2 * count, lane_index());
}

// Calls use(i, element i of the lane's block) for its 32 elements.
template <class E, class Use>
FL_DEVICE void with_block(const typename E::Bits *x, int64_t numel, int64_t first, int lane, const Use &use) {
  fetch_blocks<E>(x, numel, first, lane);
#pragma unroll
  for (int j = 0; j < kChunks<E>; ++j) {
    const Chunk chunk = chunk_of<kChunks<E>>(lane, j);
#pragma unroll
    for (int i = 0; i < kChunk<E>; ++i) use(j * kChunk<E> + i, E::widen(element_of<E>(chunk, i)));
  }
  meet();
}

FL_DEVICE void load_block(uint32_t dtype, const void *x, int64_t numel, int64_t first, int lane, float (&v)[kBlock]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    with_block<E>(static_cast<const typename E::Bits *>(x), numel, first, lane,
                  [&](int i, float value) { v[i] = value; });
  });
}

FL_DEVICE void store_block(uint32_t dtype, void *x, int64_t numel, int64_t first, int lane, const float (&v)[kBlock]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
#pragma unroll
    for (int j = 0; j < kChunks<E>; ++j) chunk_of<kChunks<E>>(lane, j) = narrow_chunk<E>(v + j * kChunk<E>);
    meet();
    bring_blocks_back<E>(static_cast<typename E::Bits *>(x), numel, first, lane);
  });
}

}  // namespace fl
