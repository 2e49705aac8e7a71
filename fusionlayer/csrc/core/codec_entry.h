// What shared code asks of a codec. Each codec's folder has a `codec.h` with the answers, and codecs/names.h names them all.
// Host only.
#pragma once

#include "fusionlayer_codec.h"

namespace fl {

constexpr int64_t kMaxElements = int64_t(1) << 56;  // products of sizes below stay far from overflow

// Shared verbs, as bits, and what they can do besides.
constexpr uint32_t kEncodes = 1, kDecodes = 2, kSums = 4, kRecodes = 8;
constexpr uint32_t kFeedback = 16;  // encode takes a residual
constexpr uint32_t kTwoShot = 32;   // sums over ranks in one launch
constexpr uint32_t kDense = kEncodes | kDecodes | kSums | kRecodes | kFeedback;

struct Codec {
  int planes;
  int64_t (*bytes)(const fl_spec &spec, int plane);  // of a plane of one message
  int (*check)(const fl_spec &spec);                 // a status; type and number of elements are good
  uint32_t (*verbs)(const fl_spec &spec);
};

inline uint32_t dense_verbs(const fl_spec &) { return kDense; }

inline int64_t element_size(uint32_t dtype) { return dtype == FL_F32 ? 4 : 2; }
inline bool known_dtype(uint32_t dtype) { return dtype <= FL_F16; }

inline bool power_of_two_within(int64_t v, int64_t least, int64_t most) {
  return v >= least && v <= most && !(v & (v - 1));
}

// Of codecs whose param[1] is the size of a group.
inline int64_t group_count(const fl_spec &spec) {
  const int64_t group = spec.param[1];
  return (spec.numel + group - 1) / group;
}

// Numbers of a seed's sequence are counted from a group on.
inline bool starts_group(const fl_spec &spec, int64_t group) { return spec.offset >= 0 && spec.offset % group == 0; }

}  // namespace fl
