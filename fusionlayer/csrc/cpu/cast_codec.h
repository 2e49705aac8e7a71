// The `cast` codec: values as f32, bf16 or f16.
#pragma once

#include "elements.h"
#include "kernels.h"

namespace fl::FL_ISA {

template <class Wire>
class CastCodec {
 public:
  static constexpr bool kCanonical = false;

  using Message = Wire *;

  explicit CastCodec(const Job &job) : streamed_(job.streamed) {}

  int unit() const { return kCastUnit; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    uint8_t *plane = static_cast<uint8_t *>(messages.plane[0]) + message * messages.stride;
    return reinterpret_cast<Wire *>(plane) + unit * kCastUnit;
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t, Ahead) const {
    with_store(streamed_, out, [&](auto way) FL_LAMBDA {
      constexpr Store kStore = decltype(way)::value;
      for_each_block(n, [&](int i, auto access)
                            FL_LAMBDA { access.template store<kStore>(out + i, canonical(load_block(x + i))); });
    });
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    for_each_block(n, [&](int i, auto access) FL_LAMBDA { sink(i, access.load(in + i)); });
  }

 private:
  bool streamed_;
};

}  // namespace fl::FL_ISA
