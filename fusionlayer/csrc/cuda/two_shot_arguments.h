// Sums over ranks in one launch: sizes and checks. Host, but for where things begin.
#pragma once

#include "arguments.h"
#include "portable.h"

namespace fl {

constexpr int kPeerPhases = 2;  // what a warp tells others in a round: its parts are there; its sum is there

// Where something begins in a rank's memory.
FL_HD int64_t peer_aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

// Bytes of the numbers with which a rank's memory begins: rounds and flags of `warps` warps.
FL_HD int64_t peer_numbers(int64_t warps, int64_t size) { return peer_aligned(4 * warps * (1 + kPeerPhases * size)); }

// Bytes of a message of `chunk` elements there.
inline int64_t peer_message_bytes(fl_spec spec, int64_t chunk) {
  spec.numel = chunk;
  return peer_aligned(plane_bytes(spec, 0)) + peer_aligned(plane_bytes(spec, 1));
}

inline int check_two_shot_spec(const fl_spec *spec, int64_t chunk, int32_t size, int32_t warps) {
  if (const int bad = check_verbs(spec, kTwoShot)) return bad;
  if (size < 1 || size > FL_MAX_PEERS || warps < 4 || warps % 4 || chunk < 1 || chunk > kMaxElements)
    return FL_BAD_ARGUMENT;
  return chunk % spec->param[1] || chunk < (spec->numel + size - 1) / size ? FL_BAD_ARGUMENT : FL_OK;
}

inline int64_t two_shot_bytes(const fl_spec &spec, int64_t chunk, int32_t size, int32_t warps) {
  return peer_numbers(warps, size) + 2 * size * peer_message_bytes(spec, chunk);
}

inline int check_two_shot(const fl_spec *spec, int64_t chunk, const void *x, const void *out, const float *residual,
                          const fl_peers *peers) {
  if (!peers) return FL_BAD_ARGUMENT;
  if (const int bad = check_two_shot_spec(spec, chunk, peers->size, peers->warps)) return bad;
  if (peers->rank < 0 || peers->rank >= peers->size || !peers->stop || !aligned(peers->stop, 4)) return FL_BAD_ARGUMENT;
  for (int rank = 0; rank < peers->size; ++rank)
    if (!peers->memory[rank] || !aligned(peers->memory[rank], kPlaneAlignment)) return FL_BAD_ARGUMENT;
  if (peers->bytes < two_shot_bytes(*spec, chunk, peers->size, peers->warps)) return FL_BAD_ARGUMENT;
  const int64_t size = element_size(spec->dtype);
  return first_error(first_error(check_array(x, spec->numel, size), check_array(out, spec->numel, size)),
                     check_optional(residual, spec->numel, 4));
}

}  // namespace fl
