// A sum over ranks in one launch on each: every value is quantised twice, as by the collective two_shot, and to its bits.
#pragma once

#include "peers.cuh"

namespace fl {

constexpr int kResident = 3;  // blocks of the kernel that a multiprocessor runs at a time, but for coders that say less
constexpr int kLeastRounds = 4;  // before rounds have several spans
constexpr int kMostSpans = 4;

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

// How spans are cut into rounds. A round has several where there are many: before a flag is raised a warp waits until all that
// it has written has arrived, which takes as long for one span as for several.
struct Rounds {
  int64_t spans;  // of a share
  int each;       // spans of a round, but for the last one

  Rounds(int64_t spans, int warps) : spans(spans) {
    const int64_t many = spans / (int64_t(warps) * kLeastRounds);
    each = many < 1 ? 1 : many < kMostSpans ? int(many) : kMostSpans;
  }

  FL_HD int64_t parts() const { return (spans + each - 1) / each; }
};

// A warp has the same spans of all shares, on every rank, so warps wait for no others than their like. It goes through
// three steps a round behind each other, so that what it waits for was sent a round ago:
//
//   - It encodes its spans of each share into the memory of the rank whose share it is.
//   - It sums what has come for its own share, encodes the sum and sends it to all.
//   - It decodes the sums of all shares, its own like the others: all ranks decode the same bytes.
//
// Flags count rounds, which each warp keeps in its own memory: a graph that is replayed goes on counting.
template <class Coder>
__global__ void __launch_bounds__(kThreads, Coder::kBlocks)
    two_shot_kernel(const Coder coder, const Peers peers, const Rounds all) {
  const int lane = lane_index(), rank = peers.rank, size = peers.size;
  const int warp = int(warp_index()), step = int(warp_count());
  const int rounds = warp < all.parts() ? int((all.parts() - warp + step - 1) / step) : 0;
  if (rounds == 0) return;
  const auto each_span = [&](int round, const auto &work) {
    const int64_t begin = (warp + int64_t(round) * step) * all.each, left = all.spans - begin;
    const int count = left < all.each ? int(left) : all.each;
#pragma unroll 1
    for (int i = 0; i < count; ++i) work(begin + i);
  };
  const uint32_t before = *peers.round_of(warp);
#pragma unroll 1
  for (int i = 0; i < rounds + 2; ++i) {
    if (i < rounds) {
      // Each rank begins with another, so that no device gets everything at once.
#pragma unroll 1
      for (int other = 1; other <= size; ++other) {
        const int to = rank + other < size ? rank + other : rank + other - size;
        each_span(i, [&](int64_t span) { coder.encode(to, peers.part(to, rank), span); });
      }
      peers.tell(0, warp, before + uint32_t(i) + 1, lane);
    }
    if (i >= 1 && i <= rounds) {
      if (!peers.hear(0, warp, before + uint32_t(i), lane)) return;
      each_span(i - 1, [&](int64_t span) { coder.sum(rank, peers.sum(rank, rank), span); });
      meet();
      each_span(i - 1, [&](int64_t span) {
        for (int to = 0; to < size; ++to)
          if (to != rank) coder.copy(rank, peers.sum(to, rank), peers.sum(rank, rank), span, lane);
      });
      peers.tell(1, warp, before + uint32_t(i), lane);
    }
    if (i >= 2) {
      if (!peers.hear(1, warp, before + uint32_t(i) - 1, lane)) return;
#pragma unroll 1
      for (int of = 0; of < size; ++of)
        each_span(i - 2, [&](int64_t span) { coder.decode(of, peers.sum(rank, of), span, lane); });
    }
  }
  if (lane == 0) *peers.round_of(warp) = before + uint32_t(rounds);
}

template <class Coder>
cudaError_t launch_two_shot(const Coder &coder, const Peers &peers, cudaStream_t stream) {
  const Rounds all(coder.spans(), peers.warps);
  const int64_t wanted = (all.parts() + kWarps - 1) / kWarps;
  const int64_t fitting = int64_t(peers.warps) * Coder::kBlocks / (kResident * kWarps),
                most = fitting < 1 ? 1 : fitting;
  const dim3 blocks(unsigned(wanted < most ? wanted : most));
  FL_LAUNCH(two_shot_kernel<Coder>, blocks, kThreads, stream, coder, peers, all);
  return cudaGetLastError();
}

}  // namespace fl
