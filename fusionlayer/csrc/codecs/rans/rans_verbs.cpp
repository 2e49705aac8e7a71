// FL_RANS for the CPU: one body for all instruction sets. Messages are encoded side by side, spans of blocks decoded so.
#include "rans_verbs.h"

#include <atomic>
#include <cstring>
#include <type_traits>

#include "arguments.h"
#include "cpu/float_environment.h"
#include "cpu/thread_pool.h"
#include "rans.h"

namespace fl {
namespace {

constexpr int kTile = 2048;  // elements that are put together at a time; a multiple of a row
constexpr int kSpan = 2;     // blocks that are decoded with a table that is made once

uint16_t load_u16(const uint8_t *p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// Elements of one type as bits, and as f32.
template <uint32_t kDtype>
struct Element {
  static constexpr int kBytes = 2;
  static uint32_t half(const uint8_t *p) { return load_u16(p); }
  static void join(uint32_t half, uint32_t, uint8_t *p) {
    const uint16_t v = uint16_t(half);
    std::memcpy(p, &v, 2);
  }
  static float load(const uint8_t *p) { return kDtype == FL_BF16 ? bf16_to_f32(load_u16(p)) : f16_to_f32(load_u16(p)); }
  static void store(float f, uint8_t *p) {
    const uint16_t v = kDtype == FL_BF16 ? f32_to_bf16(f) : f32_to_f16(f);
    std::memcpy(p, &v, 2);
  }
};

template <>
struct Element<FL_F32> {
  static constexpr int kBytes = 4;
  static uint32_t half(const uint8_t *p) { return load_u16(p + 2); }
  static void join(uint32_t half, uint32_t low, uint8_t *p) {
    const uint32_t v = half << 16 | low;
    std::memcpy(p, &v, 4);
  }
  static float load(const uint8_t *p) {
    float f;
    std::memcpy(&f, p, 4);
    return f;
  }
  static void store(float f, uint8_t *p) {
    f = canonical(f);
    std::memcpy(p, &f, 4);
  }
};

template <class Body>
void with_element(uint32_t dtype, const Body &body) {
  if (dtype == FL_BF16) return body(Element<FL_BF16>{});
  if (dtype == FL_F16) return body(Element<FL_F16>{});
  body(Element<FL_F32>{});
}

// Encoding ------------------------------------------------------------------------------------------------------------

class Encoder {
 public:
  explicit Encoder(const uint16_t *frequencies) {
    uint32_t start = 0;
    for (int s = 0; s < kRansSymbols; ++s) {
      entries_[s] = rans_entry(frequencies[s], start);
      start += frequencies[s];
    }
  }

  // What the first states become with n symbols, and how many words they take; these end at `end`.
  int64_t run(const uint8_t *symbols, int n, uint32_t *states, uint16_t *end) const {
    uint16_t *to = end;
    int row = n / kRansRow * kRansRow;
    for (int turn = kRansTurns - 1; turn >= 0; --turn)
      for (int lane = kRansLanes - 1; lane >= 0; --lane)
        if (const int i = row + lane * kRansTurns + turn; i < n) push(symbols[i], states[lane], to);
    while (row > 0) {
      row -= kRansRow;
      for (int turn = kRansTurns - 1; turn >= 0; --turn)
        for (int lane = kRansLanes - 1; lane >= 0; --lane)
          push(symbols[row + lane * kRansTurns + turn], states[lane], to);
    }
    return end - to;
  }

 private:
  void push(uint8_t symbol, uint32_t &state, uint16_t *&to) const {
    const RansSymbol &entry = entries_[symbol];
    const bool full = rans_full(entry, state);
    to[-1] = uint16_t(state);
    to -= full;
    state = rans_pushed(entry, full ? state >> 16 : state);
  }

  RansSymbol entries_[kRansSymbols];
};

template <class E>
void count_symbols(const uint8_t *x, int64_t n, uint32_t dtype, int64_t *counts) {
  constexpr int kBanks = 4;  // neighbours are often alike, and would wait for each other
  int64_t banks[kBanks][kRansSymbols] = {};
  for (int64_t i = 0; i < n; ++i) ++banks[i % kBanks][rans_symbol(dtype, E::half(x + i * E::kBytes))];
  for (int s = 0; s < kRansSymbols; ++s) counts[s] = banks[0][s] + banks[1][s] + banks[2][s] + banks[3][s];
}

// The states that a block begins with. Of its n bytes those that they carry are taken out; returns how many are left.
int begin_states(uint8_t *bytes, int n, uint32_t *states) {
  const bool whole = n == kRansBlock;
  uint8_t *row = bytes + kRansBlock - kRansRow, *to = row;
  for (int lane = 0; lane < kRansLanes; ++lane, row += kRansTurns) {
    states[lane] = whole ? rans_first(row[0], row[1]) : kRansFirst;
    for (int i = kRansCarried; whole && i < kRansTurns; ++i) *to++ = row[i];
  }
  return whole ? kRansBlockBytes : n;
}

// False where the message would not be shorter than its elements.
template <class E>
bool encode_coded(const RansShape &shape, const uint8_t *x, const ZipMessage &out) {
  const int64_t too_many = shape.too_many();
  if (too_many == 0) return false;
  int64_t counts[kRansSymbols];
  count_symbols<E>(x, shape.numel, shape.dtype, counts);
  uint16_t frequencies[kRansSymbols];
  rans_frequencies(counts, shape.numel, frequencies);
  const Encoder encoder(frequencies);
  uint8_t symbols[kRansBlock], bytes[kRansBlock];
  uint16_t words[kRansBlock + 1];  // and room for a word that is not kept
  int64_t used = 0;
  for (int64_t block = 0; block < shape.blocks(); ++block) {
    const int n = shape.in_block(block);
    const int64_t first = block * kRansBlock;
    const uint8_t *from = x + first * E::kBytes;
    uint8_t *low = out.data + shape.low() + 2 * first;
    for (int i = 0; i < n; ++i) {
      const uint32_t half = E::half(from + i * E::kBytes);
      symbols[i] = uint8_t(rans_symbol(shape.dtype, half));
      bytes[i] = uint8_t(rans_byte(shape.dtype, half));
      if (E::kBytes == 4) std::memcpy(low + 2 * i, from + 4 * i, 2);
    }
    uint32_t states[kRansLanes];
    const int told = begin_states(bytes, n, states);
    std::memcpy(out.data + shape.bytes() + kRansBlockBytes * block, bytes, size_t(told));
    const int64_t count = encoder.run(symbols, n, states, words + kRansBlock + 1);
    if (used + 2 * count >= too_many) return false;
    std::memcpy(out.data + shape.words() + used, words + kRansBlock + 1 - count, size_t(2 * count));
    used += 2 * count;
    const uint32_t end = uint32_t(used / 2);
    std::memcpy(out.data + RansShape::ends() + 4 * block, &end, 4);
    std::memcpy(out.data + shape.states() + sizeof states * size_t(block), states, sizeof states);
  }
  std::memcpy(out.data, frequencies, sizeof frequencies);
  const auto clear = [&](int64_t begin, int64_t end) { std::memset(out.data + begin, 0, size_t(end - begin)); };
  clear(RansShape::ends() + 4 * shape.blocks(), shape.states());
  clear(shape.bytes() + shape.told_bytes(), shape.low());
  clear(shape.low() + shape.low_bytes() * shape.numel, shape.words());
  *out.head = {kZipCoded, uint32_t(used), {0, 0}};
  return true;
}

void encode_message(const RansShape &shape, const uint8_t *x, const ZipMessage &out) {
  bool coded = false;
  with_element(shape.dtype, [&](auto element) { coded = encode_coded<decltype(element)>(shape, x, out); });
  if (coded) return;
  *out.head = {kZipRaw, 0, {0, 0}};
  std::memcpy(out.data, x, size_t(shape.raw_bytes()));
}

// Decoding ------------------------------------------------------------------------------------------------------------

// What rans_slot makes for each value of a state's low bits.
class DecoderTable {
 public:
  // False where the frequencies do not add up.
  bool fill(const uint8_t *frequencies) {
    uint32_t start = 0;
    for (int s = 0; s < kRansSymbols; ++s) {
      const uint32_t f = load_u16(frequencies + 2 * s);
      if (f > kRansTotal - start) return false;
      for (uint32_t i = 0; i < f; ++i) slots_[start + i] = rans_slot(uint32_t(s), i, f);
      start += f;
    }
    return start == kRansTotal;
  }

  uint32_t operator[](uint32_t slot) const { return slots_[slot]; }

 private:
  uint32_t slots_[kRansTotal];
};

// A block's symbols, tile by tile.
class Decoder {
 public:
  Decoder(const DecoderTable &table, const uint8_t *states, const uint8_t *words, int64_t count)
      : table_(table), next_(words), end_(words + 2 * count) {
    std::memcpy(states_, states, sizeof states_);
  }

  // The next n symbols; n is a multiple of a row but for the last ones of a block. False where words are missing.
  bool run(uint8_t *symbols, int n) {
    int row = 0;
    for (; row + kRansRow <= n && end_ - next_ >= 2 * kRansRow; row += kRansRow)
      for (int turn = 0; turn < kRansTurns; ++turn)
        for (int lane = 0; lane < kRansLanes; ++lane) {
          const bool low = pop(states_[lane], symbols[row + lane * kRansTurns + turn]);
          const uint32_t filled = states_[lane] << 16 | load_u16(next_);
          states_[lane] = low ? filled : states_[lane];
          next_ += 2 * low;
        }
    for (; row < n; row += kRansRow)
      for (int turn = 0; turn < kRansTurns; ++turn)
        for (int lane = 0; lane < kRansLanes; ++lane) {
          const int i = row + lane * kRansTurns + turn;
          if (i >= n || !pop(states_[lane], symbols[i])) continue;
          if (next_ == end_) return false;
          states_[lane] = states_[lane] << 16 | load_u16(next_);
          next_ += 2;
        }
    return true;
  }

  // Whether all words were taken and every state is one that encoding begins with.
  bool done(bool whole) const {
    for (const uint32_t state : states_)
      if (!is_rans_first(state, whole)) return false;
    return next_ == end_;
  }

  // The last row's bytes of a whole block at its end, of which `told` are not in the states.
  void last_bytes(const uint8_t *told, uint8_t *row) const {
    for (const uint32_t state : states_) {
      for (int i = 0; i < kRansCarried; ++i) *row++ = uint8_t(state >> 8 * i);
      for (int i = kRansCarried; i < kRansTurns; ++i) *row++ = *told++;
    }
  }

 private:
  // Whether the state has become so low that a word belongs to it.
  bool pop(uint32_t &state, uint8_t &symbol) const {
    const uint32_t slot = table_[state & (kRansTotal - 1)];
    symbol = uint8_t(slot);
    state = rans_popped(slot, state);
    return state < kRansFirst;
  }

  const DecoderTable &table_;
  uint32_t states_[kRansLanes];
  const uint8_t *next_, *end_;
};

// Calls sink(first, n, values) for the tiles of a block of a message whose table this is; false where the message is not
// coherent.
template <class E, class Sink>
bool decode_block(const RansShape &shape, const ZipMessage &in, const DecoderTable &table, int64_t block,
                  const Sink &sink) {
  const int n = shape.in_block(block);
  const int64_t first = block * kRansBlock;
  if (in.head->form == kZipRaw) {
    for (int i = 0; i < n; i += kTile) sink(i, n - i < kTile ? n - i : kTile, in.data + (first + i) * E::kBytes);
    return true;
  }
  const RansShape::Span span = shape.span(*in.head, in.data, block);
  if (!span.exists) return false;
  Decoder decoder(table, in.data + shape.states() + 4 * kRansLanes * block,
                  in.data + shape.words() + 2 * int64_t(span.begin), int64_t(span.end) - span.begin);
  const bool whole = shape.is_whole(block);
  uint8_t symbols[kTile], ended[kTile], values[kTile * E::kBytes];
  const uint8_t *bytes = in.data + shape.bytes() + kRansBlockBytes * block, *low = in.data + shape.low() + 2 * first;
  for (int i = 0; i < n; i += kTile) {
    const int m = n - i < kTile ? n - i : kTile;
    if (!decoder.run(symbols, m)) return false;
    const uint8_t *mine = bytes + i;
    if (whole && i + kTile == kRansBlock) {
      std::memcpy(ended, mine, kTile - kRansRow);
      decoder.last_bytes(mine + kTile - kRansRow, ended + kTile - kRansRow);
      mine = ended;
    }
    for (int j = 0; j < m; ++j)
      E::join(rans_half(shape.dtype, symbols[j], mine[j]), E::kBytes == 4 ? load_u16(low + 2 * (i + j)) : 0,
              values + j * E::kBytes);
    sink(i, m, values);
  }
  return decoder.done(whole);
}

// Blocks of one message that are decoded with one table, from a multiple of kSpan on.
struct Span {
  int64_t first, end;

  Span(const RansShape &shape, int64_t number) : first(number * kSpan), end(first + kSpan) {
    if (end > shape.blocks()) end = shape.blocks();
  }
  static int64_t count(const RansShape &shape) { return (shape.blocks() + kSpan - 1) / kSpan; }
};

// Calls sink(element, n, values) for the tiles of a span of a message, elements being counted from the span's first.
template <class E, class Sink>
bool decode_span(const RansShape &shape, const ZipMessage &in, const Span &span, const Sink &sink) {
  DecoderTable table;
  if (in.head->form != kZipRaw && !(shape.coded(*in.head) && table.fill(in.data))) return false;
  for (int64_t block = span.first; block < span.end; ++block)
    if (!decode_block<E>(shape, in, table, block, [&](int first, int n, const uint8_t *values) {
          sink(int64_t(block - span.first) * kRansBlock + first, n, values);
        }))
      return false;
  return true;
}

// Calls body(element, out) with the types of what was encoded and of out.
template <class Body>
void with_both(const fl_spec &spec, const Body &body) {
  with_element(spec.param[0], [&](auto wire) { with_element(spec.dtype, [&](auto type) { body(wire, type); }); });
}

// Whether body(unit) is true for all of them.
template <class Body>
int split(int64_t units, const Body &body) {
  std::atomic<bool> coherent{true};
  const auto task = [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      if (!body(begin)) coherent = false;
  };
  if (units > 0) parallel_for(units, 1, RangeTask(task));
  return coherent ? FL_OK : FL_BAD_MESSAGE;
}

}  // namespace

int rans_encode(Job &job) {
  const fl_spec &spec = *job.spec;
  const fl_messages &out = *job.out;
  if (spec.numel == 0) return FL_OK;
  const RansShape shape = rans_shape(spec);
  const auto task = [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      encode_message(shape, static_cast<const uint8_t *>(job.x) + begin * shape.raw_bytes(), zip_message(out, begin));
  };
  if (out.count > 0) parallel_for(out.count, 1, RangeTask(task));
  return FL_OK;
}

int rans_decode(Job &job) {
  const fl_spec &spec = *job.spec;
  const fl_messages &in = *job.in;
  const RansShape shape = rans_shape(spec);
  const int64_t spans = Span::count(shape);
  int status = FL_OK;
  with_both(spec, [&](auto wire, auto type) {
    using E = decltype(wire);
    using Y = decltype(type);
    status = split(in.count * spans, [&](int64_t unit) {
      const FloatEnvironment ieee;
      const int64_t m = unit / spans;
      const Span span(shape, unit % spans);
      uint8_t *to = static_cast<uint8_t *>(job.y) + (m * shape.numel + span.first * kRansBlock) * Y::kBytes;
      return decode_span<E>(shape, zip_message(in, m), span, [&](int64_t first, int n, const uint8_t *values) {
        if (std::is_same_v<E, Y>)
          std::memcpy(to + first * Y::kBytes, values, size_t(n) * Y::kBytes);
        else
          for (int i = 0; i < n; ++i) Y::store(E::load(values + i * E::kBytes), to + (first + i) * Y::kBytes);
      });
    });
  });
  return status;
}

int rans_decode_sum(Job &job) {
  const fl_spec &spec = *job.spec;
  const fl_messages &in = *job.in;
  const RansShape shape = rans_shape(spec);
  int status = FL_OK;
  with_both(spec, [&](auto wire, auto type) {
    using E = decltype(wire);
    using Y = decltype(type);
    status = split(Span::count(shape), [&](int64_t unit) {
      const FloatEnvironment ieee;
      const Span span(shape, unit);
      const int64_t begin = span.first * kRansBlock, end = span.end * kRansBlock;
      const int n = int((end < shape.numel ? end : shape.numel) - begin);
      uint8_t *to = static_cast<uint8_t *>(job.y) + begin * Y::kBytes;
      float sums[kSpan * kRansBlock];
      for (int i = 0; i < n; ++i) sums[i] = job.add ? Y::load(to + i * Y::kBytes) : 0.0f;
      for (int64_t m = 0; m < in.count; ++m)
        if (!decode_span<E>(shape, zip_message(in, m), span, [&](int64_t first, int count, const uint8_t *values) {
              for (int i = 0; i < count; ++i) sums[first + i] += E::load(values + i * E::kBytes);
            }))
          return false;
      for (int i = 0; i < n; ++i) Y::store(sums[i], to + i * Y::kBytes);
      return true;
    });
  });
  return status;
}

}  // namespace fl
