// encode, encode_difference, recode and recode_from of the `int` codec.
#include "checks.h"
#include "int_encode.cuh"

namespace fl {
namespace {

template <IntInput kInput, bool kTransform, bool kResidual>
FL_DEVICE void encode_message(const IntEncoding &a, int64_t message) {
  const int64_t start = message * a.layout.numel;
  const bool difference = kInput == IntInput::kDifference;
  const IntPiece piece = {
      a.layout,
      byte_offset(a.x, difference ? start * 4 : message * a.x_stride),
      difference ? byte_offset(a.base, message * a.x_stride) : nullptr,
      kResidual ? a.residual + start : nullptr,
      byte_offset(a.out.scales, message * a.out.stride),
      a.out.codes + message * a.out.stride,
      uint64_t(a.offset) + uint64_t(message * a.layout.groups << a.layout.log2_group),
  };
  const int64_t spans = a.layout.spans();
  for (int64_t span = warp_index(); span < spans; span += warp_count()) {
    if (kInput == IntInput::kValues && !kResidual)
      fetch_elements_ahead(a.dtype, piece.x, (span + warp_count()) * a.layout.span(), a.layout.numel);
    if (kInput == IntInput::kSum) fetch_messages_ahead(a.layout, a.in, (span + warp_count()) * a.layout.tiles());
    encode_span<kTransform, kInput, kResidual>(a, piece, span);
  }
}

template <bool kTransform, IntInput kInput, bool kResidual>
__global__ void __launch_bounds__(kThreads) encode_kernel(const IntEncoding a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) encode_message<kInput, kTransform, kResidual>(a, m);
}

template <IntInput kInput>
cudaError_t launch(const IntEncoding &a, bool hadamard, cudaStream_t stream) {
  auto kernel = hadamard ? encode_kernel<true, kInput, false> : encode_kernel<false, kInput, false>;
  if constexpr (kInput != IntInput::kDifference)
    if (a.residual) kernel = hadamard ? encode_kernel<true, kInput, true> : encode_kernel<false, kInput, true>;
  return launch_over(Grid(a.layout.spans(), a.out.count, blocks_for(a.dtype)), kernel, a, stream);
}

}  // namespace

cudaError_t int_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream) {
  return launch<IntInput::kValues>(int_encoding(spec, x, residual, out), spec.param[2] & FL_INT_HADAMARD, stream);
}

cudaError_t int_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                       const fl_messages &out, cudaStream_t stream) {
  IntEncoding a = int_encoding(spec, x, residual, out);
  a.in = int_messages(in);
  return launch<IntInput::kSum>(a, spec.param[2] & FL_INT_HADAMARD, stream);
}

cudaError_t int_recode_from(const fl_spec &source, const fl_messages &in, const fl_spec &spec, float *residual,
                            const fl_messages &out, cudaStream_t stream) {
  IntEncoding a = int_encoding(spec, nullptr, residual, out);
  a.in = int_messages(in);
  a.source = int_layout(source);
  a.source_transformed = (source.param[2] & FL_INT_HADAMARD) != 0;
  return launch<IntInput::kForeign>(a, spec.param[2] & FL_INT_HADAMARD, stream);
}

cudaError_t int_encode_difference(const fl_spec &spec, const float *x, const void *base, const fl_messages &out,
                                  cudaStream_t stream) {
  IntEncoding a = int_encoding(spec, x, nullptr, out);
  a.base = base;
  return launch<IntInput::kDifference>(a, spec.param[2] & FL_INT_HADAMARD, stream);
}

const Encoders int_encoders = {int_encode, int_recode, int_two_shot};

}  // namespace fl

extern "C" {

int fl_recode_from(const fl_spec *source, const fl_messages *in, const fl_spec *spec, float *residual,
                   const fl_messages *out, void *stream) {
  if (const int bad = fl::check_recode_from(source, in, spec, residual, out)) return bad;
  if (spec->numel == 0) return FL_OK;
  return fl::finish(fl::int_recode_from(*source, *in, *spec, residual, *out, fl::as_stream(stream)));
}

int fl_encode_difference(const fl_spec *spec, const float *x, const void *base, const fl_messages *out, void *stream) {
  if (const int bad = fl::check_encode_difference(spec, x, base, out)) return bad;
  if (spec->numel == 0 || out->count == 0) return FL_OK;
  return fl::finish(fl::int_encode_difference(*spec, x, base, *out, fl::as_stream(stream)));
}

}  // extern "C"
