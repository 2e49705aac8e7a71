#include "launch.cuh"

namespace fl {
namespace {

constexpr int64_t kMaxGridY = 65535;

}  // namespace

Grid::Grid(int64_t warps, int64_t messages, int a_multiprocessor) {
  int device = 0, multiprocessors = 0;
  error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error) return;
  const int64_t y = messages < kMaxGridY ? messages : kMaxGridY;
  const int64_t wanted = (warps + kWarps - 1) / kWarps;
  const int64_t most = (int64_t(multiprocessors) * a_multiprocessor + y - 1) / y;
  blocks = dim3(unsigned(wanted < most ? wanted : most), unsigned(y));
}

}  // namespace fl
