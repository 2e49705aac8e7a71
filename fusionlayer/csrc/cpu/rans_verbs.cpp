// FL_RANS for the CPU: one body for all instruction sets. Messages are encoded side by side, blocks decoded so.
#include "rans_verbs.h"

#include <atomic>
#include <cstring>
#include <type_traits>

#include "arguments.h"
#include "float_environment.h"
#include "rans.h"
#include "thread_pool.h"

namespace fl {
namespace {

constexpr int kTile = 2048;  // elements that are put together at a time; a multiple of the lanes

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

struct Message {
  uint8_t *head, *data;
};

Message message_of(const fl_messages &messages, int64_t m) {
  return {static_cast<uint8_t *>(messages.plane[0]) + m * messages.stride,
          static_cast<uint8_t *>(messages.plane[1]) + m * messages.stride};
}

// Encoding ------------------------------------------------------------------------------------------------------------

// x / frequency is (x * inverse) >> kShift for x below 2^32: the inverse is too large by less than one, which adds less
// than 2^-20 to a quotient whose fraction is at most 1 - 2^-12.
constexpr int kShift = 52;
__extension__ typedef unsigned __int128 Wide;
struct EncoderEntry {
  uint64_t inverse;
  uint64_t most;  // from which value on a word is written first
  uint32_t frequency, start;
};

class Encoder {
 public:
  explicit Encoder(const uint16_t *frequencies) {
    uint32_t start = 0;
    for (int s = 0; s < kRansSymbols; ++s) {
      const uint32_t f = frequencies[s];
      entries_[s] = {f ? ((uint64_t(1) << kShift) + f - 1) / f : 0, uint64_t(f) << (32 - kRansBits), f, start};
      start += f;
    }
  }

  // The states of n symbols, and how many words they take; these end at `end`.
  int64_t run(const uint8_t *symbols, int n, uint32_t *states, uint16_t *end) const {
    for (int lane = 0; lane < kRansLanes; ++lane) states[lane] = kRansFirst;
    uint16_t *to = end;
    int i = n;
    for (; i % kRansLanes; --i) push(symbols[i - 1], states[(i - 1) % kRansLanes], to);
    while (i > 0) {
      i -= kRansLanes;
      for (int lane = kRansLanes - 1; lane >= 0; --lane) push(symbols[i + lane], states[lane], to);
    }
    return end - to;
  }

 private:
  void push(uint8_t symbol, uint32_t &state, uint16_t *&to) const {
    const EncoderEntry &entry = entries_[symbol];
    const bool full = state >= entry.most;
    to[-1] = uint16_t(state);
    to -= full;
    const uint32_t x = full ? state >> 16 : state;
    const uint32_t quotient = uint32_t(Wide(x) * entry.inverse >> kShift);
    state = (quotient << kRansBits) + (x - quotient * entry.frequency) + entry.start;
  }

  EncoderEntry entries_[kRansSymbols];
};

template <class E>
void count_symbols(const uint8_t *x, int64_t n, uint32_t dtype, int64_t *counts) {
  constexpr int kBanks = 4;  // neighbours are often alike, and would wait for each other
  int64_t banks[kBanks][kRansSymbols] = {};
  for (int64_t i = 0; i < n; ++i) ++banks[i % kBanks][rans_symbol(dtype, E::half(x + i * E::kBytes))];
  for (int s = 0; s < kRansSymbols; ++s) counts[s] = banks[0][s] + banks[1][s] + banks[2][s] + banks[3][s];
}

// False where the message would not be shorter than its elements.
template <class E>
bool encode_coded(const RansShape &shape, const uint8_t *x, const Message &out) {
  const int64_t too_many = shape.too_many();
  if (too_many == 0) return false;
  int64_t counts[kRansSymbols];
  count_symbols<E>(x, shape.numel, shape.dtype, counts);
  uint16_t frequencies[kRansSymbols];
  rans_frequencies(counts, shape.numel, frequencies);
  const Encoder encoder(frequencies);
  uint8_t symbols[kRansBlock];
  uint16_t words[kRansBlock + 1];  // and room for a word that is not kept
  int64_t used = 0;
  for (int64_t block = 0; block < shape.blocks(); ++block) {
    const int n = shape.in_block(block);
    const int64_t first = block * kRansBlock;
    const uint8_t *from = x + first * E::kBytes;
    uint8_t *bytes = out.data + shape.bytes() + first, *low = out.data + shape.low() + 2 * first;
    for (int i = 0; i < n; ++i) {
      const uint32_t half = E::half(from + i * E::kBytes);
      symbols[i] = uint8_t(rans_symbol(shape.dtype, half));
      bytes[i] = uint8_t(rans_byte(shape.dtype, half));
      if (E::kBytes == 4) std::memcpy(low + 2 * i, from + 4 * i, 2);
    }
    uint32_t states[kRansLanes];
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
  clear(shape.bytes() + shape.numel, shape.low());
  clear(shape.low() + shape.low_bytes() * shape.numel, shape.words());
  const ZipHead head{kZipCoded, uint32_t(used), {0, 0}};
  std::memcpy(out.head, &head, sizeof head);
  return true;
}

void encode_message(const RansShape &shape, const uint8_t *x, const Message &out) {
  bool coded = false;
  with_element(shape.dtype, [&](auto element) { coded = encode_coded<decltype(element)>(shape, x, out); });
  if (coded) return;
  const ZipHead head{kZipRaw, 0, {0, 0}};
  std::memcpy(out.head, &head, sizeof head);
  std::memcpy(out.data, x, size_t(shape.raw_bytes()));
}

// Decoding ------------------------------------------------------------------------------------------------------------

// For each value of a state's low bits: the symbol, its frequency less 1, and how far behind the symbol's first it is.
class DecoderTable {
 public:
  // False where the frequencies do not add up.
  bool fill(const uint8_t *frequencies) {
    uint32_t start = 0;
    for (int s = 0; s < kRansSymbols; ++s) {
      const uint32_t f = load_u16(frequencies + 2 * s);
      if (f > kRansTotal - start) return false;
      for (uint32_t i = 0; i < f; ++i) entries_[start + i] = uint32_t(s) | (f - 1) << 8 | i << 20;
      start += f;
    }
    return start == kRansTotal;
  }

  uint32_t operator[](uint32_t slot) const { return entries_[slot]; }

 private:
  uint32_t entries_[kRansTotal];
};

// A block's symbols, tile by tile.
class Decoder {
 public:
  Decoder(const DecoderTable &table, const uint8_t *states, const uint8_t *words, int64_t count)
      : table_(table), next_(words), end_(words + 2 * count) {
    std::memcpy(states_, states, sizeof states_);
  }

  // The next n symbols; n is a multiple of the lanes but for the last ones of a block. False where words are missing.
  bool run(uint8_t *symbols, int n) {
    int i = 0;
    for (; i + kRansLanes <= n && end_ - next_ >= 2 * kRansLanes; i += kRansLanes)
      for (int lane = 0; lane < kRansLanes; ++lane) {
        const bool low = pop(states_[lane], symbols[i + lane]);
        const uint32_t filled = states_[lane] << 16 | load_u16(next_);
        states_[lane] = low ? filled : states_[lane];
        next_ += 2 * low;
      }
    for (; i < n; ++i) {
      uint32_t &state = states_[i % kRansLanes];
      if (!pop(state, symbols[i])) continue;
      if (next_ == end_) return false;
      state = state << 16 | load_u16(next_);
      next_ += 2;
    }
    return true;
  }

  // Whether all words were taken and every state is back where encoding began.
  bool done() const {
    for (const uint32_t state : states_)
      if (state != kRansFirst) return false;
    return next_ == end_;
  }

 private:
  // Whether the state has become so low that a word belongs to it.
  bool pop(uint32_t &state, uint8_t &symbol) const {
    const uint32_t entry = table_[state & (kRansTotal - 1)];
    symbol = uint8_t(entry);
    state = ((entry >> 8 & (kRansTotal - 1)) + 1) * (state >> kRansBits) + (entry >> 20);
    return state < kRansFirst;
  }

  const DecoderTable &table_;
  uint32_t states_[kRansLanes];
  const uint8_t *next_, *end_;
};

// Calls sink(first, n, values) for the tiles of a block of a message; false where the message is not coherent.
template <class E, class Sink>
bool decode_block(const RansShape &shape, const Message &in, int64_t block, DecoderTable &table, const Sink &sink) {
  const int n = shape.in_block(block);
  const int64_t first = block * kRansBlock;
  ZipHead head;
  std::memcpy(&head, in.head, sizeof head);
  if (head.form == kZipRaw) {
    for (int i = 0; i < n; i += kTile)
      sink(i, n - i < kTile ? n - i : kTile, static_cast<const uint8_t *>(in.data) + (first + i) * E::kBytes);
    return true;
  }
  if (head.form != kZipCoded || head.escapes >= shape.too_many() || head.escapes % 2) return false;
  uint32_t begin = 0, end;
  if (block) std::memcpy(&begin, in.data + RansShape::ends() + 4 * (block - 1), 4);
  std::memcpy(&end, in.data + RansShape::ends() + 4 * block, 4);
  if (begin > end || end > head.escapes / 2) return false;
  if (block == shape.blocks() - 1 && end != head.escapes / 2) return false;
  if (!table.fill(in.data)) return false;
  Decoder decoder(table, in.data + shape.states() + 4 * kRansLanes * block,
                  in.data + shape.words() + 2 * int64_t(begin), int64_t(end) - begin);
  uint8_t symbols[kTile], values[kTile * E::kBytes];
  const uint8_t *bytes = in.data + shape.bytes() + first, *low = in.data + shape.low() + 2 * first;
  for (int i = 0; i < n; i += kTile) {
    const int m = n - i < kTile ? n - i : kTile;
    if (!decoder.run(symbols, m)) return false;
    for (int j = 0; j < m; ++j)
      E::join(rans_half(shape.dtype, symbols[j], bytes[i + j]), E::kBytes == 4 ? load_u16(low + 2 * (i + j)) : 0,
              values + j * E::kBytes);
    sink(i, m, values);
  }
  return decoder.done();
}

// Calls body(element, out) with the types of what was encoded and of out.
template <class Body>
void with_both(const fl_spec &spec, const Body &body) {
  with_element(spec.param[0], [&](auto wire) { with_element(spec.dtype, [&](auto type) { body(wire, type); }); });
}

// Whether body(block) is true for all of them.
template <class Body>
int split_blocks(int64_t blocks, const Body &body) {
  std::atomic<bool> coherent{true};
  const auto task = [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      if (!body(begin)) coherent = false;
  };
  if (blocks > 0) parallel_for(blocks, 1, RangeTask(task));
  return coherent ? FL_OK : FL_BAD_MESSAGE;
}

}  // namespace

int rans_encode(const fl_spec &spec, const void *x, const fl_messages &out) {
  if (spec.numel == 0) return FL_OK;
  const RansShape shape = rans_shape(spec);
  const auto task = [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      encode_message(shape, static_cast<const uint8_t *>(x) + begin * shape.raw_bytes(), message_of(out, begin));
  };
  if (out.count > 0) parallel_for(out.count, 1, RangeTask(task));
  return FL_OK;
}

int rans_decode(const fl_spec &spec, const fl_messages &in, void *out) {
  const RansShape shape = rans_shape(spec);
  const int64_t blocks = shape.blocks();
  int status = FL_OK;
  with_both(spec, [&](auto wire, auto type) {
    using E = decltype(wire);
    using Y = decltype(type);
    status = split_blocks(in.count * blocks, [&](int64_t unit) {
      const FloatEnvironment ieee;
      const int64_t m = unit / blocks, block = unit % blocks;
      uint8_t *to = static_cast<uint8_t *>(out) + (m * shape.numel + block * kRansBlock) * Y::kBytes;
      DecoderTable table;
      return decode_block<E>(shape, message_of(in, m), block, table, [&](int first, int n, const uint8_t *values) {
        if (std::is_same_v<E, Y>)
          std::memcpy(to + first * Y::kBytes, values, size_t(n) * Y::kBytes);
        else
          for (int i = 0; i < n; ++i) Y::store(E::load(values + i * E::kBytes), to + (first + i) * Y::kBytes);
      });
    });
  });
  return status;
}

int rans_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add) {
  const RansShape shape = rans_shape(spec);
  int status = FL_OK;
  with_both(spec, [&](auto wire, auto type) {
    using E = decltype(wire);
    using Y = decltype(type);
    status = split_blocks(shape.blocks(), [&](int64_t block) {
      const FloatEnvironment ieee;
      const int n = shape.in_block(block);
      uint8_t *to = static_cast<uint8_t *>(out) + block * kRansBlock * Y::kBytes;
      float sums[kRansBlock];
      DecoderTable table;
      for (int i = 0; i < n; ++i) sums[i] = add ? Y::load(to + i * Y::kBytes) : 0.0f;
      for (int64_t m = 0; m < in.count; ++m)
        if (!decode_block<E>(shape, message_of(in, m), block, table, [&](int first, int count, const uint8_t *values) {
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
