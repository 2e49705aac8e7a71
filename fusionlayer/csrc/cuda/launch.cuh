// Launching: how many warps, and what the C ABI calls.
#pragma once

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

// How many blocks encode and decode elements best (measured on an H100): those of f32 wait for memory, where more blocks
// end more evenly; those of 16 bits compute, and gain from a block that goes on to elements which it has asked for before.
inline int blocks_for(uint32_t dtype) { return dtype == FL_F32 ? 64 : 32; }

FL_DEVICE int lane_index() { return int(threadIdx.x) % kLanes; }
FL_DEVICE int64_t warp_index() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes; }
FL_DEVICE int64_t warp_count() { return int64_t(gridDim.x) * kWarps; }

// The status of a verb; where it is FL_DEVICE_ERROR, fl_last_error has the text.
int finish(cudaError_t error);

inline cudaStream_t as_stream(void *stream) { return static_cast<cudaStream_t>(stream); }

// One verb of one codec on checked arguments with numel > 0 and something to do. At most one launch each.
cudaError_t cast_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                        cudaStream_t stream);
cudaError_t cast_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t cast_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t cast_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                        const fl_messages &out, cudaStream_t stream);

cudaError_t int_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream);
cudaError_t int_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t int_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t int_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                       const fl_messages &out, cudaStream_t stream);

cudaError_t int_recode_from(const fl_spec &source, const fl_messages &in, const fl_spec &spec, float *residual,
                            const fl_messages &out, cudaStream_t stream);
cudaError_t int_encode_difference(const fl_spec &spec, const float *x, const void *base, const fl_messages &out,
                                  cudaStream_t stream);

// Two launches to encode where all of a message shares a scale.
cudaError_t block_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                         cudaStream_t stream);
cudaError_t block_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t block_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t block_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                         const fl_messages &out, cudaStream_t stream);

// Five launches to encode: where escapes begin is known when all are counted.
cudaError_t zip_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream);
cudaError_t zip_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t zip_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);

// Five launches to encode, likewise.
cudaError_t rans_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                        cudaStream_t stream);
cudaError_t rans_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);

cudaError_t thc_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream);
cudaError_t thc_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t thc_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t thc_rms(const fl_spec &spec, const void *x, const float *residual, float *rms, cudaStream_t stream);
cudaError_t thc_add_codes(const fl_spec &spec, const fl_messages &in, uint8_t *out, cudaStream_t stream);

// Two launches to encode where tokens are coarse: which ones is known when all of a section were looked at.
cudaError_t tah_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream);
cudaError_t tah_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t tah_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t tah_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                       const fl_messages &out, cudaStream_t stream);

cudaError_t dynamiq_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                           cudaStream_t stream);
cudaError_t dynamiq_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t dynamiq_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t dynamiq_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                           const fl_messages &out, cudaStream_t stream);

cudaError_t chunked_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                           cudaStream_t stream);
cudaError_t chunked_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t chunked_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t chunked_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                           const fl_messages &out, cudaStream_t stream);

cudaError_t onebit_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                          cudaStream_t stream);
cudaError_t onebit_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t onebit_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t onebit_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                          const fl_messages &out, cudaStream_t stream);

cudaError_t qsdp_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                        cudaStream_t stream);
cudaError_t qsdp_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream);
cudaError_t qsdp_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);
cudaError_t qsdp_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                        const fl_messages &out, cudaStream_t stream);

// One message after the other: two launches each to encode, two or three to decode.
cudaError_t delta_encode(const fl_spec &spec, const void *x, const void *base, const fl_messages &out,
                         uint8_t *workspace, cudaStream_t stream);
cudaError_t delta_decode(const fl_spec &spec, const fl_messages &in, const void *base, void *out, uint8_t *workspace,
                         int32_t *status, cudaStream_t stream);

// Bytes of workspace of the verbs that need one.
int64_t stats_workspace(int64_t numel);
int64_t kth_workspace();
int64_t threshold_workspace(int64_t numel);
int64_t encode_workspace(int64_t numel);
int64_t delta_workspace(int64_t numel, int element_bytes);

cudaError_t sparse_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream);

}  // namespace fl
