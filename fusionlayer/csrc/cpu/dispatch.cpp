// The C ABI of the CPU library: checks arguments, picks the instruction set, splits the work.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "calls.h"
#include "codecs/table.h"
#include "crc32c.h"
#include "float_environment.h"
#include "recode_rows.h"
#include "thread_pool.h"

namespace fl {
namespace {

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

// A verb that this library's codec lacks is not done here.
int call(int (*verb)(Job &), Job job) { return verb ? verb(job) : FL_UNSUPPORTED; }

const CodecVerbs &verbs_of(uint32_t codec) { return *kernels().codecs[codec]; }

}  // namespace

const Kernels &kernels() {
  static const Isa *const best = best_isa();
  const Isa *isa = selected;
  return *(isa ? isa : best)->kernels;
}

int run(Job &job, Kernels::Verb *kernel, int64_t unit, int64_t messages, int64_t inputs, int64_t result_bytes) {
  job.key = make_key(job.spec->seed);
  job.streamed = result_bytes >= kStreamedBytes;
  return run_units(job, kernel, messages * ((job.spec->numel + unit - 1) / unit), std::max<int64_t>(1, inputs) * unit);
}

int run_units(Job &job, Kernels::Verb *kernel, int64_t units, int64_t work) {
  const FloatEnvironment ieee;
  const auto task = [&job, kernel](int64_t begin, int64_t end) { kernel(job, begin, end); };
  const int64_t grain = units * work < kInlineElements ? units : std::max<int64_t>(1, kGrainElements / work);
  if (units > 0) parallel_for(units, grain, RangeTask(task));
  return FL_OK;
}

int run_own(uint32_t codec, int number, Job &job) { return call(verbs_of(codec).own[number], job); }

int copy_messages(uint8_t *to, int64_t to_stride, const uint8_t *from, int64_t from_stride, int64_t bytes,
                  int64_t count) {
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
  return fl::call(fl::verbs_of(spec->codec).encode, fl::job_of(spec, nullptr, x, residual, nullptr, out));
}

int fl_decode(const fl_spec *spec, const fl_messages *in, void *out, void *) {
  if (const int bad = fl::check_decode(spec, in, out)) return bad;
  return fl::call(fl::verbs_of(spec->codec).decode, fl::job_of(spec, in, nullptr, nullptr, out, nullptr));
}

int fl_decode_sum(const fl_spec *spec, const fl_messages *in, void *out, int add, void *) {
  if (const int bad = fl::check_decode_sum(spec, in, out)) return bad;
  fl::Job job = fl::job_of(spec, in, nullptr, nullptr, out, nullptr);
  job.add = add != 0;
  return fl::call(fl::verbs_of(spec->codec).decode_sum, job);
}

int fl_recode(const fl_spec *spec, const fl_messages *in, const void *x, float *residual, const fl_messages *out,
              void *) {
  if (const int bad = fl::check_recode(spec, in, x, residual, out)) return bad;
  return fl::call(fl::verbs_of(spec->codec).recode, fl::job_of(spec, in, x, residual, nullptr, out));
}

int fl_recode_rows(const fl_spec *source, const fl_messages *in, int64_t step, const fl_spec *spec,
                   const int64_t *starts, float *residual, const fl_messages *out, void *stream) {
  return fl::recode_rows(source, in, step, spec, starts, residual, out, stream);
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
