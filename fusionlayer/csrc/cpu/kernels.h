// The table of kernels that each instruction set offers, and what they work on.
#pragma once

#include "fusionlayer_codec.h"
#include "rng.h"

namespace fl {

// One call of a verb of the C ABI; a verb leaves what it lacks null.
struct Job {
  const fl_spec *spec;
  RngKey key;  // of spec->seed
  const fl_messages *in, *out;
  const void *x;
  float *residual;
  void *y;
  bool add;
  bool streamed;  // results are large: they need not pass through the caches
};

// Work is counted in units that no two threads share: groups, or kCastUnit elements. The units of encode and decode run
// over all messages, those of decode_sum and recode over one.
constexpr int kCastUnit = 512;

// Kernels walk through L1 in tiles of whole units, of at most as many elements.
constexpr int kMaxTile = 4096;

struct Kernels {
  using Verb = void(const Job &job, int64_t begin, int64_t end);
  const char *name;
  Verb *encode, *decode, *decode_sum, *recode;
};

namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace baseline {
extern const Kernels kernels;
}

}  // namespace fl
