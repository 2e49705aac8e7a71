// The `cast` codec: values as f32, bf16 or f16.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace fl::FL_ISA {

template <class Wire>
class CastCodec {
 public:
  static constexpr int kMaxTile = kCastUnit;

  using Message = Wire *;

  explicit CastCodec(const Job &) {}

  int unit() const { return kCastUnit; }
  int tile_units() const { return 1; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    return reinterpret_cast<Wire *>(static_cast<uint8_t *>(messages.plane[0]) + message * messages.stride) +
           unit * kCastUnit;
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t) const {
    for (int i = 0; i < n; i += kBlock) store_block(out, load_block(x, i, n), i, n);
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    for (int i = 0; i < n; i += kBlock) sink(i, load_block(in, i, n));
  }
};

}  // namespace fl::FL_ISA
