// Exact selection. In a large tensor, a sample tells between which two magnitudes the k-th lies almost surely. One pass
// counts the elements above and gathers the few between; the k-th is then found among these. If the sample was wrong, if
// too many are equal, or if the tensor is small, a histogram decides ten or eleven bits at a time. The result is the same.
#include "select.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "rng.h"

namespace fl {
namespace {

constexpr int64_t kSampled = 8192;  // elements: from there on a sample pays
constexpr int64_t kMostSamples = 8192;
constexpr int64_t kGrain = 16384;

// One pass for each digit of a magnitude, the highest first.
struct Digit {
  int shift, bits;
};
constexpr Digit kDigits[] = {{20, 11}, {10, 10}, {0, 10}};
constexpr int kBins = 1 << 11;

fl_kth by_histogram(const float *x, int64_t n, int64_t k) {
  uint32_t prefix = 0;
  int64_t above = 0;
  for (const Digit digit : kDigits) {
    int64_t bins[2][kBins] = {};  // two, since neighbours often fall into the same bin
    const uint32_t mask = (1u << digit.bits) - 1;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = magnitude(x[i]) >> digit.shift;
      if (bits >> digit.bits == prefix) ++bins[i & 1][bits & mask];
    }
    uint32_t bin = mask;
    for (;; --bin) {
      const int64_t count = bins[0][bin] + bins[1][bin];
      if (above + count >= k) break;
      above += count;
    }
    prefix = prefix << digit.bits | bin;
  }
  return {int64_t(prefix), above};
}

// Elements at irregular distances: a tensor's rows must not be sampled in step.
int64_t draw(const float *x, int64_t n, float *samples) {
  const int64_t count = std::min(n / 16, kMostSamples), stride = n / count;
  const RngKey key = make_key(uint64_t(n));
  for (int64_t i = 0; i < count; ++i)
    samples[i] = x[i * stride + int64_t(uint64_t(random_bits(key, uint32_t(i))) * uint64_t(stride) >> 32)];
  return count;
}

// Sets the bracket five standard deviations of the sample's rank around its k-th.
void guess(const float *x, int64_t n, int64_t k, Bracket &bracket) {
  float samples[kMostSamples];
  const int64_t count = draw(x, n, samples);
  const double share = double(k) / double(n), rank = share * double(count);
  const int64_t margin = int64_t(5 * std::sqrt(rank * (1 - share))) + 5;
  const int64_t upper = int64_t(rank) - margin, lower = int64_t(rank) + margin;
  bracket.high = upper < 1 ? kMagnitudeBits : uint32_t(by_histogram(samples, count, upper).magnitude);
  bracket.low = lower > count ? 0 : uint32_t(by_histogram(samples, count, lower).magnitude);
}

int64_t room(int64_t n) { return n / 16 + 256; }

}  // namespace

int64_t kth_workspace(int64_t n) { return n < kSampled ? 0 : room(n) * int64_t(sizeof(uint32_t)); }

fl_kth kth_magnitude(const float *x, int64_t n, int64_t k, void *workspace) {
  if (n < kSampled) return by_histogram(x, n, k);
  Bracket bracket;
  bracket.gathered = static_cast<uint32_t *>(workspace);
  bracket.room = room(n);
  guess(x, n, k, bracket);
  const auto task = [&](int64_t begin, int64_t end) {
    kernels().gather(x + begin * kGrain, std::min(n, end * kGrain) - begin * kGrain, bracket);
  };
  const int64_t units = ceil_div(n, kGrain);
  parallel_for(units, units < 8 ? units : 1, RangeTask(task));
  const int64_t above = bracket.above, count = bracket.count;
  if (above >= k || above + count < k || count > bracket.room) return by_histogram(x, n, k);
  fl_kth found = by_histogram(static_cast<const float *>(workspace), count, k - above);
  found.above += above;
  return found;
}

// Numbers are spread evenly: the k-th lies almost surely within six standard deviations of its share. One pass counts the
// numbers below and gathers the few between.
uint32_t kth_drawn(RngKey key, uint64_t offset, int64_t n, int64_t k, void *workspace) {
  const auto drawn = [=](int64_t i) { return half_drawn(key, offset + uint64_t(i)); };
  if (n < kSampled) {
    uint32_t all[kSampled];
    for (int64_t i = 0; i < n; ++i) all[i] = drawn(i);
    std::nth_element(all, all + k - 1, all + n);
    return all[k - 1];
  }
  const double share = double(k) / double(n), count = double(n), all = double(kNumbers / 2);
  const double margin = 6 * std::sqrt(share * (1 - share) / count) + 24 / count;
  const uint32_t low = uint32_t(std::max(0.0, share - margin) * all);
  const uint32_t high = uint32_t(std::min(1.0, share + margin) * all);
  uint32_t *gathered = static_cast<uint32_t *>(workspace);
  std::atomic<int64_t> below{0}, between{0};
  const auto task = [&](int64_t begin, int64_t end) {
    int64_t less = 0;
    for (int64_t i = begin * kGrain; i < std::min(n, end * kGrain); ++i) {
      const uint32_t half = drawn(i);
      less += half < low;
      if (half < low || half >= high) continue;
      const int64_t slot = between.fetch_add(1, std::memory_order_relaxed);
      if (slot < room(n)) gathered[slot] = half;
    }
    below += less;
  };
  const int64_t units = ceil_div(n, kGrain);
  parallel_for(units, units < 8 ? units : 1, RangeTask(task));
  const int64_t rank = k - below;
  if (0 < rank && rank <= between && between <= room(n)) {
    std::nth_element(gathered, gathered + rank - 1, gathered + between);
    return gathered[rank - 1];
  }
  uint32_t least = 0, most = kMagnitudeBits;  // as good as never: halve the range until one number is left
  while (least < most) {
    const uint32_t middle = least + (most - least) / 2;
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += drawn(i) <= middle;
    (found < k ? least : most) = middle + (found < k);
  }
  return least;
}

}  // namespace fl
