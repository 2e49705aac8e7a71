// Launching: how many warps, and what the C ABI calls.
#pragma once

#include "codecs/names.h"
#include "fusionlayer_codec.h"
#include "warp.cuh"

namespace fl {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kLanes;

// The least number of blocks on a multiprocessor, for kernels that add messages up. The more blocks, the fewer registers a
// thread has. With four on Hopper (measured: up to a tenth faster) and three elsewhere, no value leaves the registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kSumBlocks = 4;
#else
constexpr int kSumBlocks = 3;
#endif

// The grid for `warps` warps' work in each of `messages` messages: x strides over the work of a message, y over messages.
// Small work gets a warp each; large work `a_multiprocessor` blocks for every multiprocessor, which fill it a few times.
struct Grid {
  dim3 blocks;
  cudaError_t error;

  Grid(int64_t warps, int64_t messages, int a_multiprocessor = 32);
};

// Launches `kernel` on `a` over a grid, with so many threads in a block.
template <class Arguments>
cudaError_t launch_over(const Grid &grid, void (*kernel)(Arguments), const Arguments &a, cudaStream_t stream,
                        int threads = kThreads) {
  if (grid.error) return grid.error;
  FL_LAUNCH(kernel, grid.blocks, threads, stream, a);
  return cudaGetLastError();
}

// How many blocks encode and decode elements best (measured on an H100): those of f32 wait for memory, where more blocks
// end more evenly; those of 16 bits compute, and gain from a block that goes on to elements which it has asked for before.
inline int blocks_for(uint32_t dtype) { return dtype == FL_F32 ? 64 : 32; }

FL_DEVICE int lane_index() { return int(threadIdx.x) % kLanes; }
FL_DEVICE int64_t warp_index() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes; }
FL_DEVICE int64_t warp_count() { return int64_t(gridDim.x) * kWarps; }

// The status of a verb; where it is FL_DEVICE_ERROR, fl_last_error has the text.
int finish(cudaError_t error);

inline cudaStream_t as_stream(void *stream) { return static_cast<cudaStream_t>(stream); }

// The verbs of a codec, on checked arguments with numel > 0 and something to do. What it lacks is null, and not done here.
struct TwoShot;
struct Peers;

struct Encoders {
  cudaError_t (*encode)(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                        cudaStream_t stream);
  cudaError_t (*recode)(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                        const fl_messages &out, cudaStream_t stream);
  cudaError_t (*two_shot)(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream);
};

struct Decoders {
  cudaError_t (*decode)(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
  cudaError_t (*decode_sum)(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
};

// Each codec's folder defines both.
#define FL_DECLARE(name)                 \
  extern const Encoders name##_encoders; \
  extern const Decoders name##_decoders;
FL_CODECS(FL_DECLARE)
#undef FL_DECLARE

// Bytes of workspace of the verbs that need one.
int64_t stats_workspace(int64_t numel);
int64_t kth_workspace();
int64_t threshold_workspace(int64_t numel);
int64_t encode_workspace(int64_t numel);
int64_t delta_workspace(int64_t numel, int element_bytes);

}  // namespace fl
