// The table of kernels that each instruction set offers, and what they work on.
#pragma once

#include <atomic>

#include "codecs/sparse/sparse.h"
#include "fusionlayer_codec.h"
#include "rng.h"

namespace fl {

// One call of a verb of the C ABI; a verb leaves what it lacks null.
struct Job {
  const fl_spec *spec;
  const fl_spec *source;  // fl_recode_from: of `in`
  RngKey key;             // of spec->seed
  const fl_messages *in, *out;
  const void *x;
  float *residual;
  void *y;
  bool add;
  bool look;      // encode and recode of FL_SCALE_MESSAGE, first pass: only the largest magnitude of each message
  bool streamed;  // results are large: they need not pass through the caches
  const void *prepared;  // what a codec has made for its kernels
};

// Work is counted in units that no two threads share: groups, or kCastUnit elements. The units of encode and decode run
// over all messages, those of decode_sum and recode over one.
constexpr int kCastUnit = 512;

// Kernels walk through L1 in tiles of whole units, of at most as many elements.
constexpr int kMaxTile = 4096;

// fl_accumulate; with a velocity fl_accumulate_momentum.
struct Accumulation {
  const void *x;
  uint32_t dtype;
  float scale, momentum;
  bool nesterov;
  float *velocity, *acc;
  int64_t numel;
};

// The magnitudes between two, both included, which are gathered while those above are counted.
struct Bracket {
  uint32_t low, high;
  uint32_t *gathered;
  int64_t room;
  std::atomic<int64_t> count{0}, above{0};  // `count` goes on beyond `room`
};

// One fl_sparse_encode, superblock by superblock: mark, settle, emit.
struct Selection {
  SparseShape shape;
  bool random;
  uint64_t limit;     // random: numbers below it are selected
  int32_t threshold;  // else: magnitudes above it
  bool ties;          // and some that equal it
  RngKey key;
  uint64_t offset;
  const void *x;
  uint32_t dtype;
  float scale;
  float *acc, *clear;
  SparsePlanes out;

  // Workspace. A bit for each element, blocks of 256 filled up: selected; equal to the threshold.
  uint64_t *marked, *equal;
  struct Counts {
    int64_t first, ties;  // number of the first pair; how many that equal the threshold may go
    int32_t marked, equal;
    uint32_t largest;  // magnitude
  } *counts;
};

constexpr int kWord = 64;  // elements of a word of marks

// A codec's verbs for one instruction set, on checked arguments and their Job. What it lacks is null. `own` are those that it
// alone has, numbered in its folder.
struct CodecVerbs {
  int (*encode)(Job &job), (*decode)(Job &job), (*decode_sum)(Job &job), (*recode)(Job &job);
  int (*own[2])(Job &job);
};

struct Kernels {
  using Verb = void(const Job &job, int64_t begin, int64_t end);
  const char *name;
  const CodecVerbs *const *codecs;  // by enum fl_codec

  void (*accumulate)(const Accumulation &job, int64_t begin, int64_t end);  // units of kCastUnit
  Magnitudes (*stats)(const float *run, int n, uint32_t above);
  void (*count_above)(const float *x, int64_t n, const int32_t *bounds, int groups, int64_t *counts);
  void (*gather)(const float *x, int64_t n, Bracket &bracket);
  void (*mark)(const Selection &selection, int64_t superblock);    // acc += scale * x, marks and their counts
  void (*settle)(const Selection &selection, int64_t superblock);  // which of the marked go
  void (*emit)(const Selection &selection, int64_t superblock);    // their pairs, and what is kept of them
  Verb *sparse_decode_sum;                                         // units of a superblock
  bool (*sparse_valid)(const Job &job, int64_t begin, int64_t end);
};

constexpr int kBoundGroup = 4;  // count_above takes bounds in groups

namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace baseline {
extern const Kernels kernels;
}

// The table in use.
const Kernels &kernels();

}  // namespace fl
