// Strips: consecutive elements that a warp holds, between memory and registers.
#pragma once

#include "elements.cuh"
#include "launch.cuh"

namespace fl {

// A warp holds a strip of 512 elements at a time: lane l has elements 4 l .. 4 l + 3 of each of its four parts.
constexpr int kPart = 4 * kLanes;
constexpr int kParts = 4;
constexpr int kStrip = kParts * kPart;
constexpr int kHeld = kStrip / kLanes;  // elements a lane holds

FL_DEVICE void load_four(const uint32_t *x, uint32_t *b) {
  const uint4 u = *reinterpret_cast<const uint4 *>(x);
  b[0] = u.x, b[1] = u.y, b[2] = u.z, b[3] = u.w;
}

FL_DEVICE void load_four(const uint16_t *x, uint16_t *b) {
  const uint2 u = *reinterpret_cast<const uint2 *>(x);
  b[0] = uint16_t(u.x), b[1] = uint16_t(u.x >> 16), b[2] = uint16_t(u.y), b[3] = uint16_t(u.y >> 16);
}

// Four elements as words.
FL_DEVICE void load_words(const uint32_t *x, uint32_t *w) { load_four(x, w); }

FL_DEVICE void load_words(const uint16_t *x, uint32_t *w) {
  const uint2 u = *reinterpret_cast<const uint2 *>(x);
  w[0] = u.x, w[1] = u.y;
}

FL_DEVICE void store_four(uint32_t *x, const uint32_t *b) {
  *reinterpret_cast<uint4 *>(x) = make_uint4(b[0], b[1], b[2], b[3]);
}

FL_DEVICE void store_four(uint16_t *x, const uint16_t *b) {
  *reinterpret_cast<uint2 *>(x) = make_uint2(b[0] | uint32_t(b[1]) << 16, b[2] | uint32_t(b[3]) << 16);
}

// Where a strip of an array of numel elements lies for this lane.
template <class Bits>
struct Strip {
  Bits *start;   // the lane's first element
  int64_t left;  // elements of the array from there on
  bool wide;     // the whole strip can be accessed four elements at a time

  FL_DEVICE Strip(Bits *x, int64_t numel, int64_t strip) {
    const int64_t element = opaque(strip * kStrip + 4 * lane_index());
    start = x + element;
    left = numel - element;
    wide = is_aligned(start, 4 * sizeof(Bits)) && left >= kStrip - kPart + 4;
  }

  // How many of the lane's four elements of a part exist.
  FL_DEVICE int count(int part) const {
    const int64_t n = left - part * kPart;
    return n >= 4 ? 4 : int(n);
  }
};

template <class Bits>
FL_DEVICE void load_strip(const Bits *x, int64_t numel, int64_t strip, Bits (&b)[kHeld]) {
  const Strip<const Bits> at(x, numel, strip);
  if (at.wide) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_four(at.start + part * kPart, b + 4 * part);
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) b[i] = i % 4 < at.count(i / 4) ? at.start[i / 4 * kPart + i % 4] : Bits(0);
  }
}

template <class Bits>
FL_DEVICE void store_strip(Bits *x, int64_t numel, int64_t strip, const Bits (&b)[kHeld]) {
  const Strip<Bits> at(x, numel, strip);
  if (at.wide) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) store_four(at.start + part * kPart, b + 4 * part);
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (i % 4 < at.count(i / 4)) at.start[i / 4 * kPart + i % 4] = b[i];
  }
}

FL_DEVICE void load_values(uint32_t dtype, const void *x, int64_t numel, int64_t strip, float (&v)[kHeld]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits b[kHeld];
    load_strip(static_cast<const typename E::Bits *>(x), numel, strip, b);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) v[i] = E::widen(b[i]);
  });
}

// Writes v narrowed, and leaves in v what a reader will make of it.
FL_DEVICE void store_values(uint32_t dtype, void *x, int64_t numel, int64_t strip, float (&v)[kHeld]) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits b[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      b[i] = E::narrow(v[i]);
      v[i] = E::widen(b[i]);
    }
    store_strip(static_cast<typename E::Bits *>(x), numel, strip, b);
  });
}

}  // namespace fl
