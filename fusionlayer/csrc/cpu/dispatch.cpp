// The C ABI of the CPU library: checks arguments, picks the instruction set, splits the work.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "arguments.h"
#include "crc32c.h"
#include "delta_verbs.h"
#include "dynamiq_verbs.h"
#include "float_environment.h"
#include "fusionlayer_codec.h"
#include "kernels.h"
#include "rans_verbs.h"
#include "sparse_verbs.h"
#include "thread_pool.h"
#include "zip_verbs.h"

namespace fl {
namespace {

constexpr int64_t kInlineElements = 64 * 1024;  // 256 KiB of f32: below, waking threads costs more than it gains
constexpr int64_t kGrainElements = 16 * 1024;
constexpr int64_t kStreamedBytes = int64_t(32) << 20;  // of results: more than a thread's share of any cache
constexpr int kMaxThreads = 1024;

struct Isa {
  const Kernels *kernels;
  bool (*usable)();
};

// Best first.
const Isa kIsas[] = {
#if defined(FL_HAVE_AVX512)
    {&avx512::kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
     }},
#endif
#if defined(FL_HAVE_AVX2)
    {&avx2::kernels,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
     }},
#endif
    {&baseline::kernels, [] { return true; }},
};

std::atomic<const Isa *> selected{nullptr};

const Isa *best_isa() {
  const Isa *isa = kIsas;
  while (!isa->usable()) ++isa;
  return isa;
}

// Elements that no two threads share.
int64_t unit_of(const fl_spec &spec) {
  if (spec.codec == FL_CAST) return kCastUnit;
  if (spec.codec == FL_THC) return kThcSection;
  if (spec.codec == FL_DYNAMIQ) return kSuperGroup;
  return spec.codec == FL_TAHQUANT ? spec.param[2] : spec.param[1];
}

// Runs a verb over `messages` messages; each value takes `inputs` values to make, all results have `result_bytes`.
int run(Kernels::Verb *const Kernels::*verb, Job job, int64_t messages, int64_t inputs, int64_t result_bytes) {
  const fl_spec &spec = *job.spec;
  const int64_t unit = std::max(unit_of(spec), job.source ? unit_of(*job.source) : 0);
  const int64_t units = messages * ((spec.numel + unit - 1) / unit);
  const int64_t work = std::max<int64_t>(1, inputs) * unit;  // of one unit, in elements
  if (units == 0) return FL_OK;
  if (spec.codec == FL_DYNAMIQ)
    if (const int bad = prepare_dynamiq(job)) return bad;
  job.key = make_key(spec.seed);
  job.streamed = result_bytes >= kStreamedBytes;
  const FloatEnvironment ieee;
  const auto task = [&job, kernel = kernels().*verb](int64_t begin, int64_t end) { kernel(job, begin, end); };
  const int64_t grain = units * work < kInlineElements ? units : std::max<int64_t>(1, kGrainElements / work);
  if (job.out && spec.codec == FL_BLOCK && spec.param[2] == FL_SCALE_MESSAGE) {
    for (int64_t m = 0; m < messages; ++m)
      std::memset(static_cast<uint8_t *>(job.out->plane[0]) + m * job.out->stride, 0, sizeof(float));
    job.look = true;
    parallel_for(units, grain, RangeTask(task));
    job.look = false;
  }
  parallel_for(units, grain, RangeTask(task));
  return FL_OK;
}

// Runs a kernel over units of so many elements.
void run_units(Kernels::Verb *const Kernels::*verb, const Job &job, int64_t units, int64_t work) {
  const FloatEnvironment ieee;
  const auto task = [&job, kernel = kernels().*verb](int64_t begin, int64_t end) { kernel(job, begin, end); };
  const int64_t grain = units * work < kInlineElements ? units : std::max<int64_t>(1, kGrainElements / work);
  if (units > 0) parallel_for(units, grain, RangeTask(task));
}

bool copies(const fl_spec &spec) { return spec.codec == FL_CAST && spec.param[0] == spec.dtype; }

int copy(uint8_t *to, int64_t to_stride, const uint8_t *from, int64_t from_stride, int64_t bytes, int64_t count) {
  const auto task = [=](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t i = begin / bytes, offset = begin % bytes, n = std::min(end - begin, bytes - offset);
      std::memcpy(to + i * to_stride + offset, from + i * from_stride + offset, size_t(n));
      begin += n;
    }
  };
  const int64_t total = bytes * count, grain = total < 4 * kInlineElements ? total : 4 * kGrainElements;
  if (total > 0) parallel_for(total, grain, RangeTask(task));
  return FL_OK;
}

}  // namespace

const Kernels &kernels() {
  static const Isa *const best = best_isa();
  const Isa *isa = selected;
  return *(isa ? isa : best)->kernels;
}

}  // namespace fl

#define FL_TEXT(x) #x
#define FL_STRING(x) FL_TEXT(x)
#if defined(__clang__)
#define FL_COMPILER "clang " __clang_version__
#else
#define FL_COMPILER "gcc " __VERSION__
#endif

extern "C" {

int fl_encode(const fl_spec *spec, const void *x, float *residual, const fl_messages *out, void *) {
  if (const int bad = fl::check_encode(spec, x, residual, out)) return bad;
  if (spec->codec == FL_ZIP) return fl::zip_encode(*spec, x, *out);
  if (spec->codec == FL_RANS) return fl::rans_encode(*spec, x, *out);
  if (fl::copies(*spec) && !residual) {
    const int64_t bytes = fl::plane_bytes(*spec, 0);
    const auto to = static_cast<uint8_t *>(out->plane[0]);
    return fl::copy(to, out->stride, static_cast<const uint8_t *>(x), bytes, bytes, out->count);
  }
  fl::Job job{};
  job.spec = spec;
  job.x = x;
  job.residual = residual;
  job.out = out;
  if (spec->codec == FL_TAHQUANT && fl::tah_shape(*spec).coarse) {
    const fl::TahShape shape = fl::tah_shape(*spec);
    const int64_t sections = out->count * shape.sections();
    fl::run_units(&fl::Kernels::encode_sections, job, sections, fl::kTahSection * shape.channels);
    return FL_OK;
  }
  return fl::run(&fl::Kernels::encode, job, out->count, 1, out->count * fl::plane_bytes(*spec, 0));
}

int fl_decode(const fl_spec *spec, const fl_messages *in, void *out, void *) {
  if (const int bad = fl::check_decode(spec, in, out)) return bad;
  if (spec->codec == FL_ZIP) return fl::zip_decode(*spec, *in, out);
  if (spec->codec == FL_RANS) return fl::rans_decode(*spec, *in, out);
  if (fl::copies(*spec)) {
    const int64_t bytes = fl::plane_bytes(*spec, 0);
    const auto from = static_cast<const uint8_t *>(in->plane[0]);
    return fl::copy(static_cast<uint8_t *>(out), bytes, from, in->stride, bytes, in->count);
  }
  fl::Job job{};
  job.spec = spec;
  job.in = in;
  job.y = out;
  return fl::run(&fl::Kernels::decode, job, in->count, 1, in->count * spec->numel * fl::element_size(spec->dtype));
}

int fl_decode_sum(const fl_spec *spec, const fl_messages *in, void *out, int add, void *) {
  if (const int bad = fl::check_decode_sum(spec, in, out)) return bad;
  if (spec->codec == FL_SPARSE) return fl::sparse_decode_sum(*spec, *in, out, add != 0);
  if (spec->codec == FL_ZIP) return fl::zip_decode_sum(*spec, *in, out, add != 0);
  if (spec->codec == FL_RANS) return fl::rans_decode_sum(*spec, *in, out, add != 0);
  fl::Job job{};
  job.spec = spec;
  job.in = in;
  job.y = out;
  job.add = add != 0;
  return fl::run(&fl::Kernels::decode_sum, job, 1, in->count, spec->numel * fl::element_size(spec->dtype));
}

int fl_recode(const fl_spec *spec, const fl_messages *in, const void *x, float *residual, const fl_messages *out,
              void *) {
  if (const int bad = fl::check_recode(spec, in, x, residual, out)) return bad;
  fl::Job job{};
  job.spec = spec;
  job.in = in;
  job.x = x;
  job.residual = residual;
  job.out = out;
  return fl::run(&fl::Kernels::recode, job, 1, in->count, fl::plane_bytes(*spec, 0));
}

int fl_recode_from(const fl_spec *source, const fl_messages *in, const fl_spec *spec, float *residual,
                   const fl_messages *out, void *) {
  if (const int bad = fl::check_recode_from(source, in, spec, residual, out)) return bad;
  fl::Job job{};
  job.spec = spec;
  job.source = source;
  job.in = in;
  job.residual = residual;
  job.out = out;
  return fl::run(&fl::Kernels::recode_from, job, 1, in->count, fl::plane_bytes(*spec, 0));
}

int fl_encode_difference(const fl_spec *spec, const float *x, const void *base, const fl_messages *out, void *) {
  if (const int bad = fl::check_encode_difference(spec, x, base, out)) return bad;
  fl::Job job{};
  job.spec = spec;
  job.x = x;
  job.y = const_cast<void *>(base);
  job.out = out;
  return fl::run(&fl::Kernels::encode_difference, job, out->count, 1, out->count * fl::plane_bytes(*spec, 0));
}

int fl_add_codes(const fl_spec *spec, const fl_messages *in, uint8_t *out, void *) {
  if (const int bad = fl::check_add_codes(spec, in, out)) return bad;
  fl::Job job{};
  job.spec = spec;
  job.in = in;
  job.y = out;
  if (in->count) fl::run_units(&fl::Kernels::add_codes, job, fl::thc_shape(*spec).count() / 32, 32 * in->count);
  return FL_OK;
}

int fl_thc_rms(const fl_spec *spec, const void *x, const float *residual, float *rms, void *) {
  if (const int bad = fl::check_thc_rms(spec, x, residual, rms)) return bad;
  fl::Job job{};
  job.spec = spec;
  job.x = x;
  job.residual = const_cast<float *>(residual);
  job.y = rms;
  fl::run_units(&fl::Kernels::thc_rms, job, fl::thc_shape(*spec).sections(), fl::kThcSection);
  return FL_OK;
}

int fl_dynamiq_stats(uint32_t dtype, const void *x, const float *residual, int64_t numel, float *means, float *squares,
                     void *) {
  if (const int bad = fl::check_dynamiq_stats(dtype, x, residual, numel, means, squares)) return bad;
  const fl::SuperGroupStats job{x, residual, numel, dtype, means, squares};
  const fl::FloatEnvironment ieee;
  const auto task = [&job](int64_t begin, int64_t end) { fl::kernels().dynamiq_stats(job, begin, end); };
  const int64_t groups = fl::super_groups(numel);
  const int64_t grain = numel < fl::kInlineElements ? groups : fl::kGrainElements / fl::kSuperGroup;
  if (groups > 0) fl::parallel_for(groups, grain, fl::RangeTask(task));
  return FL_OK;
}

int fl_dynamiq_widths(const uint8_t *bits, int64_t groups, void *plane) {
  if (groups < 0 || (groups && (!bits || !plane || !fl::aligned(plane, 8)))) return FL_BAD_ARGUMENT;
  return fl::write_widths(bits, groups, static_cast<fl::WidthRun *>(plane));
}

int fl_delta_encode(const fl_spec *spec, const void *x, const void *base, const fl_messages *out, void *, void *) {
  if (const int bad = fl::check_delta(spec, x, base, out)) return bad;
  return fl::delta_encode(*spec, x, base, *out);
}

int fl_delta_decode(const fl_spec *spec, const fl_messages *in, const void *base, void *out, void *, int32_t *,
                    void *) {
  if (const int bad = fl::check_delta(spec, out, base, in)) return bad;
  return fl::delta_decode(*spec, *in, base, out);
}

const char *fl_build_info(void) {
  return "abi=" FL_STRING(FL_ABI_VERSION) "\nkind=cpu\ncompiler=" FL_COMPILER
                                          "\nisas="
#if defined(FL_HAVE_AVX512)
                                          "avx512,"
#endif
#if defined(FL_HAVE_AVX2)
                                          "avx2,"
#endif
                                          "baseline\n";
}

const char *fl_last_error(void) { return ""; }

uint32_t fl_crc32c(uint32_t crc, const void *data, int64_t n) {
  if (n <= 0) return crc;
  const fl::Isa *isa = fl::selected;
  const bool portable = isa && isa->kernels == &fl::baseline::kernels;  // baseline on request is baseline throughout
  return fl::crc32c(crc, static_cast<const uint8_t *>(data), size_t(n), portable);
}

int fl_select_isa(const char *name) {
  if (!name) return FL_BAD_ARGUMENT;
  if (std::strcmp(name, "auto") == 0) {
    fl::selected = nullptr;
    return FL_OK;
  }
  for (const fl::Isa &isa : fl::kIsas)
    if (std::strcmp(name, isa.kernels->name) == 0 && isa.usable()) {
      fl::selected = &isa;
      return FL_OK;
    }
  return FL_UNSUPPORTED;
}

const char *fl_isa(void) { return fl::kernels().name; }

int fl_set_threads(int n) {
  if (n < 1) return FL_BAD_ARGUMENT;
  fl::set_thread_count(std::min(n, fl::kMaxThreads));
  return FL_OK;
}

}  // extern "C"
