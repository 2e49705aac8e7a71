// What a warp can do together: 16-byte accesses, and shuffles, which all 32 lanes take part in.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define FL_DEVICE __device__ __forceinline__

// A build that has no <<<>>> (tests run these sources on a CPU) brings its own.
#ifndef FL_LAUNCH
#define FL_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#endif

namespace fl {

constexpr int kLanes = 32;

// Returns v so that the compiler knows nothing of its value. Otherwise the compiler would compute the addresses of every
// single element of a ragged or misaligned access ahead of the loop, and fill the registers of the common path with them.
FL_DEVICE int64_t opaque(int64_t v) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(v));
#endif
  return v;
}

// The unit of global accesses.
struct Chunk {
  uint32_t word[4];
};

FL_DEVICE Chunk load_chunk(const void *p) {
  const uint4 u = *static_cast<const uint4 *>(p);
  return {{u.x, u.y, u.z, u.w}};
}

FL_DEVICE void store_chunk(void *p, const Chunk &c) {
  *static_cast<uint4 *>(p) = make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]);
}

// Brings n bytes, at most 4096, which the warp will load next, into the device's cache.
FL_DEVICE void fetch_ahead(const void *p, int64_t n, int lane) {
  const volatile uint8_t *line = static_cast<const uint8_t *>(p) + 128 * lane;
  if (128 * lane >= n) return;
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#else
  static_cast<void>(*line);  // it is there
#endif
}

FL_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

FL_DEVICE uint32_t shuffle(uint32_t v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

// Bit l: lane l's vote.
FL_DEVICE uint32_t ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }

// Lanes see what others wrote to shared memory before it.
FL_DEVICE void meet() { __syncwarp(); }

// All warps of a thread block see what others wrote to shared memory before it. No warp may leave the others alone at it.
FL_DEVICE void meet_all() { __syncthreads(); }

// The bits of a mask that belong to lower lanes.
FL_DEVICE uint32_t below(uint32_t mask, int lane) { return mask & ((1u << lane) - 1); }

FL_DEVICE int64_t shuffle_xor(int64_t v, int mask) {
  const uint32_t low = shuffle_xor(uint32_t(uint64_t(v)), mask), high = shuffle_xor(uint32_t(uint64_t(v) >> 32), mask);
  return int64_t(uint64_t(high) << 32 | low);
}

FL_DEVICE int64_t shuffle(int64_t v, int lane) {
  const uint32_t low = shuffle(uint32_t(uint64_t(v)), lane), high = shuffle(uint32_t(uint64_t(v) >> 32), lane);
  return int64_t(uint64_t(high) << 32 | low);
}

FL_DEVICE double shuffle_xor(double v, int mask) {
  return __longlong_as_double(shuffle_xor(int64_t(__double_as_longlong(v)), mask));
}

// The sum over all lanes, in all of them.
FL_DEVICE int64_t sum_over_lanes(int64_t v) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) v += shuffle_xor(v, mask);
  return v;
}

// The same, of small numbers.
FL_DEVICE int32_t sum_of_lanes(int32_t v) {
#ifdef __CUDA_ARCH__
  return __reduce_add_sync(0xffffffffu, v);
#else
  for (int mask = 1; mask < kLanes; mask *= 2) v += int32_t(shuffle_xor(uint32_t(v), mask));
  return v;
#endif
}

// The largest of all lanes' numbers, in all of them.
FL_DEVICE uint32_t largest_of_lanes(uint32_t v) {
#ifdef __CUDA_ARCH__
  return __reduce_max_sync(0xffffffffu, v);
#else
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const uint32_t other = shuffle_xor(v, mask);
    v = other > v ? other : v;
  }
  return v;
#endif
}

// The sum over lower lanes.
FL_DEVICE int64_t sum_before(int64_t v, int lane) {
  int64_t sum = 0, group = v;  // over the lower lanes of a group of lanes; over all of the group
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const int64_t other = shuffle_xor(group, mask);
    sum += lane & mask ? other : 0;
    group += other;
  }
  return sum;
}

// The sum over lower lanes; `all` becomes that over all lanes.
FL_DEVICE uint32_t count_before(uint32_t v, int lane, uint32_t &all) {
  uint32_t sum = 0;
  all = v;
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const uint32_t other = shuffle_xor(all, mask);
    sum += lane & mask ? other : 0;
    all += other;
  }
  return sum;
}

}  // namespace fl
