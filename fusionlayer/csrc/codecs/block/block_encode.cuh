// Encoding by the `block` codec: what its own kernels and those that send what they encode share.
#pragma once

#include "block_codes.cuh"

namespace fl {

struct BlockEncoding {
  BlockLayout layout;
  BlockMessages in;  // recode: added to x
  BlockMessages out;
  uint32_t dtype;
  const void *x;
  int64_t x_stride;  // bytes of the elements of a message
  float *residual;
};

// One message: where its elements come from, and where it goes.
struct BlockPiece {
  BlockLayout layout;
  const void *x;  // of a sum: may be null
  float *residual;
  void *scales;
  uint8_t *codes;
};

template <bool kResidual>
FL_DEVICE BlockPiece piece_of(const BlockEncoding &a, int64_t message) {
  return {a.layout, byte_offset(a.x, message * a.x_stride), kResidual ? a.residual + message * a.layout.numel : nullptr,
          byte_offset(a.out.scales, message * a.out.stride), a.out.codes + message * a.out.stride};
}

// v = what a lane's run is encoded from.
template <bool kTransform, bool kSum, bool kResidual>
FL_DEVICE void gather_run(const BlockEncoding &a, const BlockPiece &piece, const Run &run, int lane,
                          float (&v)[kBlock]) {
  const int64_t numel = piece.layout.numel;
  if (kSum) {
    sum_messages<kTransform>(piece.layout, a.in, a.dtype, piece.x, run, lane, v);
    clear_padding(v, numel - run.first);
  } else {
    load_block(a.dtype, piece.x, numel, run.first, lane, v);
  }
  if (kResidual) add_residual(piece.residual, numel, run.first, lane, v);
}

// A tile of a message.
template <bool kTransform, bool kSum, bool kResidual>
FL_DEVICE void encode_tile(const BlockEncoding &a, const BlockPiece &piece, int64_t tile) {
  const BlockLayout &layout = piece.layout;
  const int lane = lane_index(), width = layout.lanes();
  const Run run(layout, tile, lane);
  float v[kBlock], wanted[kBlock];
  gather_run<kTransform, kSum, kResidual>(a, piece, run, lane, v);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) wanted[i] = v[i];
  if (kTransform) transform_run(layout, lane, v);

  const bool whole = layout.scaling.kind == FL_SCALE_MESSAGE;
  const uint32_t amax = whole ? *static_cast<const uint32_t *>(piece.scales) : max_over_lanes(largest_of(v), width);
  const float squares = layout.scaling.kind == FL_SCALE_DUAL ? sum_of_squares(v, width) : 0.0f;
  // Lanes of a block may see what the first of them writes below: it makes the same scale again.
  const uint32_t given = layout.given && run.exists ? static_cast<const uint16_t *>(piece.scales)[run.block] : 0;
  const BlockScale scale =
      layout.given ? given_block_scale(layout.scaling, given, amax) : make_block_scale(layout.scaling, amax, squares);

  if (layout.scaling.kind == FL_SCALE_DUAL) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] *= scale.before;
  }

  with_format(layout.format, [&](auto format) {
    constexpr uint32_t kFormat = decltype(format)::code;
    uint32_t bytes[kWords] = {};
    if (scale.inverse != 0.0f) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        bytes[i] = four_codes<kFormat>(v[4 * i] * scale.inverse, v[4 * i + 1] * scale.inverse,
                                       v[4 * i + 2] * scale.inverse, v[4 * i + 3] * scale.inverse);
    }
    if (run.exists) store_run<format_bits(kFormat)>(piece.codes, run.index, bytes);
    if (kResidual) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) four_values<kFormat>(bytes[i], v + 4 * i);
    }
  });
  if (run.exists && (run.index & (width - 1)) == 0) store_block_scale(layout, piece.scales, run.block, scale);
  if (kResidual) {
    finish_values<kTransform>(layout, decode_block_scale(layout.scaling, scale.wire, scale.first), lane, v);
    update_residual(piece.residual, layout.numel, run.first, lane, wanted, v);
  }
}

inline BlockEncoding block_encoding(const fl_spec &spec, const void *x, float *residual, const fl_messages &out) {
  return {block_layout(spec), {}, block_messages(out), spec.dtype, x, spec.numel * element_size(spec.dtype), residual};
}

// In block_two_shot.cu.
cudaError_t block_two_shot(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream);

}  // namespace fl
