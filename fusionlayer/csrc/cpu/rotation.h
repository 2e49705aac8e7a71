// Hadamard transforms of blocks of more than one run of 32.
#pragma once

#include "elements.h"

namespace fl::FL_ISA {

// If N runs fit into half of the registers, they are transformed there. Otherwise they are transformed in memory: first as
// many runs together as fit into 8 registers, then column by column.
template <int N>
constexpr bool kFits = N * kVectors <= (kLanes == 16 ? 16 : 8);
template <int N>
constexpr int kTogether = kFits<N> ? N : kLanes / 4;

// Stages 32, 64, .. of a transform: those between runs.
template <int N>
FL_INLINE void hadamard_between(vf (&v)[N]) {
  for (int h = 1; h < N; h *= 2)
    for (int k = 0; k < N; ++k)
      if (!(k & h)) {
        const vf a = v[k], b = v[k + h];
        v[k] = a + b;
        v[k + h] = a - b;
      }
}

// out = the transform of N runs, load(k) being run k; each vector of it goes through `finish`.
template <int N, class Load, class Finish>
FL_INLINE void hadamard_runs(float *out, const Load &load_run, const Finish &finish) {
  Block b[kTogether<N>];
  for (int k = 0; k < N; k += kTogether<N>) {
    for (int i = 0; i < kTogether<N>; ++i) b[i] = load_run(k + i);
    hadamard(b);
    if constexpr (!kFits<N>)
      for (int i = 0; i < kTogether<N>; ++i) store_block(out + (k + i) * kBlock, b[i]);
  }
  for (int j = 0; j < kVectors; ++j) {
    vf column[N];
    for (int k = 0; k < N; ++k) {
      if constexpr (kFits<N>)
        column[k] = b[k].v[j];
      else
        column[k] = load(out + k * kBlock + j * kLanes);
    }
    hadamard_between(column);
    for (int k = 0; k < N; ++k) store(out + k * kBlock + j * kLanes, finish(column[k]));
  }
}

// Calls body with the number of runs of 32 in a block of FL_BLOCK.
template <int N>
struct Runs {
  static constexpr int value = N;
};
template <class Body>
FL_INLINE void with_runs(int runs, const Body &body) {
  switch (runs) {
    case 1:
      return body(Runs<1>{});
    case 2:
      return body(Runs<2>{});
    case 4:
      return body(Runs<4>{});
    case 8:
      return body(Runs<8>{});
    default:
      return body(Runs<16>{});
  }
}

// v = H v * factor, for blocks of up to 1024.
template <int N>
FL_NOINLINE void rotate_in_place(float *v, float factor) {
  hadamard_runs<N>(
      v, [&](int k) FL_LAMBDA { return load_block(v + k * kBlock); }, [&](vf x) FL_LAMBDA { return x * factor; });
}

inline void rotate_in_place(float *v, int runs, float factor) {
  if (runs == 32)
    rotate_in_place<32>(v, factor);
  else
    with_runs(runs, [&](auto n) { rotate_in_place<decltype(n)::value>(v, factor); });
}

}  // namespace fl::FL_ISA
