#pragma once

#include <time.h>

#include <cstdint>

namespace fl::sockets {

constexpr int64_t kMillisecond = 1000000;

// Nanoseconds of CLOCK_MONOTONIC.
inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1000 * kMillisecond + time.tv_nsec;
}

}  // namespace fl::sockets
