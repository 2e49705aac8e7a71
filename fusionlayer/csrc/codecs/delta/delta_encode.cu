// Encoding of `delta`: write each block's bytes where nobody minds how many there are; then deliver them, as where they go
// and whether the message is coded at all is known when all are counted. Bytes do not depend on the order of warps.
#include "checks.h"
#include "delta_bits.cuh"

namespace fl {
namespace {

struct EncodeArguments {
  DeltaShape shape;
  const void *x;
  const void *base;  // zeros where there is none
  DeltaMessage out;
  DeltaRoom room;
};

// Leaves a mask of what a block has changed, and the differences, folded, less 1; returns how many. Adds the digests.
template <class T>
FL_DEVICE int find_changes(const EncodeArguments &a, int64_t block, const DeltaTable &table, uint32_t *mask, T *value) {
  using Signed = std::make_signed_t<T>;
  constexpr int kEach = kPerChunk<T>, kStep = kEach * kLanes;
  const T *x = static_cast<const T *>(a.x);
  const int n = a.shape.in_block(block), lane = lane_index();
  uint8_t *bytes = reinterpret_cast<uint8_t *>(mask);
  DeltaChecksum of_x, of_base;
  Chunk next_after = {}, next_before = {};
  int count = 0;
  for (int begin = -kStep; begin < n; begin += kStep) {
    const int element = begin + lane * kEach, next = element + kStep;
    const int64_t at = block * kDeltaBlock + next;
    const Chunk after = next_after, before = next_before;  // loaded a step ahead
    next_after = load_elements(x + at, n - next);
    next_before = load_base<T>(a.base, at, n - next);
    if (begin < 0) continue;
    of_x.take(table, after);
    of_base.take(table, before);
    uint32_t changed = 0, all;
#pragma unroll
    for (int i = 0; i < kEach; ++i) changed |= uint32_t(element_of<T>(after, i) != element_of<T>(before, i)) << i;
    const bool any = ballot(changed != 0);
    if (kEach == 8) {
      bytes[element / 8] = uint8_t(changed);
    } else {
      const uint32_t neighbours = shuffle_xor(changed, 1);
      if (lane % 2 == 0) bytes[element / 8] = uint8_t(changed | neighbours << 4);
    }
    if (!any) continue;
    T *to = value + count + count_before(__popc(changed), lane, all);
    count += int(all);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (changed >> i & 1) *to++ = T(delta_folded<T, Signed>(element_of<T>(after, i), element_of<T>(before, i)) - 1);
  }
  meet();
  const DeltaEnds ends = DeltaEnds::of<T>(a.shape.block_bytes(block));
  const uint32_t result = ends.digest(of_x, block), told = ends.digest(of_base, block);
  if (lane == 0) {
    a.room.of_result()[block] = result;
    a.room.of_base()[block] = told;
  }
  return count;
}

template <class T>
FL_DEVICE int low_bits_for(const T *value, int count) {
  const int samples = count < kDeltaSamples ? count : kDeltaSamples, stride = count / samples;
  return delta_best_low_bits(delta_most_low_bits(sizeof(T)), [&](int low_bits) {
    uint32_t bits = 0, all;
    for (int i = lane_index(); i < samples; i += kLanes) bits += delta_cost(value[i * stride], low_bits);
    count_before(bits, lane_index(), all);
    return int(all);
  });
}

// Splits `count` numbers of a layer: a mask of those above 1, which move to the front; returns how many. In the first layer
// numbers are what is above the low bits; in others they are halved, and what is lost is another mask.
template <class T>
FL_DEVICE int climb(T *number, int count, bool first, int low_bits, uint32_t *mask, uint32_t *lowest) {
  const int lane = lane_index();
  int kept = 0;
  for (int begin = 0; begin < count; begin += kLanes) {
    T v = begin + lane < count ? number[begin + lane] : T(0);
    const uint32_t odd = ballot(v & 1);
    v = first ? T(v >> low_bits) : T((v >> 1) - 1);
    const bool stays = begin + lane < count && v > 0;
    const uint32_t above = ballot(stays);
    if (lane == 0) {
      mask[begin / 32] = above;
      if (!first) lowest[begin / 32] = odd;
    }
    if (stays) number[kept + __popc(below(above, lane))] = T(v + 1);
    kept += __popc(above);
  }
  meet();
  return kept;
}

// Returns the entry of the index.
template <class T>
FL_DEVICE uint32_t write_block(const EncodeArguments &a, int64_t block, T *value, int count, uint32_t *mask,
                               uint32_t *other) {
  const int n = a.shape.in_block(block), low_bits = low_bits_for(value, count);
  uint16_t *gaps = a.room.places();
  DeltaSink out(a.room.block(block), a.shape.too_many_bits(n));
  out.put_number(uint32_t(count), delta_width(uint32_t(n)));
  out.put_number(uint32_t(low_bits), kDeltaLowBits);
  bool first = true;
  for (int members = n, named = count; named > 0; first = false) {
    write_list(out, mask, other, gaps, members, named);
    members = named;
    if (first) out.put_fields(value, count, low_bits);
    if (out.full()) return kDeltaWhole;
    named = climb(value, members, first, low_bits, mask, other);
    if (!first) out.put_mask(other, members);
    out.put_number(uint32_t(named), delta_width(uint32_t(members)));
  }
  return 8 * out.bytes() < a.shape.too_many_bits(n) ? uint32_t(out.bytes()) : kDeltaWhole;
}

template <class T>
__global__ void __launch_bounds__(kThreads, kDeltaGroups) write_kernel(const EncodeArguments a) {
  __shared__ DeltaTable table;
  __shared__ uint32_t words[kWarps][2][kDeltaWords + 2];
  uint32_t *mask = words[threadIdx.x / kLanes][0], *other = words[threadIdx.x / kLanes][1];
  T *value = a.room.values<T>();
  if (warp_index() < a.shape.blocks()) table.fill();
#pragma unroll 1
  for (int64_t block = warp_index(); block < a.shape.blocks(); block += warp_count()) {
    const int count = find_changes(a, block, table, mask, value);
    const uint32_t entry = count ? write_block(a, block, value, count, mask, other) : 0;
    if (lane_index() == 0) a.room.entries()[block] = entry;
  }
}

// Copies bytes, most of them four at a time.
FL_DEVICE void copy_bytes(uint8_t *to, const uint8_t *from, int n) {
  const int lane = lane_index();
  int done = 0;
  if (is_aligned(to, 16) && is_aligned(from, 16)) {
    done = n / 16 * 16;
    for (int i = 16 * lane; i < done; i += 16 * kLanes) store_chunk(to + i, load_chunk(from + i));
  } else if (is_aligned(from, 4)) {
    // Words of the target, of two words of the source; all that is touched is there.
    const int head = int(-reinterpret_cast<uintptr_t>(to) % 4), words = n - head >= 8 ? (n - head - 4) / 4 : 0;
    const uint32_t *source = reinterpret_cast<const uint32_t *>(from);
    uint32_t *target = reinterpret_cast<uint32_t *>(to + head);
    for (int i = lane; i < words; i += kLanes) target[i] = word_at(source, 8 * (head + 4 * i));
    if (words && lane < head) to[lane] = from[lane];
    if (words) done = head + 4 * words;
  }
  for (int i = done + lane; i < n; i += kLanes) to[i] = from[i];
}

FL_DEVICE void write_head(const EncodeArguments &a, bool raw, int64_t rest) {
  int64_t base = 0, result = 0;
  for (int64_t b = lane_index(); b < a.shape.blocks(); b += kLanes) {
    base += a.room.of_base()[b];
    result += a.room.of_result()[b];
  }
  base = sum_over_lanes(base);
  result = sum_over_lanes(result);
  const uint32_t form = raw ? kDeltaRaw : kDeltaCoded;
  if (lane_index() == 0) *a.out.head = {form, raw ? 0 : uint32_t(rest), uint32_t(base), uint32_t(result)};
}

__global__ void __launch_bounds__(kThreads, kDeltaGroups) deliver_kernel(const EncodeArguments a) {
#pragma unroll 1
  for (int64_t block = warp_index(); block < a.shape.blocks(); block += warp_count()) {
    const uint8_t *x = static_cast<const uint8_t *>(a.x) + block * kDeltaBlock * a.shape.element_bytes;
    const uint32_t entry = a.room.entries()[block];
    const DeltaExtent extent(a.shape, a.room.entries(), block);
    const bool raw = extent.all >= a.shape.too_many();
    if (block == 0) write_head(a, raw, extent.all);
    if (raw) {
      copy_bytes(a.out.data + block * kDeltaBlock * a.shape.element_bytes, x, a.shape.block_bytes(block));
      continue;
    }
    if (lane_index() == 0) reinterpret_cast<uint16_t *>(a.out.data)[block] = uint16_t(entry);
    const uint8_t *from = entry == kDeltaWhole ? x : reinterpret_cast<const uint8_t *>(a.room.block(block));
    copy_bytes(a.out.data + a.shape.index_bytes() + extent.begin, from, a.shape.told_bytes(block, entry));
  }
}

cudaError_t launch(const EncodeArguments &a, cudaStream_t stream) {
  const Grid grid(a.room.warps(), 1);
  if (grid.error) return grid.error;
  const auto write = a.shape.element_bytes == 4 ? write_kernel<uint32_t> : write_kernel<uint16_t>;
  FL_LAUNCH(write, grid.blocks, kThreads, stream, a);
  FL_LAUNCH(deliver_kernel, grid.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

}  // namespace

int64_t delta_workspace(int64_t numel, int element_bytes) {
  return numel ? DeltaRoom{nullptr, {numel, element_bytes}}.bytes() : 0;
}

cudaError_t delta_encode(const fl_spec &spec, const void *x, const void *base, const fl_messages &out,
                         uint8_t *workspace, cudaStream_t stream) {
  const DeltaShape shape = delta_shape(spec);
  for (int64_t m = 0; m < out.count; ++m) {
    const int64_t begin = m * shape.raw_bytes();
    const EncodeArguments a{shape,
                            static_cast<const uint8_t *>(x) + begin,
                            base ? static_cast<const uint8_t *>(base) + begin : nullptr,
                            {out, m},
                            {workspace, shape}};
    if (const cudaError_t error = launch(a, stream)) return error;
  }
  return cudaSuccess;
}

const Encoders delta_encoders = {};

}  // namespace fl

extern "C" {

int fl_delta_encode(const fl_spec *spec, const void *x, const void *base, const fl_messages *out, void *workspace,
                    void *stream) {
  if (const int bad = fl::check_delta(spec, x, base, out)) return bad;
  if (const int bad = fl::check_array(workspace, spec->numel, fl::kPlaneAlignment)) return bad;
  if (spec->numel == 0) return FL_OK;
  return fl::finish(fl::delta_encode(*spec, x, base, *out, static_cast<uint8_t *>(workspace), fl::as_stream(stream)));
}

}  // extern "C"
