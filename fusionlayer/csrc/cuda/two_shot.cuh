// A sum over ranks in one launch on each: every value is quantised twice, as by the collective two_shot, and to its bits.
#pragma once

#include "peers.cuh"

namespace fl {

constexpr int kResident = 2;  // blocks of the kernel that a multiprocessor runs at a time, at least

// How a tensor is cut into shares, one for each rank.
struct Shares {
  int64_t numel;  // of the tensor
  int64_t chunk;  // of a share, but for the last ones

  FL_HD int64_t start(int rank) const { return rank * chunk < numel ? rank * chunk : numel; }
  FL_HD int64_t length(int rank) const { return start(rank + 1) - start(rank); }
};

// fl_two_shot, with checked arguments.
struct TwoShot {
  Shares shares;
  uint64_t sum_seed;
  const void *x;
  void *out;
  float *residual;
};

// A warp has the same spans of all shares, on every rank, so warps wait for no others than their like. It goes through
// three steps a round behind each other, so that what it waits for was sent a round ago:
//
//   - It encodes its span of each share into the memory of the rank whose share it is.
//   - It sums what has come for its own share, encodes the sum and sends it to all.
//   - It decodes the sums of all shares, its own like the others: all ranks decode the same bytes.
//
// Flags count rounds, which each warp keeps in its own memory: a graph that is replayed goes on counting.
template <class Coder>
__global__ void __launch_bounds__(kThreads, kResident) two_shot_kernel(const Coder coder, const Peers peers) {
  const int lane = lane_index(), rank = peers.rank, size = peers.size;
  const int64_t warp = warp_index(), step = warp_count(), spans = coder.spans();
  const int64_t rounds = warp < spans ? (spans - warp + step - 1) / step : 0;
  if (rounds == 0) return;
  const uint32_t before = *peers.round_of(warp);
  for (int64_t i = 0; i < rounds + 2; ++i) {
    if (i < rounds) {
      // Each rank begins with another, so that no device gets everything at once.
      for (int other = 1; other <= size; ++other) {
        const int to = rank + other < size ? rank + other : rank + other - size;
        coder.encode(to, peers.part(to, rank), warp + i * step);
      }
      peers.tell(0, warp, before + uint32_t(i) + 1, lane);
    }
    if (i >= 1 && i <= rounds) {
      const int64_t span = warp + (i - 1) * step;
      if (!peers.hear(0, warp, before + uint32_t(i), lane)) return;
      coder.sum(rank, peers.sum(rank, rank), span);
      meet();
      for (int to = 0; to < size; ++to)
        if (to != rank) coder.copy(rank, peers.sum(to, rank), peers.sum(rank, rank), span, lane);
      peers.tell(1, warp, before + uint32_t(i), lane);
    }
    if (i >= 2) {
      if (!peers.hear(1, warp, before + uint32_t(i) - 1, lane)) return;
      for (int of = 0; of < size; ++of) coder.decode(of, peers.sum(rank, of), warp + (i - 2) * step, lane);
    }
  }
  if (lane == 0) *peers.round_of(warp) = before + uint32_t(rounds);
}

template <class Coder>
cudaError_t launch_two_shot(const Coder &coder, const Peers &peers, cudaStream_t stream) {
  const int64_t wanted = (coder.spans() + kWarps - 1) / kWarps, most = peers.warps / kWarps;
  FL_LAUNCH(two_shot_kernel<Coder>, dim3(unsigned(wanted < most ? wanted : most)), kThreads, stream, coder, peers);
  return cudaGetLastError();
}

cudaError_t int_two_shot(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream);
cudaError_t block_two_shot(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream);

}  // namespace fl
