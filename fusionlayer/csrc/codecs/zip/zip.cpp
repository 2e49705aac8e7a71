// FL_ZIP for one instruction set of the CPU: the order of the steps, threads. Compiled once for each.

#include <atomic>
#include <cstring>

#include "cpu/codec_list.h"
#include "cpu/float_environment.h"
#include "cpu/run.h"
#include "cpu/thread_pool.h"
#include "zip_decode.h"

namespace fl::FL_ISA {
namespace {

constexpr int64_t kInlineTiles = 64;  // below, waking threads costs more than it gains
constexpr int64_t kGrainTiles = 16;
constexpr int64_t kStreamedBytes = int64_t(8) << 20;  // of results: they need not pass through the caches

ZipEncoding encoding_of(const fl_spec &spec, const void *x, const fl_messages &out, int64_t message) {
  const ZipShape shape = zip_shape(spec);
  const uint8_t *first = static_cast<const uint8_t *>(x) + message * shape.raw_bytes();
  return {shape, spec.param[1], first, zip_message(out, message), out.count * shape.escapes() >= kStreamedBytes};
}

template <bool kWrite>
int64_t encode_any(const ZipEncoding &job, int64_t region, int64_t first, int64_t room) {
  int64_t count = 0;
  with_dtype(job.shape.dtype, [&](auto type) {
    count = encode_region<typename decltype(type)::type, kWrite>(job, region, first, room);
  });
  return count;
}

// Calls body with the type of a message's elements, then that of out.
template <class Body>
FL_INLINE void with_both(const Job &job, const Body &body) {
  with_dtype(job.spec->param[0], [&](auto wire) { with_dtype(job.spec->dtype, [&](auto type) { body(wire, type); }); });
}

void choose(const fl_spec &spec, const ZipEncoding &job, int64_t region) {
  ZipRegion &entry = job.out.regions()[region];
  if (spec.param[2] == 0)
    return with_dtype(job.shape.dtype,
                      [&](auto type) { choose_exponents<typename decltype(type)::type>(job, region); });
  entry.exponent[0] = 0;
  zip_window(int(spec.param[2]) - 1, entry.exponent + 1);
}

void finish_raw(const ZipEncoding &job) {
  *job.out.head = {kZipRaw, 0, {0, 0}};
  std::memcpy(job.out.data, job.x, size_t(job.shape.raw_bytes()));
}

void finish_coded(const ZipEncoding &job, int64_t escapes) {
  *job.out.head = {kZipCoded, uint32_t(escapes), {0, 0}};
  const int64_t end = job.shape.index() + 2 * job.shape.tiles();
  std::memset(job.out.data + end, 0, size_t(job.shape.block(0) - end));
}

// One pass over memory.
void encode_alone(const fl_spec &spec, const ZipEncoding &job) {
  const int64_t too_many = job.shape.too_many();
  int64_t escapes = 0;
  for (int64_t region = 0; escapes < too_many && region < job.shape.regions(); ++region) {
    choose(spec, job, region);
    const int64_t count = encode_any<true>(job, region, escapes, too_many - 1 - escapes);
    if (count < 0) return finish_raw(job);
    job.out.regions()[region].first = uint32_t(escapes);
    job.out.regions()[region].count = uint32_t(count);
    escapes += count;
  }
  escapes < too_many ? finish_coded(job, escapes) : finish_raw(job);
}

// Where the escapes of each region begin, known from counting them first; false if there are too many.
bool place(const ZipEncoding &job, int64_t &escapes) {
  escapes = 0;
  for (int64_t region = 0; region < job.shape.regions(); ++region) {
    ZipRegion &entry = job.out.regions()[region];
    entry.first = uint32_t(escapes);
    escapes += entry.count;
  }
  return escapes < job.shape.too_many();
}

// Threads share the regions of all messages; the elements are read twice.
void encode_together(const fl_spec &spec, const void *x, const fl_messages &out) {
  const int64_t regions = zip_shape(spec).regions();
  const auto each = [&](const auto &step) {
    const auto task = [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) step(encoding_of(spec, x, out, begin / regions), begin % regions);
    };
    parallel_for(out.count * regions, 1, RangeTask(task));
  };
  each([&](const ZipEncoding &job, int64_t region) {
    choose(spec, job, region);
    job.out.regions()[region].count = uint32_t(encode_any<false>(job, region, 0, kZipRegion));
  });
  for (int64_t m = 0; m < out.count; ++m) {
    const ZipEncoding job = encoding_of(spec, x, out, m);
    int64_t escapes = 0;
    place(job, escapes) ? finish_coded(job, escapes) : finish_raw(job);
  }
  each([&](const ZipEncoding &job, int64_t region) {
    if (job.out.head->form == kZipCoded) encode_any<true>(job, region, job.out.regions()[region].first, kZipRegion);
  });
}

template <class Body>
int split_tiles(int64_t tiles, const Body &body) {
  std::atomic<bool> coherent{true};
  const auto task = [&](int64_t begin, int64_t end) {
    if (!body(begin, end)) coherent = false;
  };
  if (tiles > 0) parallel_for(tiles, tiles < kInlineTiles ? tiles : kGrainTiles, RangeTask(task));
  return coherent ? FL_OK : FL_BAD_MESSAGE;
}

int encode(Job &job) {
  const fl_spec &spec = *job.spec;
  const fl_messages &out = *job.out;
  if (spec.numel == 0) return FL_OK;
  const FloatEnvironment ieee;
  if (thread_count() > 1 && out.count * zip_shape(spec).regions() > 1 && zip_shape(spec).too_many() > 0) {
    encode_together(spec, job.x, out);
  } else {
    for (int64_t m = 0; m < out.count; ++m) encode_alone(spec, encoding_of(spec, job.x, out, m));
  }
  return FL_OK;
}

int decode(Job &job) {
  job.streamed = job.in->count * job.spec->numel * element_size(job.spec->dtype) >= kStreamedBytes;
  const FloatEnvironment ieee;
  return split_tiles(job.in->count * zip_shape(*job.spec).tiles(), [&](int64_t begin, int64_t end) {
    bool coherent = false;
    with_both(job, [&](auto wire, auto type) {
      coherent = zip_decode<typename decltype(wire)::type, typename decltype(type)::type>(job, begin, end);
    });
    return coherent;
  });
}

int decode_sum(Job &job) {
  const FloatEnvironment ieee;
  return split_tiles(zip_shape(*job.spec).tiles(), [&](int64_t begin, int64_t end) {
    bool coherent = false;
    with_both(job, [&](auto wire, auto type) {
      coherent = zip_decode_sum<typename decltype(wire)::type, typename decltype(type)::type>(job, begin, end);
    });
    return coherent;
  });
}

}  // namespace

const CodecVerbs zip_verbs = {encode, decode, decode_sum, nullptr, {}};

}  // namespace fl::FL_ISA
