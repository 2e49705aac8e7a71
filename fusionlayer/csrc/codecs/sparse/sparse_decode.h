// Sparse messages (codecs/sparse/sparse.h): are they whole, and their sum. What is summed has been found valid.
#pragma once

#include <algorithm>

#include "cpu/elements.h"
#include "cpu/kernels.h"

namespace fl::FL_ISA {

constexpr int kSparseTile = 16384;  // elements: 64 KiB of sums
constexpr int kMarkBytes = kSuperblock / 8;

// The pairs of one superblock of a message.
struct Pairs {
  int64_t begin, end;

  Pairs(const SparsePlanes &message, int64_t superblock)
      : begin(superblock ? message.ends[superblock - 1] : 0), end(message.ends[superblock]) {}
};

FL_INLINE uint64_t word_at(const uint8_t *bytes, int n) {  // n bytes, followed by zeros
  uint64_t word = 0;
  __builtin_memcpy(&word, bytes, size_t(n < 8 ? n : 8));
  return word;
}

inline int64_t count_bits(const uint8_t *bytes, int n) {
  int64_t count = 0;
  for (int i = 0; i < n; i += 8)
    count += __builtin_popcountll(n - i >= 8 ? word_at(bytes + i, 8) : word_at(bytes + i, n - i));
  return count;
}

// How many of n positions are not above the one before. No early end: this vectorises.
template <class T>
int64_t count_descents(const T *positions, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 1; i < n; ++i) count += positions[i] <= positions[i - 1];
  return count;
}

inline bool valid_short(const uint16_t *positions, const Pairs &pairs, int elements) {
  if (pairs.begin == pairs.end) return true;
  return count_descents(positions + pairs.begin, pairs.end - pairs.begin) == 0 && positions[pairs.end - 1] < elements;
}

inline bool valid_bitmap(const uint8_t *bits, const Pairs &pairs, int elements) {
  const int bytes = (elements + 7) / 8;
  const bool padded = elements % 8 == 0 || bits[bytes - 1] >> (elements % 8) == 0;
  return padded && count_bits(bits, bytes) == pairs.end - pairs.begin;
}

// Positions ascend inside a block: they descend nowhere but where a block begins.
inline bool valid_byte(const uint8_t *positions, const uint8_t *counts, const Pairs &pairs, int elements) {
  const int blocks = (elements + kCounted - 1) / kCounted;
  int64_t at = pairs.begin, descents = 0;
  for (int b = 0; b < blocks; ++b) {
    if (counts[b] > pairs.end - at) return false;
    descents += counts[b] > 0 && at > pairs.begin && positions[at] <= positions[at - 1];
    at += counts[b];
  }
  if (at != pairs.end || count_descents(positions + pairs.begin, at - pairs.begin) != descents) return false;
  return counts[blocks - 1] == 0 || positions[at - 1] < elements - (blocks - 1) * kCounted;
}

inline bool valid(const SparseShape &shape, const SparsePlanes &message, int64_t superblock) {
  const Pairs pairs(message, superblock);
  const int elements = shape.in_superblock(superblock);
  if (shape.form == FL_SPARSE_SHORT)
    return valid_short(static_cast<const uint16_t *>(message.positions), pairs, elements);
  const uint8_t *bytes = static_cast<const uint8_t *>(message.positions);
  if (shape.form == FL_SPARSE_BITMAP) return valid_bitmap(bytes + superblock * kMarkBytes, pairs, elements);
  return valid_byte(bytes, message.counts + superblock * (kSuperblock / kCounted), pairs, elements);
}

// Whether superblocks begin..end - 1 of all messages are valid; their ends are.
inline bool sparse_valid(const Job &job, int64_t begin, int64_t end) {
  const SparseShape shape = sparse_shape(*job.spec);
  for (int64_t m = 0; m < job.in->count; ++m)
    for (int64_t s = begin; s < end; ++s)
      if (!valid(shape, sparse_planes(*job.in, m), s)) return false;
  return true;
}

// The values of a message as f32.
struct F32Values {
  const float *values;
  FL_INLINE float operator[](int64_t i) const { return values[i]; }
};
struct Bf16Values {
  const uint16_t *values;
  FL_INLINE float operator[](int64_t i) const { return bf16_to_f32(values[i]); }
};

// A tile of a superblock: elements first..first + size - 1 of it.
struct SparseTile {
  int64_t superblock;
  int first, size;
  float *sums;
};

template <class Values>
void add_short(const SparsePlanes &message, const Values &values, const SparseTile &tile) {
  const uint16_t *positions = static_cast<const uint16_t *>(message.positions);
  const Pairs pairs(message, tile.superblock);
  const uint16_t *at = std::lower_bound(positions + pairs.begin, positions + pairs.end, tile.first);
  for (int64_t i = at - positions; i < pairs.end && positions[i] < tile.first + tile.size; ++i)
    tile.sums[positions[i] - tile.first] += values[i];
}

// Most blocks have few pairs. A loop over those of each block would end in a mispredicted branch every time. So each block
// writes down the places of the next kFew pairs, the following block overwrites what was too many, and one loop takes all.
template <class Values>
void add_byte(const SparsePlanes &message, const Values &values, const SparseTile &tile) {
  constexpr int kFew = 8;
  typedef uint16_t Few __attribute__((vector_size(2 * kFew)));
  const uint8_t *counts = message.counts + tile.superblock * (kSuperblock / kCounted);
  const int first = tile.first / kCounted, end = (tile.first + tile.size + kCounted - 1) / kCounted;
  int64_t begin = Pairs(message, tile.superblock).begin;
  for (int b = 0; b < first; ++b) begin += counts[b];

  uint16_t block[kSparseTile + kFew];
  int n = 0;
  for (int b = first; b < end; ++b) {
    const Few place = Few{} + uint16_t((b - first) * kCounted);
    store(block + n, place);
    for (int i = kFew; i < counts[b]; i += kFew) store(block + n + i, place);
    n += counts[b];
  }
  const uint8_t *positions = static_cast<const uint8_t *>(message.positions) + begin;
  for (int i = 0; i < n; ++i) tile.sums[block[i] + positions[i]] += values[begin + i];
}

template <class Values>
void add_bitmap(const SparsePlanes &message, const Values &values, const SparseTile &tile) {
  const uint8_t *bits = static_cast<const uint8_t *>(message.positions) + tile.superblock * kMarkBytes;
  int64_t i = Pairs(message, tile.superblock).begin + count_bits(bits, tile.first / 8);
  bits += tile.first / 8;
  for (int e = 0; e < tile.size; e += 64)
    for (uint64_t word = word_at(bits + e / 8, (tile.size - e + 7) / 8); word; word &= word - 1)
      tile.sums[e + __builtin_ctzll(word)] += values[i++];
}

template <class Values>
void add_pairs(uint32_t form, const SparsePlanes &message, const Values &values, const SparseTile &tile) {
  if (form == FL_SPARSE_SHORT)
    add_short(message, values, tile);
  else if (form == FL_SPARSE_BYTE)
    add_byte(message, values, tile);
  else
    add_bitmap(message, values, tile);
}

template <class T>
void sparse_decode_sum(const Job &job, int64_t begin, int64_t end) {
  const SparseShape shape = sparse_shape(*job.spec);
  alignas(64) float sums[kSparseTile];
  for (int64_t superblock = begin; superblock < end; ++superblock)
    for (int first = 0; first < shape.in_superblock(superblock); first += kSparseTile) {
      const int left = shape.in_superblock(superblock) - first;
      const SparseTile tile{superblock, first, left < kSparseTile ? left : kSparseTile, sums};
      T *out = static_cast<T *>(job.y) + superblock * kSuperblock + first;
      if (job.add)
        for_each_block(tile.size, [&](int i, auto access) FL_LAMBDA { store_block(sums + i, access.load(out + i)); });
      else
        __builtin_memset(sums, 0, size_t(tile.size) * sizeof(float));
      for (int64_t m = 0; m < job.in->count; ++m) {
        const SparsePlanes message = sparse_planes(*job.in, m);
        if (shape.values == FL_F32)
          add_pairs(shape.form, message, F32Values{static_cast<const float *>(message.values)}, tile);
        else
          add_pairs(shape.form, message, Bf16Values{static_cast<const uint16_t *>(message.values)}, tile);
      }
      with_store(job.streamed, out, [&](auto way) FL_LAMBDA {
        constexpr Store kStore = decltype(way)::value;
        for_each_block(tile.size, [&](int i, auto access) FL_LAMBDA {
          access.template store<kStore>(out + i, canonical(load_block(sums + i)));
        });
      });
    }
}

}  // namespace fl::FL_ISA
