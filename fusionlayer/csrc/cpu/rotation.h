// Hadamard transforms of blocks of more than one run of 32.
#pragma once

#include "elements.h"

namespace fl::FL_ISA {

// If N runs fit into half of the registers, they are transformed there. Otherwise they are transformed in memory: first as
// many runs together as fit, then columns of a vector of each of some runs, as many at a time as fit.
constexpr int kHeld = kLanes == 16 ? 16 : 8;  // half of the registers
template <int N>
constexpr bool kFits = N * kVectors <= kHeld;
template <int N>
constexpr int kTogether = kFits<N> ? N : kHeld / kVectors;

// Stages of a transform that are between N runs.
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

// The stages between N runs in memory that are `kDone` or more runs apart; each vector then goes through `finish`.
template <int N, int kDone, class Finish>
FL_INLINE void hadamard_columns(float *out, const Finish &finish) {
  constexpr int kRuns = N / kDone < kHeld ? N / kDone : kHeld;
  for (int k = 0; k < N; k += kRuns * kDone)
    for (int i = 0; i < kDone * kBlock; i += kLanes) {
      float *at = out + k * kBlock + i;
      vf column[kRuns];
      for (int r = 0; r < kRuns; ++r) column[r] = load(at + r * kDone * kBlock);
      hadamard_between(column);
      for (int r = 0; r < kRuns; ++r)
        store(at + r * kDone * kBlock, kRuns * kDone == N ? finish(column[r]) : column[r]);
    }
  if constexpr (kRuns * kDone < N) hadamard_columns<N, kRuns * kDone>(out, finish);
}

// out = the transform of N runs, load(k) being run k; each vector of it goes through `finish`.
template <int N, class Load, class Finish>
FL_INLINE void hadamard_runs(float *out, const Load &load_run, const Finish &finish) {
  constexpr int kFirst = kTogether<N>;
  for (int k = 0; k < N; k += kFirst) {
    Block b[kFirst];
    FL_UNROLL
    for (int i = 0; i < kFirst; ++i) b[i] = load_run(k + i);
    hadamard(b);
    for (int j = 0; j < kVectors; ++j) {
      vf column[kFirst];
      for (int i = 0; i < kFirst; ++i) column[i] = b[i].v[j];
      hadamard_between(column);
      for (int i = 0; i < kFirst; ++i)
        store(out + (k + i) * kBlock + j * kLanes, kFits<N> ? finish(column[i]) : column[i]);
    }
  }
  if constexpr (!kFits<N>) hadamard_columns<N, kFirst>(out, finish);
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
