// What the kernels of the `chunked_topk` codec share (codecs/chunked/chunked.h): a warp, which is a block, takes a chunk, whose values
// lie in shared memory.
#pragma once

#include "arguments.h"
#include "chunked.h"
#include "cuda/elements.cuh"
#include "cuda/launch.cuh"

namespace fl {

FL_DEVICE int sum_of(int v) { return int(sum_over_lanes(v)); }

// sums += what a chunk of a message says, for all lanes. Only what lies inside the chunk is added.
template <class Value>
FL_DEVICE void add_values(const ChunkForm &form, const ChunkBytes &in, float *sums, const Value &value) {
  const int lane = lane_index(), bytes = form.high_bytes();
  int before = 0;  // bits that are set in front of these 32 bytes
  for (int b = 0; b < bytes; b += kLanes) {
    uint32_t byte = b + lane < bytes ? in.high[b + lane] : 0;
    const int count = __popc(byte);
    int i = before + int(sum_before(count, lane));
    before += sum_of(count);
    for (; byte && i < form.kept; byte &= byte - 1, ++i) {
      const int position = position_of(form, in.low, 8 * (b + lane) + __ffs(byte) - 1, i);
      if (position < form.size) sums[position] += value(i);
    }
  }
}

FL_DEVICE void add_chunk(const ChunkForm &form, const ChunkBytes &in, float *sums) {
  const ChunkLevels levels = word_levels(*reinterpret_cast<const uint32_t *>(in.levels));
  if (are_broken(levels)) {
    for (int i = lane_index(); i < form.size; i += kLanes) sums[i] = bits_float(kF32Nan);
  } else if (form.bits == 32) {
    const uint32_t *values = reinterpret_cast<const uint32_t *>(in.codes);
    add_values(form, in, sums, [&](int i) { return bits_float(values[i]); });
  } else {
    const LevelCoder coder(form, levels);
    add_values(form, in, sums, [&](int i) { return coder.value(bit_field(in.codes, i, form.bits)); });
  }
  meet();
}

// sums = x, or 0 where x is null.
FL_DEVICE void set_chunk(uint32_t dtype, const void *x, int64_t first, int size, float scale, float *sums) {
  with_element(dtype, [&](auto type) {
    using E = decltype(type);
    const auto *values = static_cast<const typename E::Bits *>(x);
    for (int i = lane_index(); i < size; i += kLanes) sums[i] = values ? E::widen(values[first + i]) * scale : 0.0f;
  });
  meet();
}

// The grid for a warp per chunk, each a block of its own, in each of `messages` messages.
inline Grid chunk_grid(const ChunkedShape &shape, int64_t messages) { return Grid(shape.chunks * kWarps, messages); }

}  // namespace fl
