// fl_accumulate and fl_accumulate_momentum.
#include "checks.h"
#include "cuda/strip_io.cuh"
#include "sparse.h"

namespace fl {
namespace {

struct Accumulation {
  int64_t numel;
  const void *x;
  uint32_t dtype;
  float scale, momentum;
  bool nesterov;
  float *velocity;
  float *acc;

  FL_HD int64_t strips() const { return (numel + kStrip - 1) / kStrip; }
};

FL_DEVICE uint32_t *as_bits(float *x) { return reinterpret_cast<uint32_t *>(x); }

template <bool kMomentum>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const Accumulation a) {
  for (int64_t strip = warp_index(); strip < a.strips(); strip += warp_count()) {
    float x[kHeld];
    uint32_t acc[kHeld], velocity[kHeld];
    load_values(a.dtype, a.x, a.numel, strip, x);
    load_strip<uint32_t>(as_bits(a.acc), a.numel, strip, acc);
    if (kMomentum) load_strip<uint32_t>(as_bits(a.velocity), a.numel, strip, velocity);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float sum = bits_float(acc[i]);
      if (kMomentum) {
        float u = bits_float(velocity[i]);
        add_momentum(a.scale * x[i], a.momentum, a.nesterov, u, sum);
        velocity[i] = float_bits(u);
      } else {
        sum = accumulated(sum, x[i], a.scale);
      }
      acc[i] = float_bits(sum);
    }
    store_strip(as_bits(a.acc), a.numel, strip, acc);
    if (kMomentum) store_strip(as_bits(a.velocity), a.numel, strip, velocity);
  }
}

int launch(void (*kernel)(Accumulation), const Accumulation &a, void *stream) {
  if (a.numel == 0) return FL_OK;
  return finish(launch_over(Grid(a.strips(), 1), kernel, a, as_stream(stream)));
}

}  // namespace
}  // namespace fl

extern "C" {

int fl_accumulate(uint32_t dtype, const void *x, float scale, int64_t numel, float *acc, void *stream) {
  if (const int bad = fl::check_accumulate(dtype, x, numel, acc)) return bad;
  return fl::launch(fl::accumulate_kernel<false>, {numel, x, dtype, scale, 0.0f, false, nullptr, acc}, stream);
}

int fl_accumulate_momentum(uint32_t dtype, const void *x, float scale, float momentum, int nesterov, int64_t numel,
                           float *velocity, float *acc, void *stream) {
  if (const int bad = fl::check_accumulate(dtype, x, numel, acc)) return bad;
  if (const int bad = fl::check_array(velocity, numel, 4)) return bad;
  const fl::Accumulation a{numel, x, dtype, scale, momentum, nesterov != 0, velocity, acc};
  return fl::launch(fl::accumulate_kernel<true>, a, stream);
}

}  // extern "C"
