// The `onebit` codec (codecs/onebit/onebit.h): a warp takes a group, lane l its elements l, 32 + l, .. in turn. So every turn accesses
// neighbours, the lanes are those of the sum, and the votes of a turn are a word of signs.
#include "arguments.h"
#include "cuda/elements.cuh"
#include "cuda/launch.cuh"
#include "onebit.h"
#include "residual.h"

namespace fl {
namespace {

constexpr int kMostTurns = 4096 / kLanes;  // of a group
static_assert(kOneBitLanes == kLanes);

struct OneBitArguments {
  int64_t numel, groups;  // of a message
  int group;
  fl_messages in, out;
  uint32_t dtype;
  const void *x;  // of all messages; may be null where messages are added up
  void *y;
  float *residual;
  bool add;
};

FL_DEVICE float *scales_of(const fl_messages &messages, int64_t m) {
  return static_cast<float *>(byte_offset(messages.plane[0], m * messages.stride));
}

FL_DEVICE uint8_t *signs_of(const fl_messages &messages, int64_t m) {
  return static_cast<uint8_t *>(messages.plane[1]) + m * messages.stride;
}

// Where a group of a message lies, for one lane: element 32 t + lane is its number t.
struct Group {
  const float *scale;
  const uint8_t *signs;  // the byte of number 0
  int bit;

  FL_DEVICE Group(const fl_messages &messages, int64_t m, int64_t g, int group)
      : scale(scales_of(messages, m) + g),
        signs(signs_of(messages, m) + g * group / 8 + lane_index() / 8),
        bit(lane_index() % 8) {}

  FL_DEVICE float at(int turn) const { return onebit_value(*scale, signs[4 * turn] >> bit & 1); }
};

FL_DEVICE float add_messages(const OneBitArguments &a, float v, int64_t g, int turn) {
  for (int64_t m = 0; m < a.in.count; ++m) v += Group(a.in, m, g, a.group).at(turn);
  return v;
}

// What the elements of a group are to become; x and residual are those of number 0.
template <class E, bool kSum, bool kResidual>
struct Wanted {
  const OneBitArguments &a;
  int64_t g;
  const typename E::Bits *x;
  float *residual;

  FL_DEVICE Wanted(const OneBitArguments &a, int64_t m, int64_t g) : a(a), g(g) {
    const int64_t at = m * a.numel + g * a.group + lane_index();
    x = !kSum || a.x ? static_cast<const typename E::Bits *>(a.x) + at : nullptr;
    residual = kResidual ? a.residual + at : nullptr;
  }

  FL_DEVICE float at(int turn) const {
    float v = !kSum || x ? E::widen(x[turn * kLanes]) : 0.0f;
    if (kSum) v = add_messages(a, v, g, turn);
    return kResidual ? v + residual[turn * kLanes] : v;
  }
};

// Words of signs; of the last one the bytes that there are.
FL_DEVICE void store_word(uint8_t *signs, uint32_t word, int left) {
  if (left > 24) {
    *reinterpret_cast<uint32_t *>(signs) = word;
  } else {
    for (int i = 0; 8 * i < left; ++i) signs[i] = uint8_t(word >> 8 * i);
  }
}

// On a multiprocessor at once, which leaves each thread 80 registers. Left alone ptxas takes fewer and spills some.
constexpr int kBlocks = 6;

template <class E, bool kSum, bool kResidual>
FL_DEVICE void encode_group(const OneBitArguments &a, int64_t m, int64_t g, uint32_t *words) {
  const int lane = lane_index();
  const int64_t first = g * a.group, left = a.numel - first;
  const int count = left < a.group ? int(left) : a.group, turns = (count + kLanes - 1) / kLanes;
  const Wanted<E, kSum, kResidual> wanted(a, m, g);
  double sum = 0.0;
#pragma unroll 8
  for (int turn = 0; turn < turns; ++turn) {
    const int i = turn * kLanes + lane;
    const float v = i < count ? wanted.at(turn) : 0.0f;
    sum += double(bits_float(float_bits(v) & 0x7fffffffu));
    const uint32_t word = ballot(float_bits(v) >> 31);
    if (lane == 0) words[turn] = word;
  }
  meet();
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);  // a + b and b + a are one number
  const float scale = onebit_scale(sum, count);
  if (lane == 0) scales_of(a.out, m)[g] = scale;
  uint8_t *signs = signs_of(a.out, m) + first / 8;
  for (int turn = lane; turn < turns; turn += kLanes)
    store_word(signs + 4 * turn, is_finite(scale) ? words[turn] : 0, count - turn * kLanes);
  if constexpr (kResidual) {
#pragma unroll 4
    for (int turn = 0; turn < turns; ++turn) {
      const int i = turn * kLanes + lane;
      if (i >= count) continue;
      float &kept = wanted.residual[turn * kLanes];
      const float sent = onebit_value(scale, words[turn] >> lane & 1);
      kept = residual_after(wanted.at(turn), sent, kept);
    }
  }
  meet();
}

template <bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocks) encode_kernel(const OneBitArguments a) {
  __shared__ uint32_t space[kWarps][kMostTurns];
  uint32_t *words = space[threadIdx.x / kLanes];
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t g = warp_index(); g < a.groups; g += warp_count())
      with_element(a.dtype, [&](auto element) { encode_group<decltype(element), kSum, kResidual>(a, m, g, words); });
}

constexpr int kAtATime = 8;  // turns

// y += all messages, of this lane's turns of a group. Values of several turns are read before any is written: the compiler
// makes no read ahead of a write that might be to it.
template <class E>
FL_DEVICE void add_group(const OneBitArguments &a, int64_t g, int turns, typename E::Bits *y) {
  for (int first = 0; first < turns; first += kAtATime) {
    float v[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) v[i] = a.add && first + i < turns ? E::widen(y[(first + i) * kLanes]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kAtATime; ++i)
      if (first + i < turns) v[i] = add_messages(a, v[i], g, first + i);
#pragma unroll
    for (int i = 0; i < kAtATime; ++i)
      if (first + i < turns) y[(first + i) * kLanes] = E::narrow(v[i]);
  }
}

// kOne: all messages become one sum; else each has its own place.
template <bool kOne>
__global__ void __launch_bounds__(kThreads, kBlocks) decode_kernel(const OneBitArguments a) {
  const int64_t rows = kOne ? 1 : a.in.count;
  for (int64_t m = blockIdx.y; m < rows; m += gridDim.y)
    for (int64_t g = warp_index(); g < a.groups; g += warp_count())
      with_element(a.dtype, [&](auto element) {
        using E = decltype(element);
        const int64_t first = g * a.group, left = a.numel - first;
        const int count = left < a.group ? int(left) : a.group;
        auto *y = static_cast<typename E::Bits *>(a.y) + m * a.numel + first + lane_index();
        const int turns = (count - lane_index() + kLanes - 1) / kLanes;  // of this lane
        if constexpr (kOne) {
          add_group<E>(a, g, turns, y);
        } else {
          const Group in(a.in, m, g, a.group);
#pragma unroll 4
          for (int turn = 0; turn < turns; ++turn) y[turn * kLanes] = E::narrow(in.at(turn));
        }
      });
}

cudaError_t launch(void (*kernel)(OneBitArguments), const OneBitArguments &a, int64_t outputs, cudaStream_t stream) {
  return launch_over(Grid(a.groups, outputs), kernel, a, stream);
}

OneBitArguments arguments(const fl_spec &spec) {
  OneBitArguments a{};
  a.numel = spec.numel, a.groups = group_count(spec), a.group = int(spec.param[1]), a.dtype = spec.dtype;
  return a;
}

}  // namespace

cudaError_t onebit_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                          cudaStream_t stream) {
  OneBitArguments a = arguments(spec);
  a.x = x, a.residual = residual, a.out = out;
  return launch(residual ? encode_kernel<false, true> : encode_kernel<false, false>, a, out.count, stream);
}

cudaError_t onebit_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  OneBitArguments a = arguments(spec);
  a.in = in, a.y = out;
  return launch(decode_kernel<false>, a, in.count, stream);
}

cudaError_t onebit_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  OneBitArguments a = arguments(spec);
  a.in = in, a.y = out, a.add = add;
  return launch(decode_kernel<true>, a, 1, stream);
}

cudaError_t onebit_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                          const fl_messages &out, cudaStream_t stream) {
  OneBitArguments a = arguments(spec);
  a.in = in, a.x = x, a.residual = residual, a.out = out;
  return launch(residual ? encode_kernel<true, true> : encode_kernel<true, false>, a, 1, stream);
}

const Encoders onebit_encoders = {onebit_encode, onebit_recode, nullptr};
const Decoders onebit_decoders = {onebit_decode, onebit_decode_sum};

}  // namespace fl
