// As much of CUDA as csrc/cuda uses, for a CPU: the tests compile the kernels with g++ and this header in place of
// CUDA's own. A warp is 32 cooperating fibers that meet at every shuffle, so lanes exchange values as on a GPU; a lane
// that leaves the others alone at a shuffle, which on a GPU would be undefined behaviour, ends the process with a message.
// Warps run one after the other, or as far as a barrier, so shared memory is static, and an atomic operation a plain one. A
// warp that does not come to a barrier where others wait ends the process, too. Launches of several
// devices that wait for each other run together: devices.cpp.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static
#define __constant__

struct uint2 {
  alignas(8) unsigned x;
  unsigned y;
};

struct uint4 {
  alignas(16) unsigned x;
  unsigned y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = void *;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorNoDevice = 100 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

namespace cuda_on_host {

constexpr int kLanes = 32;
constexpr int kStackBytes = 1 << 18;

inline dim3 thread, block, grid;
inline cudaError_t next_error = cudaSuccess;  // what the next call that can fail reports

inline cudaError_t take_error() {
  const cudaError_t error = next_error;
  next_error = cudaSuccess;
  return error;
}

class Warp;
inline Warp *running = nullptr;

class Warp {
 public:
  // Runs body once in each lane; lane 0 has thread index first_thread.
  void run(unsigned first_thread, const std::function<void()> &body) {
    body_ = &body;
    first_thread_ = first_thread;
    finished_ = 0;
    for (unsigned &count : shuffles_) count = 0;
    lane_ = 0;
    go_on();
  }

  // Gives its turn back from within a lane, until go_on.
  __attribute__((noinline)) void pause() {
    if (!__builtin_setjmp(context_[lane_])) jump(caller_);
  }

  __attribute__((noinline)) void go_on() {
    running = this;
    if (!__builtin_setjmp(caller_)) enter(lane_);
  }

  // Lanes wait for each other, and then for the other warps of the block.
  void meet_all() {
    meet(0);
    if (lane_ == kLanes - 1) pause();
    meet(0);
  }

  bool is_done() const { return finished_ == kLanes; }
  int lane() const { return lane_; }

  uint32_t shuffle_xor(uint32_t value, int mask) { return take_from(meet(value), lane_ ^ mask); }

  uint32_t shuffle(uint32_t value, int lane) { return take_from(meet(value), lane % kLanes); }

  uint32_t ballot(bool vote) {
    const unsigned round = meet(vote);
    uint32_t votes = 0;
    for (int lane = 0; lane < kLanes; ++lane) votes |= take_from(round, lane) << lane;
    return votes;
  }

  static Warp &current() { return *running; }

 private:
  // swapcontext asks the kernel for signals at every turn, which is most of the time of a test; a jump does not.
  using Place = void *[5];

  [[noreturn]] __attribute__((noinline)) static void jump(Place &to) { __builtin_longjmp(to, 1); }

  // Goes to where the lane has left off; the first time, to its stack.
  [[noreturn]] void enter(int lane) {
    lane_ = lane;
    thread.x = first_thread_ + lane;
    if (begun_[lane]) jump(context_[lane]);
    begun_[lane] = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks_.get() + lane * kStackBytes;
    start.uc_stack.ss_size = kStackBytes;
    start.uc_link = nullptr;
    makecontext(&start, &Warp::run_lane, 0);
    setcontext(&start);
    std::abort();
  }

  // What is on a lane's stack: all bodies, one after the other.
  static void run_lane() {
    Warp &warp = current();
    const int lane = warp.lane_;
    while (true) {
      (*warp.body_)();
      if (++warp.finished_ != lane + 1) diverged();
      lane == kLanes - 1 ? warp.pause() : warp.resume(lane + 1);
    }
  }

  // Leaves a value for the others and waits for theirs; returns the number of the round.
  unsigned meet(uint32_t value) {
    const int lane = lane_;
    const unsigned round = ++shuffles_[lane];
    given_[round % 2][lane] = value;
    if (finished_) diverged();
    resume((lane + 1) % kLanes);
    return round;
  }

  uint32_t take_from(unsigned round, int other) const {
    if (shuffles_[other] < round || shuffles_[other] > round + 1) diverged();
    return given_[round % 2][other];
  }

  __attribute__((noinline)) void resume(int lane) {
    if (!__builtin_setjmp(context_[lane_])) enter(lane);
  }

  [[noreturn]] static void diverged() {
    std::fputs("lanes of a warp did not all take part in a shuffle\n", stderr);
    std::abort();
  }

  const std::function<void()> *body_ = nullptr;
  unsigned first_thread_ = 0;
  int lane_ = 0, finished_ = 0;
  unsigned shuffles_[kLanes] = {};
  uint32_t given_[2][kLanes] = {};
  Place caller_, context_[kLanes];
  bool begun_[kLanes] = {};
  std::unique_ptr<char[]> stacks_{new char[kLanes * kStackBytes]};
};

// Runs all blocks, or keeps them for devices_run.
void launch(dim3 blocks, unsigned threads, const std::function<void()> &body);

// Tells the device on which a warp runs that the lane has met the others.
void has_met(int lane);

}  // namespace cuda_on_host

#define threadIdx cuda_on_host::thread
#define blockIdx cuda_on_host::block
#define gridDim cuda_on_host::grid
#define FL_LAUNCH(kernel, grid, block, stream, ...) \
  ((void)(stream), cuda_on_host::launch(grid, block, [=] { kernel(__VA_ARGS__); }))

inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int mask) {
  return cuda_on_host::Warp::current().shuffle_xor(value, mask);
}

inline uint32_t __shfl_sync(unsigned, uint32_t value, int lane) {
  return cuda_on_host::Warp::current().shuffle(value, lane);
}

inline uint32_t __ballot_sync(unsigned, int vote) { return cuda_on_host::Warp::current().ballot(vote != 0); }

inline void __threadfence() {}

inline void __syncwarp() {
  cuda_on_host::has_met(cuda_on_host::Warp::current().lane());
  cuda_on_host::Warp::current().shuffle_xor(0, 0);
}

inline void __syncthreads() { cuda_on_host::Warp::current().meet_all(); }

inline long long __double_as_longlong(double v) {
  long long bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

inline double __longlong_as_double(long long bits) {
  double v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(int(v)); }

template <class T>
inline T atomicAdd(T *p, T value) {
  const T old = *p;
  *p += value;
  return old;
}

inline uint32_t atomicOr(uint32_t *p, uint32_t value) {
  const uint32_t old = *p;
  *p |= value;
  return old;
}

inline uint32_t atomicMax(uint32_t *p, uint32_t value) {
  const uint32_t old = *p;
  if (value > old) *p = value;
  return old;
}

template <class T>
inline T atomicMin(T *p, T value) {
  const T old = *p;
  if (value < old) *p = value;
  return old;
}

// Byte i of the result is the byte of b:a (a lowest) that nibble i of the selector names.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cuda_on_host::take_error();
}

// One multiprocessor: grids stay small, so the kernels' strides over the grid are taken.
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t) {
  std::memset(p, value, n);
  return cuda_on_host::take_error();
}

inline cudaError_t cudaMemset2DAsync(void *p, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) std::memset(static_cast<char *>(p) + row * pitch, value, width);
  return cuda_on_host::take_error();
}

inline cudaError_t cudaGetLastError() { return cuda_on_host::take_error(); }
inline const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorNoDevice ? "cudaErrorNoDevice" : "error";
}
inline const char *cudaGetErrorString(cudaError_t) { return "simulated"; }

// What csrc/cuda/peers.cuh brings for a device.
#define FL_PEERS_ON_HOST

namespace fl {

void raise_flag(uint32_t *flag, uint32_t value);
uint32_t look_at_flag(const uint32_t *flag);
uint32_t glance_at_flag(const uint32_t *flag);
bool is_stopped(const uint32_t *stop);

}  // namespace fl
