// encode and recode of the `chunked_topk` codec. How many elements go is known, so nothing is counted over chunks and the host
// waits for nothing.
#include "chunked.cuh"
#include "residual.h"

namespace fl {
namespace {

struct EncodeArguments {
  ChunkedShape shape;
  fl_messages in;  // recode: added to x
  fl_messages out;
  uint32_t dtype;
  const void *x;
  float scale;
  float *residual;
};

// The values of a chunk, and the places of those that go.
struct ChunkMemory {
  float v[kMostChunk];
  uint16_t place[kMostChunk];
};

// The same in all lanes: the largest magnitude.
FL_DEVICE uint32_t largest_in(const ChunkForm &form, const float *v) {
  uint32_t largest = 0;
  for (int i = lane_index(); i < form.size; i += kLanes) {
    const uint32_t bits = magnitude(v[i]);
    largest = bits > largest ? bits : largest;
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const uint32_t other = shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  return largest;
}

FL_DEVICE int reaching(const ChunkForm &form, const float *v, uint32_t t) {
  int count = 0;
#pragma unroll 8
  for (int i = lane_index(); i < form.size; i += kLanes) count += magnitude(v[i]) >= t;
  return sum_of(count);
}

// Lists in their order the largest, and of those that equal the last of them the first.
FL_DEVICE void choose(const ChunkForm &form, ChunkMemory &chunk) {
  uint32_t bound = 0;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
    const int count = reaching(form, chunk.v, bound | bit);
    if (count >= form.kept) bound |= bit;
    if (count == form.kept) break;
  }
  const int lane = lane_index();
  int ties = form.kept - reaching(form, chunk.v, bound + 1), taken = 0;
  for (int first = 0; first < form.size; first += kLanes) {
    const int i = first + lane;
    const uint32_t bits = i < form.size ? magnitude(chunk.v[i]) : 0;
    const uint32_t same = ballot(i < form.size && bits == bound);
    const bool tie = (same >> lane & 1) && __popc(below(same, lane)) < ties;
    const uint32_t go = ballot(bits > bound || tie);
    ties -= __popc(same) < ties ? __popc(same) : ties;
    if (go >> lane & 1) chunk.place[taken + __popc(below(go, lane))] = uint16_t(i);
    taken += __popc(go);
  }
  meet();
}

FL_DEVICE ChunkLevels levels_of(const ChunkForm &form, const ChunkMemory &chunk, uint32_t largest) {
  if (form.bits == 32) return kExactLevels;
  const int lane = lane_index();
  if (form.bits == 2) {
    const float per = units_per(largest);
    int64_t total = 0, high = 0;
    int count = 0;
    for (int i = lane; i < form.kept; i += kLanes) total += units_of(magnitude(chunk.v[chunk.place[i]]), per);
    total = sum_over_lanes(total);
    for (int i = lane; i < form.kept; i += kLanes) {
      const int64_t units = units_of(magnitude(chunk.v[chunk.place[i]]), per);
      const bool above = above_mean(units, form.kept, total);
      high += above ? units : 0;
      count += above;
    }
    return two_levels(form.kept, total, sum_of(count), sum_over_lanes(high), largest);
  }
  uint32_t least = largest;
  for (int i = lane; i < form.kept; i += kLanes) {
    const uint32_t bits = magnitude(chunk.v[chunk.place[i]]);
    least = bits < least ? bits : least;
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const uint32_t other = shuffle_xor(least, mask);
    least = other < least ? other : least;
  }
  return levels_between(bits_float(least), bits_float(largest), form.top());
}

FL_DEVICE void write_positions(const ChunkForm &form, const ChunkMemory &chunk, const ChunkBytes &out) {
  for (int j = lane_index(); j < form.high_bytes(); j += kLanes) {
    int i = 0, end = form.kept;  // the first whose bit is not in front of this byte
    while (i < end) {
      const int middle = (i + end) / 2;
      if (high_place(chunk.place[middle], middle, form.low) < 8 * j)
        i = middle + 1;
      else
        end = middle;
    }
    uint32_t byte = 0;
    for (; i < form.kept; ++i) {
      const int bit = high_place(chunk.place[i], i, form.low) - 8 * j;
      if (bit >= 8) break;
      byte |= 1u << bit;
    }
    out.high[j] = uint8_t(byte);
  }
  const uint32_t mask = (1u << form.low) - 1;
  const auto low = [&](int i) { return chunk.place[i] & mask; };
  for (int j = lane_index(); j < form.low_bytes(); j += kLanes) out.low[j] = packed_byte(low, form.kept, form.low, j);
}

// Leaves in the chunk what stays of it.
FL_DEVICE void write_codes(const ChunkForm &form, ChunkMemory &chunk, ChunkLevels levels, const ChunkBytes &out,
                           const float *residual) {
  if (form.bits == 32) {
    for (int i = lane_index(); i < form.kept; i += kLanes) {
      reinterpret_cast<uint32_t *>(out.codes)[i] = float_bits(chunk.v[chunk.place[i]]);
      chunk.v[chunk.place[i]] = 0.0f;
    }
    return;
  }
  const LevelCoder coder(form, levels);
  const auto code = [&](int i) { return coder.code(chunk.v[chunk.place[i]]); };
  for (int j = lane_index(); j < form.code_bytes(); j += kLanes)
    out.codes[j] = packed_byte(code, form.kept, form.bits, j);
  meet();
  if (!residual) return;
  for (int i = lane_index(); i < form.kept; i += kLanes) {
    const int place = chunk.place[i];
    chunk.v[place] = residual_after(chunk.v[place], coder.value(code(i)), residual[place]);
  }
}

FL_DEVICE void encode_chunk(const ChunkForm &form, ChunkMemory &chunk, const ChunkBytes &out, float *residual) {
  const int lane = lane_index();
  const uint32_t largest = largest_in(form, chunk.v);
  const bool broken = largest >= kF32Inf, none = largest < kTinyBits;
  ChunkLevels levels = {uint16_t(broken ? kBf16Nan : 0), 0};
  if (broken || none) {
    for (int j = lane; j < form.position_bytes(); j += kLanes) out.high[j] = 0;
    for (int j = lane; j < form.code_bytes(); j += kLanes) out.codes[j] = 0;
  } else {
    choose(form, chunk);
    levels = levels_of(form, chunk, largest);
    write_positions(form, chunk, out);
    write_codes(form, chunk, levels, out, residual);
  }
  if (lane == 0) *reinterpret_cast<uint32_t *>(out.levels) = level_word(levels);
  meet();
  if (residual && !broken)
    for (int i = lane; i < form.size; i += kLanes) residual[i] = chunk.v[i];
  meet();
}

template <bool kSum>
__global__ void __launch_bounds__(kLanes) encode_kernel(const EncodeArguments a) {
  __shared__ ChunkMemory chunk;
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t c = blockIdx.x; c < a.shape.chunks; c += gridDim.x) {
      const ChunkForm form = a.shape.form(c);
      const int64_t first = m * a.shape.numel + c * a.shape.full.size;
      set_chunk(a.dtype, a.x, first, form.size, a.scale, chunk.v);
      if (kSum)
        for (int64_t i = 0; i < a.in.count; ++i) add_chunk(form, chunk_bytes(a.shape, a.in, i, c), chunk.v);
      float *residual = a.residual ? a.residual + first : nullptr;
      if (residual)
        for (int i = lane_index(); i < form.size; i += kLanes) chunk.v[i] += residual[i];
      meet();
      encode_chunk(form, chunk, chunk_bytes(a.shape, a.out, m, c), residual);
    }
}

}  // namespace

cudaError_t chunked_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                           cudaStream_t stream) {
  const EncodeArguments a{chunked_shape(spec), {}, out, spec.dtype, x, chunked_scale(spec), residual};
  return launch_over(chunk_grid(a.shape, out.count), encode_kernel<false>, a, stream, kLanes);
}

cudaError_t chunked_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                           const fl_messages &out, cudaStream_t stream) {
  const EncodeArguments a{chunked_shape(spec), in, out, spec.dtype, x, 1.0f, residual};
  return launch_over(chunk_grid(a.shape, 1), encode_kernel<true>, a, stream, kLanes);
}

const Encoders chunked_encoders = {chunked_encode, chunked_recode, nullptr};

}  // namespace fl
