// Tries `quotient` of cpu/simd.h with all pairs of 24-bit integers a and b whose quotient lies within kNear / 2b of the distance
// of two floats from the middle of these, and prints how many there are and how many come out wrong. Of no other quotient can
// an error of 3 / 2^24 of that distance change how it is rounded, since b is below 2^24.
#include <cstdio>
#include <initializer_list>

#include "simd.h"

namespace {

using namespace fl::FL_ISA;

constexpr int64_t kOne = int64_t(1) << 24;  // a mantissa is from a half of this on
constexpr int kNear = 8;

struct Count {
  long tried = 0, wrong = 0;
  int lanes = 0;
  vf a = broadcast(1.0f), b = broadcast(1.0f);

  void add(int64_t top, int64_t bottom) {
    a[lanes] = float(top);
    b[lanes] = float(bottom);
    if (++lanes == kLanes) check();
  }

  void check() {
    const vi differ = quotient(a, b, broadcast(1.0f) / b) != a / b;
    for (int i = 0; i < lanes; ++i) wrong -= differ[i];
    tried += lanes;
    lanes = 0;
  }
};

// Adds each a with a * 2^shift = middle * b + left, `middle` being an odd number of 25 bits.
void add_near(int64_t b, int64_t left, int shift, Count &count) {
  const int twos = __builtin_ctzll(uint64_t(b));
  if (left % (int64_t(1) << twos)) return;
  const uint64_t odd = uint64_t(b) >> twos;
  uint64_t inverse = odd;  // of 64 bits after five steps
  for (int step = 0; step < 5; ++step) inverse *= 2 - odd * inverse;
  const int64_t period = int64_t(1) << (shift - twos);
  int64_t middle = int64_t(uint64_t(-left >> twos) * inverse) & (period - 1);
  if (middle % 2 == 0) return;
  while (middle < kOne) middle += period;
  for (; middle < 2 * kOne; middle += period) {
    const int64_t a = (middle * b + left) >> shift;
    if (a >= kOne / 2 && a < kOne && (a >= b) == (shift == 24)) count.add(a, b);
  }
}

}  // namespace

int main() {
  Count count;
  for (int64_t b = kOne / 2; b < kOne; ++b)
    for (int left = 1; left <= kNear; ++left)
      for (int shift : {24, 25}) {
        add_near(b, left, shift, count);
        add_near(b, -left, shift, count);
      }
  count.check();
  std::printf("%ld quotients, %ld wrong\n", count.tried, count.wrong);
  return count.wrong != 0;
}
