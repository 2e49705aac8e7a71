// The C ABI of libfusionlayer_cuda.so: checks, the choice of the codec, and errors.
#include <cstdio>

#include "arguments.h"
#include "codecs/table.h"
#include "launch.cuh"
#include "recode_rows.h"
#include "two_shot.cuh"

#define FL_QUOTE(text) #text
#define FL_STRING(macro) FL_QUOTE(macro)

#ifdef __CUDACC__
#define FL_COMPILER "nvcc " FL_STRING(__CUDACC_VER_MAJOR__) "." FL_STRING(__CUDACC_VER_MINOR__)
#else
#define FL_COMPILER __VERSION__
#endif

namespace fl {
namespace {

constexpr int kErrorBytes = 256;
thread_local char last_error[kErrorBytes];

// By enum fl_codec.
#define FL_ENTRY(name) &name##_encoders,
constexpr const Encoders *kEncoders[] = {FL_CODECS(FL_ENTRY)};
#undef FL_ENTRY
#define FL_ENTRY(name) &name##_decoders,
constexpr const Decoders *kDecoders[] = {FL_CODECS(FL_ENTRY)};
#undef FL_ENTRY

}  // namespace

int finish(cudaError_t error) {
  if (error == cudaSuccess) return FL_OK;
  std::snprintf(last_error, sizeof last_error, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
  return FL_DEVICE_ERROR;
}

}  // namespace fl

using fl::as_stream;
using fl::finish;

extern "C" {

int fl_encode(const fl_spec *spec, const void *x, float *residual, const fl_messages *out, void *stream) {
  if (const int bad = fl::check_encode(spec, x, residual, out)) return bad;
  const auto encode = fl::kEncoders[spec->codec]->encode;
  if (!encode) return FL_UNSUPPORTED;
  if (spec->numel == 0 || out->count == 0) return FL_OK;
  return finish(encode(*spec, x, residual, *out, as_stream(stream)));
}

int fl_decode(const fl_spec *spec, const fl_messages *in, void *out, void *stream) {
  if (const int bad = fl::check_decode(spec, in, out)) return bad;
  const auto decode = fl::kDecoders[spec->codec]->decode;
  if (!decode) return FL_UNSUPPORTED;
  if (spec->numel == 0 || in->count == 0) return FL_OK;
  return finish(decode(*spec, *in, out, as_stream(stream)));
}

int fl_decode_sum(const fl_spec *spec, const fl_messages *in, void *out, int add, void *stream) {
  if (const int bad = fl::check_decode_sum(spec, in, out)) return bad;
  const auto decode_sum = fl::kDecoders[spec->codec]->decode_sum;
  if (!decode_sum) return FL_UNSUPPORTED;
  if (spec->numel == 0) return FL_OK;
  return finish(decode_sum(*spec, *in, out, add != 0, as_stream(stream)));
}

int fl_recode(const fl_spec *spec, const fl_messages *in, const void *x, float *residual, const fl_messages *out,
              void *stream) {
  if (const int bad = fl::check_recode(spec, in, x, residual, out)) return bad;
  const auto recode = fl::kEncoders[spec->codec]->recode;
  if (!recode) return FL_UNSUPPORTED;
  if (spec->numel == 0) return FL_OK;
  return finish(recode(*spec, *in, x, residual, *out, as_stream(stream)));
}

int fl_recode_rows(const fl_spec *source, const fl_messages *in, int64_t step, const fl_spec *spec,
                   const int64_t *starts, float *residual, const fl_messages *out, void *stream) {
  return fl::recode_rows(source, in, step, spec, starts, residual, out, stream);
}

int fl_two_shot(const fl_spec *spec, uint64_t sum_seed, int64_t chunk, const void *x, void *out, float *residual,
                const fl_peers *peers, void *stream) {
  if (const int bad = fl::check_two_shot(spec, chunk, x, out, residual, peers)) return bad;
  if (spec->numel == 0) return FL_OK;
  const auto two_shot = fl::kEncoders[spec->codec]->two_shot;
  if (!two_shot) return FL_UNSUPPORTED;
  const fl::TwoShot call = {{spec->numel, chunk}, sum_seed, x, out, residual};
  return finish(two_shot(*spec, call, fl::Peers(*spec, chunk, *peers), as_stream(stream)));
}

int64_t fl_two_shot_bytes(const fl_spec *spec, int64_t chunk, int32_t size, int32_t warps) {
  return fl::check_two_shot_spec(spec, chunk, size, warps) ? -1 : fl::two_shot_bytes(*spec, chunk, size, warps);
}

int32_t fl_most_warps(void) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return finish(error) ? -1 : multiprocessors * fl::kResident * fl::kWarps;
}

int64_t fl_workspace_bytes(int verb, int64_t numel) {
  if (numel < 0 || numel > fl::kMaxElements) return -1;
  if (verb == FL_WORKSPACE_STATS) return fl::stats_workspace(numel);
  if (verb == FL_WORKSPACE_KTH) return fl::kth_workspace();
  if (verb == FL_WORKSPACE_THRESHOLD) return fl::threshold_workspace(numel);
  if (verb == FL_WORKSPACE_DELTA_16 || verb == FL_WORKSPACE_DELTA_32)
    return fl::delta_workspace(numel, verb == FL_WORKSPACE_DELTA_32 ? 4 : 2);
  return verb == FL_WORKSPACE_ENCODE ? fl::encode_workspace(numel) : -1;
}

const char *fl_build_info(void) {
  return "abi=" FL_STRING(FL_ABI_VERSION) "\nkind=cuda\ncompiler=" FL_COMPILER "\narchs=" FL_CUDA_ARCHS "\n";
}

const char *fl_last_error(void) { return fl::last_error; }

}  // extern "C"
