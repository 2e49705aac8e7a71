// The four verbs of the C ABI for any codec, tile by tile: partial sums stay in L1.
//
// A codec says how many elements no tile may part (unit), whether NaN always comes out of it canonical (kCanonical), and
// offers
//   at(messages, message, unit)    where a unit of a message lies
//   encode(x, n, at, unit)         makes n elements of a message; x has zeros up to a whole unit; `unit` counts over all
//                                  messages
//   decode(at, n, sink)            calls sink(i, block) for the blocks of n elements, i being a block's first element;
//                                  also for those that complete the last unit, if it pleases
#pragma once

#include "elements.h"
#include "kernels.h"

namespace fl::FL_ISA {

// Elements of a tile, unless a unit is larger. Long tiles save overhead; where several f32 arrays share L1, short ones fit.
constexpr int kTile = 2048;
constexpr int kSumTile = 512;

// A part of one message: `size` elements from number `element` of the message on, which begin its unit `unit`.
struct Tile {
  int64_t message, unit, element;
  int size;
};

// Calls body(tile) for the units begin..end - 1 of all messages.
template <class Codec, class Body>
FL_INLINE void for_each_tile(const Codec &codec, int tile, int64_t numel, int64_t begin, int64_t end,
                             const Body &body) {
  const int64_t units = (numel + codec.unit() - 1) / codec.unit();
  const int64_t tile_units = tile > codec.unit() ? tile / codec.unit() : 1;
  while (begin < end) {
    const int64_t message = begin / units, first = message * units;
    const int64_t stop = end < first + units ? end : first + units;
    for (; begin < stop; begin += tile_units) {
      const int64_t element = (begin - first) * codec.unit();
      const int64_t full = (stop - begin < tile_units ? stop - begin : tile_units) * codec.unit();
      body(Tile{message, begin - first, element, int(full < numel - element ? full : numel - element)});
    }
    begin = stop;
  }
}

// A tile of n values in L1, with room for a whole last unit.
template <class T, class Codec>
class Values {
 public:
  Values(const Codec &codec, int n) : codec_(codec), n_(n) {}

  T *data() { return v_; }
  int size() const { return n_; }

  void clear() { __builtin_memset(v_, 0, size_t(n_) * sizeof(T)); }

  void copy(const T *x) { __builtin_memcpy(v_, x, size_t(n_) * sizeof(T)); }

  template <class X>
  void set(const X *x) {
    for_each_block(n_, [&](int i, auto access) FL_LAMBDA { store_block(v_ + i, access.load(x + i)); });
  }

  template <class X>
  void add(const X *x) {
    for_each_block(n_, [&](int i, auto access) FL_LAMBDA { add(i, access.load(x + i)); });
  }

  template <class X, class Y>
  void set_sum(const X *x, const Y *y) {
    for_each_block(n_,
                   [&](int i, auto access) FL_LAMBDA { store_block(v_ + i, access.load(x + i) + access.load(y + i)); });
  }

  template <class X, class Y>
  void set_difference(const X *x, const Y *y) {
    for_each_block(n_,
                   [&](int i, auto access) FL_LAMBDA { store_block(v_ + i, access.load(x + i) - access.load(y + i)); });
  }

  __attribute__((noinline)) void decode(typename Codec::Message message) {
    codec_.decode(message, n_, [this](int i, const Block &b) FL_LAMBDA { store_block(v_ + i, b); });
  }

  __attribute__((noinline)) void decode_add(typename Codec::Message message) {
    codec_.decode(message, n_, [this](int i, const Block &b) FL_LAMBDA { add(i, b); });
  }

  // What follows `unit` goes to the codec.
  template <class... More>
  void encode(typename Codec::Message out, int64_t unit, const More &...more) {
    const int rest = n_ % codec_.unit();
    if (rest) __builtin_memset(v_ + n_, 0, size_t(codec_.unit() - rest) * sizeof(T));
    codec_.encode(v_, n_, out, unit, more...);
  }

  template <class X>
  void copy_to(X *out, bool streamed) const {
    with_store(streamed, out, [&](auto way) FL_LAMBDA {
      constexpr Store kStore = decltype(way)::value;
      for_each_block(n_, [&](int i, auto access)
                             FL_LAMBDA { access.template store<kStore>(out + i, canonical(load_block(v_ + i))); });
    });
  }

  // Leaves in residual what was lost when the values became `message`.
  __attribute__((noinline)) void lose(typename Codec::Message message, float *residual) const {
    const auto update = [&](int i, const Block &decoded, auto access) FL_LAMBDA {
      access.store(residual + i, residual_after(load_block(v_ + i), decoded, access.load(residual + i)));
    };
    if (n_ % codec_.unit()) {
      Values decoded(codec_, n_);
      decoded.decode(message);
      for_each_block(n_, [&](int i, auto access) FL_LAMBDA { update(i, load_block(decoded.v_ + i), access); });
    } else {
      codec_.decode(message, n_, [&](int i, const Block &decoded) FL_LAMBDA { update(i, decoded, Whole{}); });
    }
  }

 private:
  FL_INLINE void add(int i, const Block &b) { store_block(v_ + i, load_block(v_ + i) + b); }

  const Codec &codec_;
  const int n_;
  alignas(64) T v_[kMaxTile];
};

template <class T, class Codec>
void encode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel, units = (numel + codec.unit() - 1) / codec.unit();
  for_each_tile(codec, job.residual ? kSumTile : kTile, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t offset = tile.message * numel + tile.element, unit = tile.message * units + tile.unit;
    const T *x = static_cast<const T *>(job.x) + offset;
    const auto out = codec.at(*job.out, tile.message, tile.unit);
    if (job.residual) {
      Values<float, Codec> values(codec, tile.size);
      values.set_sum(x, job.residual + offset);
      values.encode(out, unit);
      if (!job.look) values.lose(out, job.residual + offset);
    } else if (tile.size % codec.unit()) {
      Values<T, Codec> values(codec, tile.size);
      values.copy(x);
      values.encode(out, unit);
    } else {
      codec.encode(x, tile.size, out, unit);
    }
  });
}

template <class T, class Codec>
void decode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel;
  for_each_tile(codec, kTile, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    T *out = static_cast<T *>(job.y) + tile.message * numel + tile.element;
    const auto in = codec.at(*job.in, tile.message, tile.unit);
    if (tile.size % codec.unit()) {
      Values<float, Codec> values(codec, tile.size);
      values.decode(in);
      values.copy_to(out, job.streamed);
    } else {
      with_store(job.streamed, out, [&](auto way) FL_LAMBDA {
        constexpr Store kStore = decltype(way)::value;
        codec.decode(in, tile.size, [&](int i, const Block &b) FL_LAMBDA {
          store_block<kStore>(out + i, Codec::kCanonical ? b : canonical(b));
        });
      });
    }
  });
}

template <class Codec>
FL_INLINE void add_messages(const Codec &codec, Values<float, Codec> &values, const Job &job, int64_t unit) {
  for (int64_t m = 0; m < job.in->count; ++m) values.decode_add(codec.at(*job.in, m, unit));
}

template <class T, class Codec>
void decode_sum(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  for_each_tile(codec, kSumTile, job.spec->numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    T *out = static_cast<T *>(job.y) + tile.element;
    Values<float, Codec> values(codec, tile.size);
    job.add ? values.set(out) : values.clear();
    add_messages(codec, values, job, tile.unit);
    values.copy_to(out, job.streamed);
  });
}

template <class T, class Codec>
void recode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  for_each_tile(codec, kSumTile, job.spec->numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    Values<float, Codec> values(codec, tile.size);
    job.x ? values.set(static_cast<const T *>(job.x) + tile.element) : values.clear();
    add_messages(codec, values, job, tile.unit);
    const auto out = codec.at(*job.out, 0, tile.unit);
    if (job.residual) values.add(job.residual + tile.element);
    values.encode(out, tile.unit);
    if (job.residual && !job.look) values.lose(out, job.residual + tile.element);
  });
}

// fl_encode_difference; the base is of type T.
template <class T, class Codec>
void encode_difference(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel, units = (numel + codec.unit() - 1) / codec.unit();
  for_each_tile(codec, kSumTile, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t offset = tile.message * numel + tile.element;
    Values<float, Codec> values(codec, tile.size);
    values.set_difference(static_cast<const float *>(job.x) + offset, static_cast<const T *>(job.y) + offset);
    values.encode(codec.at(*job.out, tile.message, tile.unit), tile.message * units + tile.unit);
  });
}

// Elements that neither of two codecs of power-of-two units parts.
struct CommonUnit {
  int elements;
  int unit() const { return elements; }
};

// fl_recode_from: `sum` is that of job.source, whose units have so many elements.
template <class Codec, class Sum>
void recode_from(const Codec &codec, int source_unit, const Sum &sum, const Job &job, int64_t begin, int64_t end) {
  const CommonUnit common{source_unit > codec.unit() ? source_unit : codec.unit()};
  for_each_tile(common, kSumTile, job.spec->numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t unit = tile.element / codec.unit();
    Values<float, Codec> values(codec, tile.size);
    Ahead ahead = sum(job, tile.element, tile.size, values.data());
    const auto out = codec.at(*job.out, 0, unit);
    if (job.residual) values.add(job.residual + tile.element);
    const int lines = ahead.lines();
    values.encode(out, unit, [&](int, int groups) FL_LAMBDA { ahead.fetch(lines / groups + 1); });
    if (job.residual) values.lose(out, job.residual + tile.element);
  });
}

}  // namespace fl::FL_ISA
