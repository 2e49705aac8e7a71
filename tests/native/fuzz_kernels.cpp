// A table of kernels with those of FL_ZIP and FL_DELTA alone: what fuzz.cpp needs, and no more, since sanitizers make the
// whole table slow to compile. Compiled once for each instruction set, with FL_ISA set to its name.
#include "kernels.h"
#include "kernels_delta.cpp"
#include "zip_decode.h"

namespace fl::FL_ISA {
namespace {

template <class T>
struct Type {
  using type = T;
};

template <class Body>
auto with_dtype(uint32_t dtype, const Body &body) {
  if (dtype == FL_BF16) return body(Type<Bf16>{});
  if (dtype == FL_F16) return body(Type<F16>{});
  return body(Type<float>{});
}

template <bool kWrite>
int64_t encode_any(const ZipEncoding &job, int64_t region, int64_t first, int64_t room) {
  return with_dtype(job.shape.dtype, [&](auto type) {
    return encode_region<typename decltype(type)::type, kWrite>(job, region, first, room);
  });
}

template <class Body>
bool with_both(const Job &job, const Body &body) {
  return with_dtype(job.spec->param[0], [&](auto wire) {
    return with_dtype(job.spec->dtype, [&](auto type) { return body(wire, type); });
  });
}

Kernels zip_kernels() {
  Kernels table{};
  table.zip_choose = [](const ZipEncoding &job, int64_t region) {
    with_dtype(job.shape.dtype, [&](auto type) { choose_exponents<typename decltype(type)::type>(job, region); });
  };
  table.zip_count = [](const ZipEncoding &job, int64_t region) {
    return encode_any<false>(job, region, 0, kZipRegion);
  };
  table.zip_encode = encode_any<true>;
  table.zip_decode = [](const Job &job, int64_t begin, int64_t end) {
    return with_both(job, [&](auto wire, auto type) {
      return zip_decode<typename decltype(wire)::type, typename decltype(type)::type>(job, begin, end);
    });
  };
  table.zip_decode_sum = [](const Job &job, int64_t begin, int64_t end) {
    return with_both(job, [&](auto wire, auto type) {
      return zip_decode_sum<typename decltype(wire)::type, typename decltype(type)::type>(job, begin, end);
    });
  };
  table.delta_encode = run_delta_encode;
  table.delta_decode = run_delta_decode;
  return table;
}

Kernels named(const char *name) {
  Kernels table = zip_kernels();
  table.name = name;
  return table;
}

}  // namespace

#define FL_TEXT(name) #name
#define FL_NAME(name) FL_TEXT(name)

const Kernels kernels = named(FL_NAME(FL_ISA));

}  // namespace fl::FL_ISA
