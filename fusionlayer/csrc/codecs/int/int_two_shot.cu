// The sum over ranks in one launch, by the `int` codec.
#include "cuda/two_shot.cuh"
#include "int_encode.cuh"

namespace fl {
namespace {

// What a warp does with its span of a message. Without a residual rotated values are summed as they are.
template <bool kTransform, bool kResidual>
struct IntCoder {
  static constexpr int kBlocks =
      kTransform && kResidual ? 2 : kResident;  // with more, values would leave the registers

  Shares shares;
  IntEncoding values, sums;
  const void *x;
  void *out;
  float *residual;
  int64_t codes;  // where they begin in a message

  FL_HD IntLayout layout(int64_t numel) const {
    IntLayout of = values.layout;
    of.numel = numel;
    of.groups = (numel + (int64_t(1) << of.log2_group) - 1) >> of.log2_group;
    return of;
  }

  FL_HD int64_t spans() const { return layout(shares.chunk).spans(); }

  FL_DEVICE void encode(int of, uint8_t *message, int64_t span) const {
    const int64_t start = shares.start(of), bytes = values.dtype == FL_F32 ? 4 : 2;
    const IntPiece piece = {layout(shares.length(of)),
                            byte_offset(x, start * bytes),
                            nullptr,
                            kResidual ? residual + start : nullptr,
                            reinterpret_cast<float *>(message),
                            message + codes,
                            uint64_t(values.offset + start)};
    encode_span<kTransform, IntInput::kValues, kResidual>(values, piece, span);
  }

  FL_DEVICE void sum(int rank, uint8_t *message, int64_t span) const {
    const int64_t start = shares.start(rank), numel = shares.length(rank);
    constexpr bool kRotated = kTransform && !kResidual;
    const IntPiece piece = {layout(kRotated ? (numel + kHadamard - 1) / kHadamard * kHadamard : numel),
                            nullptr,
                            nullptr,
                            kResidual ? residual + start : nullptr,
                            reinterpret_cast<float *>(message),
                            message + codes,
                            uint64_t(sums.offset)};
    encode_span<kTransform && !kRotated, IntInput::kSum, kResidual, 1>(sums, piece, span);
  }

  // Copies what `sum` has written.
  FL_DEVICE void copy(int rank, uint8_t *to, const uint8_t *from, int64_t span, int lane) const {
    const IntLayout of = layout(shares.length(rank));
    const int64_t group = span * of.span() >> of.log2_group, most = of.span() >> of.log2_group;
    const int64_t left = of.groups - group, groups = left < most ? left : most;
    if (groups <= 0) return;
    const int64_t bytes = (int64_t(1) << of.log2_group) * of.bits / 8;
    copy_over_lanes<uint32_t>(to + 4 * group, from + 4 * group, 4 * groups, lane);
    copy_over_lanes<Chunk>(to + codes + group * bytes, from + codes + group * bytes, groups * bytes, lane);
  }

  FL_DEVICE void decode(int of, uint8_t *message, int64_t span, int lane) const {
    const IntLayout share = layout(shares.length(of));
    const IntMessages in = {reinterpret_cast<float *>(message), message + codes, 0, 1};
    void *to = byte_offset(out, shares.start(of) * (values.dtype == FL_F32 ? 4 : 2));
    for (int tile = 0; tile < share.tiles(); ++tile) {
      const Place at = place_of(share, span, tile, lane);
      float v[kBlock];
      decode_block<kTransform>(share, load_packed(share, in, 0, at), at, v);
      store_block(values.dtype, to, share.numel, at.first, lane, v);
    }
  }
};

template <bool kTransform, bool kResidual>
cudaError_t launch(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream) {
  fl_spec whole = spec, sum = spec;
  whole.numel = call.shares.chunk;
  sum.seed = call.sum_seed;
  sum.offset += call.shares.start(peers.rank);
  IntCoder<kTransform, kResidual> coder = {call.shares,
                                           int_encoding(whole, nullptr, nullptr, {}),
                                           int_encoding(sum, nullptr, nullptr, {}),
                                           call.x,
                                           call.out,
                                           call.residual,
                                           peer_aligned(plane_bytes(whole, 0))};
  uint8_t *const parts = peers.part(peers.rank, 0);
  coder.sums.in = {reinterpret_cast<float *>(parts), parts + coder.codes, peers.capacity, peers.size};
  return launch_two_shot(coder, peers, stream);
}

}  // namespace

cudaError_t int_two_shot(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream) {
  if (spec.param[2] & FL_INT_HADAMARD)
    return call.residual ? launch<true, true>(spec, call, peers, stream)
                         : launch<true, false>(spec, call, peers, stream);
  return call.residual ? launch<false, true>(spec, call, peers, stream)
                       : launch<false, false>(spec, call, peers, stream);
}

}  // namespace fl
