// Memory of several devices that a kernel on each of them reaches, and how warps on different devices wait for each other.
#pragma once

#include "launch.cuh"
#include "two_shot_arguments.h"

namespace fl {

// Tests bring their own of these: there what is written to another device arrives late, and in any order.
#ifndef FL_PEERS_ON_HOST
// All that the warp has written before it, on whichever device, is there for whoever sees the flag.
FL_DEVICE void raise_flag(uint32_t *flag, uint32_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#endif
}

FL_DEVICE uint32_t look_at_flag(const uint32_t *flag) {
  uint32_t value = 0;
#ifdef __CUDA_ARCH__
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
#endif
  return value;
}

// The flag alone: it orders nothing, and leaves what the multiprocessor has in its cache.
FL_DEVICE uint32_t glance_at_flag(const uint32_t *flag) {
  uint32_t value = 0;
#ifdef __CUDA_ARCH__
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
#endif
  return value;
}

FL_DEVICE bool is_stopped(const uint32_t *stop) {
  uint32_t value = 0;
#ifdef __CUDA_ARCH__
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(stop) : "memory");
#endif
  return value != 0;
}
#endif

// The memory of every rank, as this device addresses it. Each begins with numbers:
//
//   rounds[warp]               how many rounds a warp of this rank has had, in all calls
//   flags[phase][warp][rank]   the last round for which that rank's warp has raised the flag here
//
// In its first half behind them lie the parts that others have sent of this rank's share, in the second the sums of all
// shares: places that no call moves. So what a rank writes for its next call meets nothing that another still reads:
//
//   - A rank begins a call when its last one has ended, and then every warp of every rank has summed: parts are free.
//   - A warp sends a sum after it has heard from all ranks in this call, so their last one has ended: sums are free.
struct Peers {
  int rank, size, warps;  // `warps` has places in each memory, used or not
  int64_t half;           // bytes of a half
  int64_t capacity;       // bytes of a message
  uint8_t *memory[FL_MAX_PEERS];
  const uint32_t *stop;

  Peers(const fl_spec &spec, int64_t chunk, const fl_peers &given)
      : rank(given.rank),
        size(given.size),
        warps(given.warps),
        capacity(peer_message_bytes(spec, chunk)),
        stop(given.stop) {
    half = (given.bytes - peer_numbers(warps, size)) / 2 / 128 * 128;
    for (int at = 0; at < size; ++at) memory[at] = static_cast<uint8_t *>(given.memory[at]);
  }

  FL_DEVICE uint32_t *round_of(int64_t warp) const { return reinterpret_cast<uint32_t *>(memory[rank]) + warp; }
  FL_DEVICE uint32_t *flag(int at, int phase, int64_t warp, int from) const {
    return reinterpret_cast<uint32_t *>(memory[at]) + warps + (phase * int64_t(warps) + warp) * size + from;
  }
  FL_HD uint8_t *part(int at, int from) const { return memory[at] + peer_numbers(warps, size) + from * capacity; }
  FL_HD uint8_t *sum(int at, int from) const { return part(at, from) + half; }

  // Tells the same warp of all other ranks that what this warp has written for them is there.
  FL_DEVICE void tell(int phase, int64_t warp, uint32_t round, int lane) const {
    meet();
    if (lane < size && lane != rank) raise_flag(flag(lane, phase, warp, rank), round);
  }

  // Waits until all of them have told; false: the host has given up.
  FL_DEVICE bool hear(int phase, int64_t warp, uint32_t round, int lane) const {
    bool heard = true;
    if (lane < size && lane != rank) {
      const uint32_t *at = flag(rank, phase, warp, lane);
      // The host's word may lie in its own memory, far away.
      for (uint32_t looks = 1; heard && int32_t(glance_at_flag(at) - round) < 0; ++looks)
        heard = looks % 256 != 0 || !is_stopped(stop);
      // The number only grows. Whoever sees it here sees what was written before it was raised.
      look_at_flag(at);
    }
    const bool all = ballot(!heard) == 0;
    meet();
    return all;
  }
};

// The warp copies n bytes, all of them and both places in multiples of sizeof(T).
template <class T>
FL_DEVICE void copy_over_lanes(uint8_t *to, const uint8_t *from, int64_t n, int lane) {
  for (int64_t i = lane; i < n / int64_t(sizeof(T)); i += kLanes)
    reinterpret_cast<T *>(to)[i] = reinterpret_cast<const T *>(from)[i];
}

}  // namespace fl
