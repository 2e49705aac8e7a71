// The four verbs of the C ABI for any codec, tile by tile: partial sums stay in L1.
//
// A codec says how many elements no tile may part (unit), whether NaN always comes out of it canonical (kCanonical), and
// offers
//   at(messages, message, unit)    where a unit of a message lies
//   encode(x, n, at, unit, ahead)  makes n elements of a message; x has zeros up to a whole unit; `unit` counts over all
//                                  messages; `ahead` will be read next, so it is prefetched meanwhile
//   decode(at, n, sink)            calls sink(i, block) for the blocks of n elements, i being a block's first element;
//                                  also for those that complete the last unit, if it pleases
#pragma once

#include "elements.h"
#include "kernels.h"

namespace fl::FL_ISA {

// Elements of a tile, unless a unit is larger. Long tiles save overhead; where several f32 arrays share L1, short ones fit.
constexpr int kTile = 2048;

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

// n values in L1, with room for a whole last unit. Loops over elements of a type that is known when they run are here, where
// they are compiled once for all codecs. Such elements are given by an array and the number of the first of them.
class TileValues {
 public:
  explicit TileValues(int n) : n_(n) {}

  float *data() { return v_; }
  int size() const { return n_; }

  void clear() { __builtin_memset(v_, 0, size_t(n_) * sizeof(float)); }

  FL_NOINLINE void set(uint32_t dtype, const void *x, int64_t first) {
    with_dtype(dtype, [&](auto type) FL_LAMBDA {
      const auto *from = type.at(x, first);
      for_each_block(n_, [&](int i, auto access) FL_LAMBDA { store_block(v_ + i, access.load(from + i)); });
    });
  }

  FL_NOINLINE void set_sum(uint32_t dtype, const void *x, int64_t first, const float *y) {
    with_dtype(dtype, [&](auto type) FL_LAMBDA {
      const auto *from = type.at(x, first);
      for_each_block(
          n_, [&](int i, auto access) FL_LAMBDA { store_block(v_ + i, access.load(from + i) + access.load(y + i)); });
    });
  }

  FL_NOINLINE void set_difference(const float *x, uint32_t dtype, const void *y, int64_t first) {
    with_dtype(dtype, [&](auto type) FL_LAMBDA {
      const auto *less = type.at(y, first);
      for_each_block(
          n_, [&](int i, auto access) FL_LAMBDA { store_block(v_ + i, access.load(x + i) - access.load(less + i)); });
    });
  }

  FL_NOINLINE void add(const float *x) {
    for_each_block(n_, [&](int i, auto access) FL_LAMBDA { add_block(i, access.load(x + i)); });
  }

  FL_NOINLINE void copy_to(uint32_t dtype, void *out, int64_t first, bool streamed) const {
    with_dtype(dtype, [&](auto type) FL_LAMBDA {
      auto *to = type.at(out, first);
      with_store(streamed, to, [&](auto way) FL_LAMBDA {
        constexpr Store kStore = decltype(way)::value;
        for_each_block(n_, [&](int i, auto access)
                               FL_LAMBDA { access.template store<kStore>(to + i, canonical(load_block(v_ + i))); });
      });
    });
  }

 protected:
  FL_INLINE void add_block(int i, const Block &b) { store_block(v_ + i, load_block(v_ + i) + b); }

  const int n_;
  alignas(64) float v_[kMaxTile];
};

// The same of a codec's units.
template <class Codec>
class Values : public TileValues {
 public:
  using Message = typename Codec::Message;

  Values(const Codec &codec, int n) : TileValues(n), codec_(codec) {}

  FL_NOINLINE void decode(Message message) {
    codec_.decode(message, n_, [this](int i, const Block &b) FL_LAMBDA { store_block(v_ + i, b); });
  }

  FL_NOINLINE void decode_add(Message message) {
    codec_.decode(message, n_, [this](int i, const Block &b) FL_LAMBDA {
      add_block(i, kSumsRotated<Codec> ? b + Block{} : b);  // a rotated sum has no -0
    });
  }

  void encode(Message out, int64_t unit, Ahead ahead = {}) {
    const int rest = n_ % codec_.unit();
    if (rest) __builtin_memset(v_ + n_, 0, size_t(codec_.unit() - rest) * sizeof(float));
    codec_.encode(v_, n_, out, unit, ahead);
  }

  // Leaves in residual what was lost when the values became `message`, and fetches what lies behind it.
  FL_NOINLINE void lose(Message message, float *residual) const {
    translate_ahead(residual, n_);
    const auto update = [&](int i, const Block &decoded, auto access) FL_LAMBDA {
      prefetch_block(residual + i + n_);
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
  const Codec &codec_;
};

FL_INLINE void translate_elements(uint32_t dtype, const void *x, int64_t first, int n) {
  with_dtype(dtype, [&](auto type) FL_LAMBDA { translate_ahead(type.at(x, first), n); });
}

// As many elements as n of an array, right behind those from number `first` on.
inline Ahead elements_behind(uint32_t dtype, const void *x, int64_t first, int n) {
  Ahead ahead;
  with_dtype(dtype, [&](auto type) FL_LAMBDA { ahead = Ahead::behind(type.at(x, first), n); });
  return ahead;
}

template <class Codec>
void encode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel, units = (numel + codec.unit() - 1) / codec.unit();
  for_each_tile(codec, job.residual ? kShortTile : kTile, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t offset = tile.message * numel + tile.element, unit = tile.message * units + tile.unit;
    const auto out = codec.at(*job.out, tile.message, tile.unit);
    translate_elements(job.spec->dtype, job.x, offset, tile.size);
    if (job.residual || tile.size % codec.unit()) {
      Values<Codec> values(codec, tile.size);
      if (job.residual)
        values.set_sum(job.spec->dtype, job.x, offset, job.residual + offset);
      else
        values.set(job.spec->dtype, job.x, offset);
      values.encode(out, unit, elements_behind(job.spec->dtype, job.x, offset, tile.size));
      if (job.residual && !job.look) values.lose(out, job.residual + offset);
    } else {
      with_dtype(job.spec->dtype, [&](auto type) FL_LAMBDA {
        const auto *x = type.at(job.x, offset);
        codec.encode(x, tile.size, out, unit, Ahead::behind(x, tile.size));
      });
    }
  });
}

template <class T, class Codec>
void decode_to(T *to, const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel;
  for_each_tile(codec, kTile, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t offset = tile.message * numel + tile.element;
    const auto in = codec.at(*job.in, tile.message, tile.unit);
    if (tile.size % codec.unit()) {
      Values<Codec> values(codec, tile.size);
      values.decode(in);
      values.copy_to(job.spec->dtype, to, offset, job.streamed);
    } else {
      T *out = to + offset;
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
void decode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  with_dtype(job.spec->dtype, [&](auto type) FL_LAMBDA { decode_to(type.at(job.y, 0), codec, job, begin, end); });
}

template <class Codec>
FL_INLINE void add_messages(const Codec &codec, Values<Codec> &values, const Job &job, int64_t unit) {
  for (int64_t m = 0; m < job.in->count; ++m) values.decode_add(codec.at(*job.in, m, unit));
}

// values = the elements of x, or 0 where it is null, plus all messages.
template <class Codec>
FL_INLINE void sum_messages(const Codec &codec, Values<Codec> &values, const Job &job, const void *x,
                            const Tile &tile) {
  const uint32_t dtype = job.spec->dtype;
  // One message is decoded, which makes the same.
  if (kSumsRotated<Codec> && job.in->count != 1) {
    add_messages(codec, values, job, tile.unit);
    if (x) values.set_sum(dtype, x, tile.element, values.data());
    return;
  }
  x ? values.set(dtype, x, tile.element) : values.clear();
  if constexpr (kSumsRotated<Codec>)
    values.decode_add(codec.at(*job.in, 0, tile.unit));
  else
    add_messages(codec, values, job, tile.unit);
}

template <class Codec>
void decode_sum(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const uint32_t dtype = job.spec->dtype;
  for_each_tile(codec, kSumTile<Codec>, job.spec->numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    Values<Codec> values(codec, tile.size);
    if (job.add) translate_elements(dtype, job.y, tile.element, tile.size);
    sum_messages(codec, values, job, job.add ? job.y : nullptr, tile);
    values.copy_to(dtype, job.y, tile.element, job.streamed);
  });
}

template <class Codec>
void recode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  for_each_tile(codec, job.residual ? kShortTile : kSumTile<Codec>, job.spec->numel, begin, end,
                [&](const Tile &tile) FL_LAMBDA {
                  Values<Codec> values(codec, tile.size);
                  sum_messages(codec, values, job, job.x, tile);
                  const auto out = codec.at(*job.out, 0, tile.unit);
                  if (job.residual) values.add(job.residual + tile.element);
                  values.encode(out, tile.unit);
                  if (job.residual && !job.look) values.lose(out, job.residual + tile.element);
                });
}

// fl_encode_difference.
template <class Codec>
void encode_difference(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel, units = (numel + codec.unit() - 1) / codec.unit();
  for_each_tile(codec, kShortTile, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t offset = tile.message * numel + tile.element;
    Values<Codec> values(codec, tile.size);
    translate_elements(FL_F32, job.x, offset, tile.size);
    translate_elements(job.spec->dtype, job.y, offset, tile.size);
    values.set_difference(static_cast<const float *>(job.x) + offset, job.spec->dtype, job.y, offset);
    values.encode(codec.at(*job.out, tile.message, tile.unit), tile.message * units + tile.unit,
                  elements_behind(FL_F32, job.x, offset, tile.size));
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
  for_each_tile(common, kTile, job.spec->numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t unit = tile.element / codec.unit();
    Values<Codec> values(codec, tile.size);
    const Ahead ahead = sum(job, tile.element, tile.size, values.data());
    const auto out = codec.at(*job.out, 0, unit);
    if (job.residual) values.add(job.residual + tile.element);
    values.encode(out, unit, ahead);
    if (job.residual) values.lose(out, job.residual + tile.element);
  });
}

}  // namespace fl::FL_ISA
