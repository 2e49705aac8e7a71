// Blocks of 32 elements, one to a lane, between memory and f32 registers. A lane owns a whole block, so a transform of the
// block needs no shuffles; global accesses are 16 bytes wide and coalesced all the same, because four lanes fetch their
// four blocks together, 64 bytes at a time (a row), and exchange chunks.
#pragma once

#include "elements.cuh"

namespace fl {

constexpr int kBlock = 32;  // elements a lane owns

template <class E>
constexpr int kChunk = 16 / int(sizeof(typename E::Bits));  // elements in a chunk

template <class E>
constexpr int kRow = 4 * kChunk<E>;  // elements of one block in a row: half a block in f32, all of it in 16-bit types

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

// Where a row lies for this lane: `first` is the first element of the lane's own block, `numel` those of the array.
template <class E, class Bits>
struct Row {
  Bits *start;   // chunk 0 of block 0 of the quad
  int64_t left;  // elements of the array from there on
  bool wide;     // the whole row can be accessed in chunks
  int lane;

  FL_DEVICE Row(Bits *x, int64_t numel, int64_t first, int row, int lane_) : lane(lane_ & 3) {
    const int64_t element = opaque(first - lane * kBlock + row * kRow<E>);
    start = x + element;
    left = numel - element;
    wide = is_aligned(start, 16) && left >= 3 * kBlock + kRow<E>;
  }

  FL_DEVICE int chunk(int slot) const { return slot * kBlock + (lane ^ slot) * kChunk<E>; }

  // How many elements of a chunk exist.
  FL_DEVICE int count(int slot) const {
    const int64_t n = left - chunk(slot);
    return n >= kChunk<E> ? kChunk<E> : int(n);
  }
};

// v[0 .. kRow) = row `row` of the lane's block, which starts at element `first` of x; elements past numel are 0.
template <class E>
FL_DEVICE void load_row(const typename E::Bits *x, int64_t numel, int64_t first, int row, int lane, float *v) {
  const Row<E, const typename E::Bits> at(x, numel, first, row, lane);
  Chunk slot[4];
  if (at.wide) {
#pragma unroll
    for (int i = 0; i < 4; ++i) slot[i] = load_chunk(at.start + at.chunk(i));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int count = at.count(i);
      slot[i] = {};
#pragma unroll
      for (int j = 0; j < kChunk<E>; ++j)
        if (j < count) add_element<E>(slot[i], j, at.start[at.chunk(i) + j]);
    }
  }
  spread_to_owned(slot, lane);
#pragma unroll
  for (int j = 0; j < kRow<E>; ++j) v[j] = E::widen(element_of<E>(slot[j / kChunk<E>], j % kChunk<E>));
}

// The reverse of load_row, for bits that are already narrowed; what is past numel is not written.
template <class E>
FL_DEVICE void store_row(typename E::Bits *x, int64_t numel, int64_t first, int row, int lane, Chunk (&slot)[4]) {
  const Row<E, typename E::Bits> at(x, numel, first, row, lane);
  owned_to_spread(slot, lane);
  if (at.wide) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_chunk(at.start + at.chunk(i), slot[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int count = at.count(i);
#pragma unroll
      for (int j = 0; j < kChunk<E>; ++j)
        if (j < count) at.start[at.chunk(i) + j] = element_of<E>(slot[i], j);
    }
  }
}

FL_DEVICE void load_block(uint32_t dtype, const void *x, int64_t numel, int64_t first, int lane, float (&v)[kBlock]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
#pragma unroll
    for (int row = 0; row < kBlock / kRow<E>; ++row)
      load_row<E>(static_cast<const typename E::Bits *>(x), numel, first, row, lane, v + row * kRow<E>);
  });
}

FL_DEVICE void store_block(uint32_t dtype, void *x, int64_t numel, int64_t first, int lane, const float (&v)[kBlock]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
#pragma unroll
    for (int row = 0; row < kBlock / kRow<E>; ++row) {
      Chunk slot[4] = {};
#pragma unroll
      for (int j = 0; j < kRow<E>; ++j)
        add_element<E>(slot[j / kChunk<E>], j % kChunk<E>, E::narrow(v[row * kRow<E> + j]));
      store_row<E>(static_cast<typename E::Bits *>(x), numel, first, row, lane, slot);
    }
  });
}

}  // namespace fl
