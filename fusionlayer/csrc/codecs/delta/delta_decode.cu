// Decoding of `delta`: look at the base, if what is made takes its place; make the blocks; say what was found. What a message
// says is trusted nowhere, and only its digests tell whether it was sound.
#include "checks.h"
#include "delta_bits.cuh"

namespace fl {
namespace {

// What is wrong with a message, by weight.
enum { kFine = 0, kIncoherent = 1, kUnreadable = 2 };

struct DecodeArguments {
  DeltaShape shape;
  DeltaMessage in;
  const void *base;  // zeros where there is none
  void *out;
  DeltaRoom room;
  int32_t *status;  // of earlier messages; then of this one, too

  FL_DEVICE bool in_place() const { return out == base; }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kDeltaGroups) look_kernel(const DecodeArguments a) {
  __shared__ DeltaTable table;
  if (*a.status) return;
  if (warp_index() < a.shape.blocks()) table.fill();
#pragma unroll 1
  for (int64_t block = warp_index(); block < a.shape.blocks(); block += warp_count()) {
    DeltaChecksum of_base;
    const int n = a.shape.in_block(block);
    for (int begin = 0; begin < n; begin += kPerChunk<T> * kLanes) {
      const int element = begin + lane_index() * kPerChunk<T>;
      of_base.take(table, load_base<T>(a.base, block * kDeltaBlock + element, n - element));
    }
    const uint32_t digest = DeltaEnds::of<T>(a.shape.block_bytes(block)).digest(of_base, block);
    if (lane_index() == 0) atomicAdd(&a.room.state()->base, digest);
  }
}

// Adds to numbers what the layers tell of them, from the lowest bit that they have: each layer that a number reaches adds a
// bit in front. False where layers are not coherent.
template <class T>
FL_DEVICE bool read_layers(DeltaSource &in, int count, int low_bits, uint32_t *mask, uint16_t *place, T *value) {
  constexpr int kBits = 8 * sizeof(T);
  const int lane = lane_index();
  int members = count;
#pragma unroll 1
  for (int layer = 0;; ++layer) {
    int above;
    if (!in.take(delta_width(uint32_t(members)), above)) return false;
    if (above == 0) return true;
    if (layer == kBits || above > members) return false;
    if (!read_list(in, members, above, mask)) return false;
    const int lowest = in.at();
    if (!in.skip(above)) return false;
    int kept = 0;
    for (int begin = 0; begin < members; begin += kLanes) {
      const int i = begin + lane;
      const uint32_t word = mask[begin / 32];
      const bool stays = word >> lane & 1;
      const int number = stays ? layer ? place[i] : i : 0, rank = kept + __popc(below(word, lane));
      meet();
      if (stays) {
        const uint32_t more = 1 + (in.word(lowest + rank) & 1);
        if (layer + low_bits < kBits) value[number] = T(value[number] + (more << (layer + low_bits)));
        place[rank] = uint16_t(number);
      }
      kept += __popc(word);
    }
    meet();
    members = above;
  }
}

// Leaves a mask of the elements that a block changes, and their differences, folded, less 1. False where it is not coherent.
template <class T>
FL_DEVICE bool read_block(DeltaSource &in, int n, uint32_t *mask, uint32_t *other, uint16_t *place, T *value) {
  int count, low_bits;
  if (!in.take(delta_width(uint32_t(n)), count) || !in.take(kDeltaLowBits, low_bits)) return false;
  if (count < 1 || count > n || low_bits < 1 || low_bits > delta_most_low_bits(sizeof(T))) return false;
  DeltaFields lows;
  if (!read_list(in, n, count, mask) || !in.take_fields(count, low_bits, lows)) return false;
  for (int i = lane_index(); i < count; i += kLanes) value[i] = T(in.field(lows, i));
  meet();
  return read_layers(in, count, low_bits, other, place, value) && in.done();
}

// Where the elements of a block come from.
enum DeltaOrigin { kFromBase, kFromBoth, kFromMessage };

// Writes a block, and adds to the digests.
template <class T>
FL_DEVICE void write_block(const DecodeArguments &a, int64_t block, DeltaOrigin origin, const DeltaSource &in,
                           const DeltaTable &table, const uint32_t *mask, const T *value) {
  using Signed = std::make_signed_t<T>;
  constexpr int kEach = kPerChunk<T>, kStep = kEach * kLanes;
  const int n = a.shape.in_block(block);
  const uint8_t *bytes = reinterpret_cast<const uint8_t *>(mask);
  DeltaChecksum of_base, of_result;
  Chunk next_chunk = {};
  for (int begin = -kStep; begin < n; begin += kStep) {
    const int element = begin + lane_index() * kEach, left = n - element;
    const int64_t at = block * kDeltaBlock + element;
    Chunk chunk = next_chunk;  // loaded a step ahead
    next_chunk = load_base<T>(a.base, at + kStep, left - kStep);
    if (begin < 0) continue;
    if (!a.in_place()) of_base.take(table, chunk);
    if (origin == kFromMessage) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int there = left * int(sizeof(T)) - 4 * i;
        chunk.word[i] = there > 0 ? in.word(8 * (element * int(sizeof(T)) + 4 * i)) & low_ones(8 * there) : 0;
      }
    } else if (origin == kFromBoth) {
      uint32_t changed = left > 0 ? bytes[element / 8] >> element % 8 & ((1u << kEach) - 1) : 0, all;
      if (ballot(changed != 0)) {
        const T *from = value + count_before(__popc(changed), lane_index(), all);
        value += all;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (changed >> i & 1)
            put_element<T>(chunk, i, delta_unfolded<T, Signed>(T(*from++ + 1), element_of<T>(chunk, i)));
      }
    }
    of_result.take(table, chunk);
    store_elements(static_cast<T *>(a.out) + at, left, chunk);
  }
  const DeltaEnds ends = DeltaEnds::of<T>(a.shape.block_bytes(block));
  const uint32_t base = a.in_place() ? 0 : ends.digest(of_base, block), result = ends.digest(of_result, block);
  if (lane_index() == 0) {
    atomicAdd(&a.room.state()->base, base);
    atomicAdd(&a.room.state()->result, result);
  }
}

// Whether blocks end where the message does, and may be read.
FL_DEVICE bool fits(const DeltaShape &shape, const DeltaHead &head, int64_t all) {
  if (head.form == kDeltaRaw) return head.rest == 0;
  return head.form == kDeltaCoded && head.rest < shape.too_many() && all == head.rest;
}

template <class T>
__global__ void __launch_bounds__(kThreads, kDeltaGroups) make_kernel(const DecodeArguments a) {
  __shared__ DeltaTable table;
  __shared__ uint32_t words[kWarps][2][kDeltaWords + 2];
  uint32_t *mask = words[threadIdx.x / kLanes][0], *other = words[threadIdx.x / kLanes][1];
  DeltaState *state = a.room.state();
  const DeltaHead head = *a.in.head;
  if (*a.status) return;
  if (warp_index() < a.shape.blocks()) table.fill();
  const uint16_t *index = reinterpret_cast<const uint16_t *>(a.in.data);
  const bool raw = head.form == kDeltaRaw;
#pragma unroll 1
  for (int64_t block = warp_index(); block < a.shape.blocks(); block += warp_count()) {
    const DeltaExtent extent(a.shape, index, block);
    if (!fits(a.shape, head, extent.all)) {
      if (lane_index() == 0) atomicMax(&state->wrong, uint32_t(kUnreadable));
      return;
    }
    if (a.in_place() && state->base != head.base) return;
    const uint32_t entry = raw ? kDeltaWhole : index[block];
    const int64_t begin = raw ? block * kDeltaBlock * a.shape.element_bytes : a.shape.index_bytes() + extent.begin;
    DeltaSource in(a.in.data, a.shape.data_bytes(), begin, a.shape.told_bytes(block, entry));
    DeltaOrigin origin = entry == kDeltaWhole ? kFromMessage : entry ? kFromBoth : kFromBase;
    T *value = a.room.values<T>();
    if (origin == kFromBoth && !read_block(in, a.shape.in_block(block), mask, other, a.room.places(), value)) {
      origin = kFromBase;
      if (lane_index() == 0) atomicMax(&state->wrong, uint32_t(kIncoherent));
    }
    meet();
    write_block(a, block, origin, in, table, mask, value);
    meet();
  }
}

__global__ void __launch_bounds__(kLanes) judge_kernel(const DecodeArguments a) {
  const DeltaState state = *a.room.state();
  const DeltaHead head = *a.in.head;
  if (lane_index() != 0 || *a.status) return;
  if (state.wrong == kUnreadable)
    *a.status = FL_BAD_MESSAGE;
  else if (state.base != head.base)
    *a.status = FL_OTHER_BASE;
  else if (state.wrong || state.result != head.result)
    *a.status = FL_BAD_MESSAGE;
}

template <class T>
cudaError_t launch(const DecodeArguments &a, cudaStream_t stream) {
  const Grid grid(a.room.warps(), 1);
  if (grid.error) return grid.error;
  if (const cudaError_t error = cudaMemsetAsync(a.room.begin, 0, sizeof(DeltaState), stream)) return error;
  if (a.out == a.base) FL_LAUNCH(look_kernel<T>, grid.blocks, kThreads, stream, a);
  FL_LAUNCH(make_kernel<T>, grid.blocks, kThreads, stream, a);
  FL_LAUNCH(judge_kernel, dim3(1), kLanes, stream, a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t delta_decode(const fl_spec &spec, const fl_messages &in, const void *base, void *out, uint8_t *workspace,
                         int32_t *status, cudaStream_t stream) {
  const DeltaShape shape = delta_shape(spec);
  if (const cudaError_t error = cudaMemsetAsync(status, 0, sizeof *status, stream)) return error;
  for (int64_t m = 0; m < in.count && spec.numel > 0; ++m) {
    const int64_t begin = m * shape.raw_bytes();
    const DecodeArguments a{shape,
                            {in, m},
                            base ? static_cast<const uint8_t *>(base) + begin : nullptr,
                            static_cast<uint8_t *>(out) + begin,
                            {workspace, shape},
                            status};
    const auto launch_for = shape.element_bytes == 4 ? launch<uint32_t> : launch<uint16_t>;
    if (const cudaError_t error = launch_for(a, stream)) return error;
  }
  return cudaSuccess;
}

const Decoders delta_decoders = {};

}  // namespace fl

extern "C" {

int fl_delta_decode(const fl_spec *spec, const fl_messages *in, const void *base, void *out, void *workspace,
                    int32_t *status, void *stream) {
  if (const int bad = fl::check_delta(spec, out, base, in)) return bad;
  if (const int bad = fl::check_array(workspace, spec->numel, fl::kPlaneAlignment)) return bad;
  if (const int bad = fl::check_array(status, 1, 4)) return bad;
  return fl::finish(
      fl::delta_decode(*spec, *in, base, out, static_cast<uint8_t *>(workspace), status, fl::as_stream(stream)));
}

}  // extern "C"
