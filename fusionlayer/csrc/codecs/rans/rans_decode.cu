// Decoding of `rans`. What a message says is trusted nowhere: words that it does not have are 0, and a block that contradicts
// itself is NaN.
#include "rans_rows.cuh"

namespace fl {
namespace {

struct DecodeArguments {
  RansShape shape;
  fl_messages in;
  uint32_t dtype;  // of out
  void *out;
};

// What rans_slot makes for each value of a state's low bits.
struct DecoderTable {
  uint32_t slot[kRansTotal];
  uint32_t start[kRansSymbols + 1];

  // By all warps of a thread block together; false where the frequencies do not add up.
  FL_DEVICE bool fill(const uint8_t *frequencies) {
    const int lane = lane_index(), warp = int(threadIdx.x) / kLanes;
    uint32_t frequency[kEight], sum = 0, all;
    load_frequencies(frequencies, lane, frequency);
#pragma unroll
    for (int i = 0; i < kEight; ++i) sum += frequency[i];
    uint32_t next = count_before(sum, lane, all);
    if (all != kRansTotal) return false;
    // One warp writes the starts, and each the slots of its symbols.
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        start[lane * kEight + i] = next;
        next += frequency[i];
      }
      if (lane == kLanes - 1) start[kRansSymbols] = next;
    }
    meet_all();
    for (int s = warp; s < kRansSymbols; s += kWarps) {
      const uint32_t first = start[s], f = start[s + 1] - first;
      for (uint32_t i = uint32_t(lane); i < f; i += kLanes) slot[first + i] = rans_slot(uint32_t(s), i, f);
    }
    return true;
  }
};

// A block's words, as a warp reads them: a ring of them, and what comes next in registers.
struct Ring {
  static constexpr uint32_t kWords = 512, kStep = 2 * kLanes;
  uint32_t pair[kWords / 2];

  FL_DEVICE uint32_t word(uint32_t number) const { return reinterpret_cast<const uint16_t *>(pair)[number % kWords]; }
};

class WordReader {
 public:
  // The words from span.begin to span.end of those that begin at `words`, a multiple of 4 bytes.
  FL_DEVICE WordReader(Ring &ring, const uint8_t *words, const RansShape::Span &span)
      : ring_(ring), next_(span.begin), filled_(span.begin & ~1u), end_(span.end), words_(words), ahead_(load()) {}

  // Before a row: afterwards it has all that the row can take.
  FL_DEVICE void prepare() {
    while (int32_t(filled_ - next_) < kRansRow) {
      meet();
      ring_.pair[(filled_ / 2 + uint32_t(lane_index())) % (Ring::kWords / 2)] = ahead_;
      filled_ += Ring::kStep;
      ahead_ = load();
    }
    meet();
  }

  // The word of a lane if it `takes` one; lanes take theirs in order.
  FL_DEVICE uint32_t take(bool takes, int lane) {
    const uint32_t votes = ballot(takes), word = ring_.word(next_ + uint32_t(__popc(below(votes, lane))));
    next_ += uint32_t(__popc(votes));
    return word;
  }

  FL_DEVICE bool has_ended() const { return next_ == end_; }

 private:
  FL_DEVICE uint32_t load() const {
    const uint32_t number = filled_ + 2 * uint32_t(lane_index());
    return number < end_ ? reinterpret_cast<const uint32_t *>(words_)[number / 2] : 0;
  }

  Ring &ring_;
  uint32_t next_, filled_, end_;  // numbers of words
  const uint8_t *words_;
  uint32_t ahead_;
};

// A row of a block: whole, but for what states carry of it, or of fewer elements.
enum RowKind { kWhole, kCarried, kRagged };

// A block of a message while it is decoded.
template <uint32_t kDtype>
struct BlockReader {
  const DecoderTable &table;
  WordReader words;
  const uint8_t *bytes;
  const uint16_t *low;
  uint32_t state;

  FL_DEVICE BlockReader(const RansShape &shape, const ZipMessage &in, const DecoderTable &all, Ring &ring,
                        const RansShape::Span &span, int64_t block)
      : table(all),
        words(ring, in.data + shape.words(), span),
        bytes(in.data + shape.bytes() + block * kRansBlockBytes),
        low(reinterpret_cast<const uint16_t *>(in.data + shape.low()) + block * kRansBlock),
        state(reinterpret_cast<const uint32_t *>(in.data + shape.states())[block * kRansLanes + lane_index()]) {}

  // What the lane has of the next row, `count` elements.
  template <RowKind kKind>
  FL_DEVICE void next(int row, int count, Words &w) {
    const int lane = lane_index(), element = row + lane * kRansTurns;
    uint32_t byte[kRansTurns] = {}, symbol[kRansTurns];
    if (kKind == kWhole)
      load_bytes(bytes + element, byte);
    else if (kKind == kCarried)
      load_six(bytes + row, lane, byte);
    else
      load_told(bytes + element, count, byte);
    Words lower = {};
    if (kDtype == FL_F32) load_eight(low + element, kKind == kRagged ? count : kRansTurns, lower);
    words.prepare();
#pragma unroll
    for (int turn = 0; turn < kRansTurns; ++turn) {
      const uint32_t slot = table.slot[state & (kRansTotal - 1)], popped = rans_popped(slot, state);
      const bool exists = kKind != kRagged || turn < count, takes = exists && popped < kRansFirst;
      const uint32_t word = words.take(takes, lane);
      symbol[turn] = slot & 0xff;
      state = !exists ? state : takes ? popped << 16 | word : popped;
    }
    if (kKind == kCarried) byte[0] = state & 0xff, byte[1] = state >> 8 & 0xff;
#pragma unroll
    for (int i = 0; i < kRansTurns; ++i) {
      w.word[i] = rans_half(kDtype, symbol[i], byte[i]);
      if (kDtype == FL_F32) w.word[i] = w.word[i] << 16 | lower.word[i];
    }
  }
};

// Calls sink(row, count, words) for the rows of a block, of which the lane has `count` elements; false where the block
// contradicts itself.
template <uint32_t kDtype, class Sink>
FL_DEVICE bool decode_block(const RansShape &shape, const ZipMessage &in, const DecoderTable &table, Ring &ring,
                            int64_t block, const Sink &sink) {
  const int n = shape.in_block(block);
  const bool whole = n == kRansBlock;
  const RansShape::Span span = shape.span(*in.head, in.data, block);
  if (!span.exists) return false;
  BlockReader<kDtype> reader(shape, in, table, ring, span, block);
  Words w;
  int row = 0;
  for (; row + kRansRow <= n - whole; row += kRansRow) {
    reader.template next<kWhole>(row, kRansTurns, w);
    sink(row, kRansTurns, w);
  }
  const int count = n - row - lane_index() * kRansTurns;
  if (whole)
    reader.template next<kCarried>(row, count, w);
  else if (row < n)
    reader.template next<kRagged>(row, count, w);
  if (row < n) sink(row, count, w);
  return ballot(is_rans_first(reader.state, whole)) == ~0u && reader.words.has_ended();
}

template <uint32_t kDtype, class Sink>
FL_DEVICE void copy_block(const RansShape &shape, const ZipMessage &in, int64_t block, const Sink &sink) {
  const int n = shape.in_block(block);
  for (int row = 0; row < n; row += kRansRow) {
    const int element = row + lane_index() * kRansTurns;
    Words w;
    load_words(kDtype, in.data, block * kRansBlock + element, n - element, w);
    sink(row, n - element, w);
  }
}

// In place of what a lane has of a block from its element `first` on, `left` elements before the block's end.
FL_DEVICE void store_nan(const DecodeArguments &a, int64_t first, int left) {
  Words w;
#pragma unroll
  for (int i = 0; i < kEight; ++i) w.word[i] = narrowed(a.dtype, bits_float(kF32Nan));
  for (; left > 0; left -= kRansRow, first += kRansRow) store_words(a.dtype, a.out, first, left, w);
}

// With eight blocks on a multiprocessor no value leaves the registers.
template <uint32_t kDtype>
__global__ void __launch_bounds__(kThreads, 8) decode_kernel(const DecodeArguments a) {
  __shared__ DecoderTable table;
  __shared__ Ring rings[kWarps];
  Ring &ring = rings[threadIdx.x / kLanes];
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y) {
    const ZipMessage in = zip_message(a.in, m);
    const bool raw = in.head->form == kZipRaw;
    bool coherent = a.shape.coded(*in.head);
    if (coherent) {
      meet_all();
      coherent = table.fill(in.data);
      meet_all();
    }
    for (int64_t block = warp_index(); block < a.shape.blocks(); block += warp_count()) {
      const int64_t first = m * a.shape.numel + block * kRansBlock + lane_index() * kEight;
      const auto sink = [&](int row, int count, Words &w) {
        if (a.dtype != kDtype) {
#pragma unroll
          for (int i = 0; i < kEight; ++i) w.word[i] = narrowed(a.dtype, widened(kDtype, w.word[i]));
        }
        store_words(a.dtype, a.out, first + row, count, w);
      };
      if (raw)
        copy_block<kDtype>(a.shape, in, block, sink);
      else if (!coherent || !decode_block<kDtype>(a.shape, in, table, ring, block, sink))
        store_nan(a, first, a.shape.in_block(block) - lane_index() * kEight);
    }
  }
}

template <uint32_t kDtype>
cudaError_t decode(const DecodeArguments &a, cudaStream_t stream) {
  return launch_over(Grid(a.shape.blocks(), a.in.count), decode_kernel<kDtype>, a, stream);
}

}  // namespace

cudaError_t rans_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  const DecodeArguments a{rans_shape(spec), in, spec.dtype, out};
  if (a.shape.dtype == FL_F32) return decode<FL_F32>(a, stream);
  return a.shape.dtype == FL_BF16 ? decode<FL_BF16>(a, stream) : decode<FL_F16>(a, stream);
}

const Decoders rans_decoders = {rans_decode, nullptr};

}  // namespace fl
