// The sum over ranks in one launch, by the `block` codec.
#include "block_encode.cuh"
#include "cuda/two_shot.cuh"

namespace fl {
namespace {

// What a warp does with its tile of a message. Without a residual rotated values are summed as they are, where the scale
// is one of rotated values.
template <bool kTransform, bool kRotated, bool kResidual>
struct BlockCoder {
  static constexpr int kBlocks = kResidual || (kTransform && !kRotated) ? 2 : kResident;  // as of IntCoder

  Shares shares;
  BlockEncoding values, sums;
  const void *x;
  void *out;
  float *residual;
  int64_t codes;  // where they begin in a message

  static FL_HD BlockLayout layout(const BlockEncoding &encoding, int64_t numel) {
    BlockLayout of = encoding.layout;
    const int64_t block = int64_t(kBlock) << of.log2_lanes;
    of.numel = numel;
    of.blocks = (numel + block - 1) / block;
    return of;
  }

  FL_HD int64_t spans() const { return layout(values, shares.chunk).tiles(); }

  FL_DEVICE void encode(int of, uint8_t *message, int64_t tile) const {
    const int64_t start = shares.start(of), bytes = values.dtype == FL_F32 ? 4 : 2;
    const BlockPiece piece = {layout(values, shares.length(of)), byte_offset(x, start * bytes),
                              kResidual ? residual + start : nullptr, message, message + codes};
    encode_tile<kTransform, false, kResidual>(values, piece, tile);
  }

  FL_DEVICE void sum(int rank, uint8_t *message, int64_t tile) const {
    const int64_t start = shares.start(rank), numel = shares.length(rank),
                  block = int64_t(kBlock) << values.layout.log2_lanes;
    const BlockPiece piece = {layout(sums, kRotated ? (numel + block - 1) / block * block : numel), nullptr,
                              kResidual ? residual + start : nullptr, message, message + codes};
    encode_tile<kTransform && !kRotated, true, kResidual>(sums, piece, tile);
  }

  // Copies what `sum` has written.
  FL_DEVICE void copy(int rank, uint8_t *to, const uint8_t *from, int64_t tile, int lane) const {
    const BlockLayout of = layout(values, shares.length(rank));
    const int64_t block = tile * kLanes >> of.log2_lanes, most = kLanes >> of.log2_lanes;
    const int64_t left = of.blocks - block, blocks = left < most ? left : most;
    if (blocks <= 0) return;
    const int64_t scale = scale_bytes(of.scaling.kind), bytes = of.lanes() * int64_t(4 * of.bits);
    if (scale % 4 == 0)
      copy_over_lanes<uint32_t>(to + block * scale, from + block * scale, blocks * scale, lane);
    else
      copy_over_lanes<uint8_t>(to + block * scale, from + block * scale, blocks * scale, lane);
    copy_over_lanes<Chunk>(to + codes + block * bytes, from + codes + block * bytes, blocks * bytes, lane);
  }

  FL_DEVICE void decode(int of, uint8_t *message, int64_t tile, int lane) const {
    const BlockLayout share = layout(values, shares.length(of));
    const BlockMessages in = {message, message + codes, 0, 1};
    const Run run(share, tile, lane);
    float v[kBlock];
    decode_run<kTransform>(share, load_run(share, in, 0, run), lane, v);
    store_block(values.dtype, byte_offset(out, shares.start(of) * (values.dtype == FL_F32 ? 4 : 2)), share.numel,
                run.first, lane, v);
  }
};

template <bool kTransform, bool kRotated, bool kResidual>
cudaError_t launch(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream) {
  fl_spec whole = spec, rotated = spec;
  whole.numel = call.shares.chunk;
  if (kRotated) rotated.param[3] &= ~uint32_t(FL_BLOCK_HADAMARD);
  BlockCoder<kTransform, kRotated, kResidual> coder = {call.shares,
                                                       block_encoding(whole, nullptr, nullptr, {}),
                                                       block_encoding(rotated, nullptr, nullptr, {}),
                                                       call.x,
                                                       call.out,
                                                       call.residual,
                                                       peer_aligned(plane_bytes(whole, 0))};
  uint8_t *const parts = peers.part(peers.rank, 0);
  coder.sums.in = {parts, parts + coder.codes, peers.capacity, peers.size};
  return launch_two_shot(coder, peers, stream);
}

}  // namespace

cudaError_t block_two_shot(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream) {
  const bool residual = call.residual != nullptr;
  if (!(spec.param[3] & FL_BLOCK_HADAMARD))
    return residual ? launch<false, false, true>(spec, call, peers, stream)
                    : launch<false, false, false>(spec, call, peers, stream);
  if (residual) return launch<true, false, true>(spec, call, peers, stream);
  return scale_kind(spec.param) == FL_SCALE_F32 ? launch<true, true, false>(spec, call, peers, stream)
                                                : launch<true, false, false>(spec, call, peers, stream);
}

}  // namespace fl
