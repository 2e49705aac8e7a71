// Encoding of `rans`: count (symbols), settle (frequencies), measure (each block's words), place (where they end, and whether
// the message is coded at all), write. Until the last kernel a message's own room holds what is not known yet: counts of
// symbols where the message begins, then words of blocks where its bytes will be.
#include "rans_rows.cuh"

namespace fl {
namespace {

constexpr int kOwnSymbols = kRansSymbols / kLanes;

struct EncodeArguments {
  RansShape shape;
  const void *x;
  fl_messages out;

  FL_DEVICE const void *of(int64_t message) const { return byte_offset(x, message * shape.raw_bytes()); }
};

FL_DEVICE uint32_t *symbol_counts(const ZipMessage &out) { return reinterpret_cast<uint32_t *>(out.data); }

FL_DEVICE uint32_t *word_counts(const RansShape &shape, const ZipMessage &out) {
  return reinterpret_cast<uint32_t *>(out.data + shape.bytes());
}

__global__ void __launch_bounds__(kThreads) count_kernel(const EncodeArguments a) {
  __shared__ uint32_t counts[kWarps][kRansSymbols];
  uint32_t *own = counts[threadIdx.x / kLanes];
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    for (int s = lane; s < kRansSymbols; s += kLanes) own[s] = 0;
    meet();
    for (int64_t block = warp_index(); block < a.shape.blocks(); block += warp_count()) {
      const int n = a.shape.in_block(block);
      for (int row = 0; row < n; row += kRansRow) {
        const int count = n - row - lane * kRansTurns;
        Words w;
        load_words(a.shape.dtype, a.of(m), block * kRansBlock + row + lane * kRansTurns, count, w);
        with_count(count, [&](auto whole) {
#pragma unroll
          for (int i = 0; i < kRansTurns; ++i)
            if (decltype(whole)::value || i < count)
              atomicAdd(&own[rans_symbol(a.shape.dtype, half_of(a.shape.dtype, w.word[i]))], 1u);
        });
      }
    }
    meet();
    uint32_t *all = symbol_counts(zip_message(a.out, m));
    for (int s = lane; s < kRansSymbols; s += kLanes)
      if (own[s]) atomicAdd(&all[s], own[s]);
    meet();
  }
}

// The largest of all lanes' numbers.
FL_DEVICE int64_t largest_of(int64_t v) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const int64_t other = shuffle_xor(v, mask);
    v = other > v ? other : v;
  }
  return v;
}

// rans_frequencies of codecs/rans/rans.h by a warp for each message: a lane has eight symbols in a row.
__global__ void __launch_bounds__(kThreads) settle_kernel(const EncodeArguments a) {
  static_assert(kOwnSymbols == 8, "16 bytes of frequencies for each lane");
  for (int64_t m = warp_index(); m < a.out.count; m += warp_count()) {
    const ZipMessage out = zip_message(a.out, m);
    const int first = lane_index() * kOwnSymbols;
    RansShare share[kOwnSymbols];
    int64_t left = 0;
#pragma unroll
    for (int i = 0; i < kOwnSymbols; ++i) {
      share[i] = rans_share(symbol_counts(out)[first + i], a.shape.numel);
      left -= share[i].frequency;
    }
    left = kRansTotal + sum_over_lanes(left);
    while (left != 0) {
      const int step = left > 0 ? 1 : -1;
      const auto rank = [&](int i) {
        return (step > 0 ? share[i].lost : int64_t(share[i].frequency)) * kRansSymbols + (kRansSymbols - 1 - first - i);
      };
      int64_t best = rank(0);
#pragma unroll
      for (int i = 1; i < kOwnSymbols; ++i) best = rank(i) > best ? rank(i) : best;
      best = largest_of(best);
#pragma unroll
      for (int i = 0; i < kOwnSymbols; ++i)
        if (rank(i) == best) {
          share[i].frequency += uint32_t(step);
          share[i].lost = -1;
        }
      left -= step;
    }
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = share[2 * i].frequency | share[2 * i + 1].frequency << 16;
    store_chunk(out.data + 2 * first, chunk);
  }
}

// What encoding needs of each symbol, by all warps of a thread block together.
FL_DEVICE void fill(RansSymbol *symbols, const uint8_t *frequencies) {
  const int lane = lane_index(), warp = int(threadIdx.x) / kLanes;
  uint32_t frequency[kOwnSymbols], sum = 0, all;
  load_frequencies(frequencies, lane, frequency);
#pragma unroll
  for (int i = 0; i < kOwnSymbols; ++i) sum += frequency[i];
  uint32_t start = count_before(sum, lane, all);
#pragma unroll
  for (int i = 0; i < kOwnSymbols; ++i) {
    if (i / (kOwnSymbols / kWarps) == warp) symbols[lane * kOwnSymbols + i] = rans_entry(frequency[i], start);
    start += frequency[i];
  }
}

// The words that the states of a block leave, from the last one on. Without kWrite they are only counted.
template <bool kWrite>
struct WordWriter {
  uint16_t *to;
  uint32_t taken;

  FL_DEVICE void put(bool leaves, uint32_t state, int lane) {
    const uint32_t votes = ballot(leaves), count = uint32_t(__popc(votes));
    if (kWrite) {
      to -= count;
      if (leaves) to[__popc(below(votes, lane))] = uint16_t(state);
    } else {
      taken += count;
    }
  }
};

// Encodes a lane's symbols of a row, the last one first, of which all exist or `count`.
template <bool kWhole, uint32_t kDtype, bool kWrite>
FL_DEVICE void encode_row(const RansSymbol *symbols, const Words &w, int count, int lane, uint32_t &state,
                          WordWriter<kWrite> &words) {
#pragma unroll
  for (int turn = kRansTurns - 1; turn >= 0; --turn) {
    const RansSymbol symbol = symbols[rans_symbol(kDtype, half_of(kDtype, w.word[turn]))];
    const bool exists = kWhole || turn < count, full = exists && rans_full(symbol, state);
    words.put(full, state, lane);
    const uint32_t pushed = rans_pushed(symbol, full ? state >> 16 : state);
    state = exists ? pushed : state;
  }
}

// Writes what a lane has of a row but the symbols, and but what states carry of a whole block's last row.
template <uint32_t kDtype>
FL_DEVICE void store_rest(const RansShape &shape, const ZipMessage &out, int64_t block, int row, int count,
                          bool carried, const Words &w) {
  uint32_t byte[kRansTurns];
  Words low;
#pragma unroll
  for (int i = 0; i < kRansTurns; ++i) {
    byte[i] = rans_byte(kDtype, half_of(kDtype, w.word[i]));
    low.word[i] = w.word[i] & 0xffff;
  }
  uint8_t *bytes = out.data + shape.bytes() + block * kRansBlockBytes;
  const int element = row + lane_index() * kRansTurns;
  if (carried)
    store_six(bytes + row, lane_index(), byte);
  else
    store_told(bytes + element, count, byte);
  if (kDtype == FL_F32)
    store_eight(reinterpret_cast<uint16_t *>(out.data + shape.low()) + block * kRansBlock + element, count, low);
}

// Encodes a block and leaves the states. Without kWrite it only finds how many words there are.
template <uint32_t kDtype, bool kWrite>
FL_DEVICE void encode_block(const RansShape &shape, const RansSymbol *symbols, const void *x, const ZipMessage &out,
                            int64_t block) {
  const int lane = lane_index(), n = shape.in_block(block);
  const int64_t first = block * kRansBlock + lane * kRansTurns;
  WordWriter<kWrite> words = {reinterpret_cast<uint16_t *>(out.data + shape.words()), 0};
  if (kWrite) words.to += reinterpret_cast<const uint32_t *>(out.data + RansShape::ends())[block];
  uint32_t state = kRansFirst;
  int row = (n - 1) / kRansRow * kRansRow, count = n - row - lane * kRansTurns;
  Words ahead;
  load_words(kDtype, x, first + row, count, ahead);
  if (n == kRansBlock)
    state = rans_first(rans_byte(kDtype, half_of(kDtype, ahead.word[0])),
                       rans_byte(kDtype, half_of(kDtype, ahead.word[1])));
  if (n % kRansRow) {
    if (kWrite) store_rest<kDtype>(shape, out, block, row, count, false, ahead);
    encode_row<false, kDtype>(symbols, ahead, count, lane, state, words);
    row -= kRansRow;
    if (row >= 0) load_words(kDtype, x, first + row, kRansTurns, ahead);
  }
  for (; row >= 0; row -= kRansRow) {
    const Words w = ahead;
    if (row) load_words(kDtype, x, first + row - kRansRow, kRansTurns, ahead);
    if (kWrite) store_rest<kDtype>(shape, out, block, row, kRansTurns, row == kRansBlock - kRansRow, w);
    encode_row<true, kDtype>(symbols, w, kRansTurns, lane, state, words);
  }
  if (kWrite)
    reinterpret_cast<uint32_t *>(out.data + shape.states())[block * kRansLanes + lane] = state;
  else if (lane == 0)
    word_counts(shape, out)[block] = words.taken;
}

template <uint32_t kDtype>
FL_DEVICE void copy_block(const RansShape &shape, const void *x, const ZipMessage &out, int64_t block) {
  const int n = shape.in_block(block);
  for (int row = 0; row < n; row += kRansRow) {
    const int count = n - row - lane_index() * kRansTurns;
    const int64_t at = block * kRansBlock + row + lane_index() * kRansTurns;
    Words w;
    load_words(kDtype, x, at, count, w);
    store_words(kDtype, out.data, at, count, w);
  }
}

template <uint32_t kDtype, bool kWrite>
__global__ void __launch_bounds__(kThreads) encode_kernel(const EncodeArguments a) {
  __shared__ RansSymbol symbols[kRansSymbols];
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    const ZipMessage out = zip_message(a.out, m);
    const bool coded = !kWrite || out.head->form == kZipCoded;
    if (coded) {
      meet_all();
      fill(symbols, out.data);
      meet_all();
    }
    for (int64_t block = warp_index(); block < a.shape.blocks(); block += warp_count())
      if (coded)
        encode_block<kDtype, kWrite>(a.shape, symbols, a.of(m), out, block);
      else
        copy_block<kDtype>(a.shape, a.of(m), out, block);
  }
}

FL_DEVICE void clear(const ZipMessage &out, int64_t begin, int64_t end) {
  for (int64_t i = begin + lane_index(); i < end; i += kLanes) out.data[i] = 0;
}

// A warp adds up for 32 blocks what comes before them.
__global__ void __launch_bounds__(kThreads) place_kernel(const EncodeArguments a) {
  const RansShape &shape = a.shape;
  const int lane = lane_index();
  const int64_t blocks = shape.blocks(), groups = (blocks + kLanes - 1) / kLanes;
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t group = warp_index(); group < groups; group += warp_count()) {
      const ZipMessage out = zip_message(a.out, m);
      const uint32_t *counts = word_counts(shape, out);
      const int64_t block = group * kLanes + lane;
      int64_t before = 0;
      for (int64_t i = lane; i < group * kLanes; i += kLanes) before += counts[i];
      const uint32_t mine = block < blocks ? counts[block] : 0;
      uint32_t all;
      const uint32_t within = count_before(mine, lane, all);
      before = sum_over_lanes(before);
      if (block < blocks)
        reinterpret_cast<uint32_t *>(out.data + RansShape::ends())[block] = uint32_t(before) + within + mine;
      if (group != groups - 1) continue;
      const int64_t used = 2 * (before + all);
      const bool coded = used < shape.too_many();
      if (lane == 0) *out.head = {uint32_t(coded ? kZipCoded : kZipRaw), coded ? uint32_t(used) : 0, {0, 0}};
      if (!coded) continue;
      clear(out, RansShape::ends() + 4 * blocks, shape.states());
      clear(out, shape.bytes() + shape.told_bytes(), shape.low());
      clear(out, shape.low() + shape.low_bytes() * shape.numel, shape.words());
    }
}

// Zeros at the beginning of a plane of all messages.
cudaError_t clear_plane(const fl_messages &out, int plane, size_t bytes, cudaStream_t stream) {
  const size_t stride = out.count > 1 ? size_t(out.stride) : bytes;
  return cudaMemset2DAsync(out.plane[plane], stride, 0, bytes, size_t(out.count), stream);
}

template <uint32_t kDtype>
cudaError_t encode(const EncodeArguments &a, cudaStream_t stream) {
  const int64_t groups = (a.shape.blocks() + kLanes - 1) / kLanes;
  const Grid by_block(a.shape.blocks(), a.out.count), by_group(groups, a.out.count), by_message(a.out.count, 1);
  if (by_block.error || by_group.error || by_message.error)
    return by_block.error ? by_block.error : by_group.error ? by_group.error : by_message.error;
  if (a.shape.too_many() > 0) {
    const cudaError_t error = clear_plane(a.out, 1, kRansSymbols * sizeof(uint32_t), stream);
    if (error) return error;
    FL_LAUNCH(count_kernel, by_block.blocks, kThreads, stream, a);
    FL_LAUNCH(settle_kernel, by_message.blocks, kThreads, stream, a);
    FL_LAUNCH((encode_kernel<kDtype, false>), by_block.blocks, kThreads, stream, a);
    FL_LAUNCH(place_kernel, by_group.blocks, kThreads, stream, a);
  } else {
    static_assert(kZipRaw == 0, "zeros are a head");
    const cudaError_t error = clear_plane(a.out, 0, sizeof(ZipHead), stream);
    if (error) return error;
  }
  FL_LAUNCH((encode_kernel<kDtype, true>), by_block.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t rans_encode(const fl_spec &spec, const void *x, float *, const fl_messages &out, cudaStream_t stream) {
  const EncodeArguments a{rans_shape(spec), x, out};
  if (a.shape.dtype == FL_F32) return encode<FL_F32>(a, stream);
  return a.shape.dtype == FL_BF16 ? encode<FL_BF16>(a, stream) : encode<FL_F16>(a, stream);
}

const Encoders rans_encoders = {rans_encode, nullptr, nullptr};

}  // namespace fl
