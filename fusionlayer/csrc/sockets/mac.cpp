#include "mac.h"

#include <cstring>

namespace fl::sockets {
namespace {

using Wide = unsigned __int128;

constexpr size_t kBlock = 16;
constexpr uint64_t kMask44 = (uint64_t(1) << 44) - 1;
constexpr uint64_t kMask42 = (uint64_t(1) << 42) - 1;

uint32_t rotated(uint32_t x, int by) { return x << by | x >> (32 - by); }

void quarter_round(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
  a += b, d = rotated(d ^ a, 16);
  c += d, b = rotated(b ^ c, 12);
  a += b, d = rotated(d ^ a, 8);
  c += d, b = rotated(b ^ c, 7);
}

// The first half of block 0 of ChaCha20: the one-time key of Poly1305.
void one_time_key(const uint32_t *key, const uint32_t *nonce, uint64_t *out) {
  uint32_t start[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
  std::memcpy(start + 4, key, 32);
  std::memcpy(start + 13, nonce, 12);
  uint32_t x[16];
  std::memcpy(x, start, sizeof x);
  for (int i = 0; i < 10; ++i) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[1], x[5], x[9], x[13]);
    quarter_round(x[2], x[6], x[10], x[14]);
    quarter_round(x[3], x[7], x[11], x[15]);
    quarter_round(x[0], x[5], x[10], x[15]);
    quarter_round(x[1], x[6], x[11], x[12]);
    quarter_round(x[2], x[7], x[8], x[13]);
    quarter_round(x[3], x[4], x[9], x[14]);
  }
  for (int i = 0; i < 8; ++i) x[i] += start[i];
  std::memcpy(out, x, 32);
}

// A number below 2^131 in limbs of 44, 44 and 42 bits, the lowest first.
struct Number {
  uint64_t low, middle, high;
};

// Sums of products that are reduced together: of four products no limb comes near 2^128.
struct Products {
  Wide low = 0, middle = 0, high = 0;

  // 2^132 is 4 * 5 modulo 2^130 - 5, so what leaves the highest limb comes back in the lowest, 20 times.
  void add(const Number &a, const Number &b) {
    const uint64_t middle20 = b.middle * 20, high20 = b.high * 20;
    low += Wide(a.low) * b.low + Wide(a.middle) * high20 + Wide(a.high) * middle20;
    middle += Wide(a.low) * b.middle + Wide(a.middle) * b.low + Wide(a.high) * high20;
    high += Wide(a.low) * b.high + Wide(a.middle) * b.middle + Wide(a.high) * b.low;
  }

  Number reduced() const {
    Number out;
    out.low = uint64_t(low) & kMask44;
    const Wide second = middle + uint64_t(low >> 44);
    out.middle = uint64_t(second) & kMask44;
    const Wide third = high + uint64_t(second >> 44);
    out.high = uint64_t(third) & kMask42;
    out.low += uint64_t(third >> 42) * 5;
    out.middle += out.low >> 44;
    out.low &= kMask44;
    return out;
  }
};

Number times(const Number &a, const Number &b) {
  Products products;
  products.add(a, b);
  return products.reduced();
}

Number block_at(const uint8_t *data) {
  uint64_t words[2];
  std::memcpy(words, data, sizeof words);
  return {words[0] & kMask44, (words[0] >> 44 | words[1] << 20) & kMask44, words[1] >> 24 | uint64_t(1) << 40};
}

Number plus(const Number &a, const Number &b) { return {a.low + b.low, a.middle + b.middle, a.high + b.high}; }

class Poly1305 {
 public:
  explicit Poly1305(const uint64_t *key) : pad_{key[2], key[3]} {
    const uint64_t low = key[0] & 0x0ffffffc0fffffff, high = key[1] & 0x0ffffffc0ffffffc;
    powers_[0] = {low & kMask44, (low >> 44 | high << 20) & kMask44, high >> 24};
  }

  // Whole blocks; four at once, so that their carries are taken once.
  void add(const uint8_t *data, size_t blocks) {
    if (blocks >= 4)
      for (int i = 1; i < 4; ++i) powers_[i] = times(powers_[i - 1], powers_[0]);
    for (; blocks >= 4; blocks -= 4, data += 4 * kBlock) {
      Products products;
      products.add(plus(sum_, block_at(data)), powers_[3]);
      for (int i = 1; i < 4; ++i) products.add(block_at(data + size_t(i) * kBlock), powers_[3 - i]);
      sum_ = products.reduced();
    }
    for (; blocks; --blocks, data += kBlock) sum_ = times(plus(sum_, block_at(data)), powers_[0]);
  }

  void finish(uint8_t *tag) const {
    // Carried all through, the sum is below 2^130; it may be the modulus or more still.
    Number x = sum_;
    for (int round = 0; round < 2; ++round) {
      x.middle += x.low >> 44, x.low &= kMask44;
      x.high += x.middle >> 44, x.middle &= kMask44;
      x.low += (x.high >> 42) * 5, x.high &= kMask42;
    }
    x.middle += x.low >> 44, x.low &= kMask44;
    // Minus the modulus, which is plus 5 minus 2^130; taken where that is not below zero, without a branch.
    Number less = {x.low + 5, x.middle, x.high};
    less.middle += less.low >> 44, less.low &= kMask44;
    less.high += less.middle >> 44, less.middle &= kMask44;
    const uint64_t take = uint64_t(0) - (less.high >> 42);
    x.low = (x.low & ~take) | (less.low & take);
    x.middle = (x.middle & ~take) | (less.middle & take);
    x.high = (x.high & ~take) | (less.high & kMask42 & take);
    Wide sum = (Wide(x.middle >> 20 | x.high << 24) << 64) | (x.low | x.middle << 44);
    sum += Wide(pad_[1]) << 64 | pad_[0];
    std::memcpy(tag, &sum, kTagBytes);
  }

 private:
  Number sum_{0, 0, 0};
  Number powers_[4];  // of the key, from the first on
  uint64_t pad_[2];
};

}  // namespace

void Mac::open(const uint8_t *key) {
  is_on_ = key != nullptr;
  if (key) std::memcpy(key_, key, sizeof key_);
  frame_ = 0;
}

void Mac::write(Part part, const void *data, size_t nbytes, uint8_t *tag) const {
  const uint32_t nonce[3] = {uint32_t(part), uint32_t(frame_), uint32_t(frame_ >> 32)};
  uint64_t key[4];
  one_time_key(key_, nonce, key);
  Poly1305 poly(key);
  const auto *bytes = static_cast<const uint8_t *>(data);
  const size_t blocks = nbytes / kBlock, rest = nbytes % kBlock;
  poly.add(bytes, blocks);
  uint8_t last[2 * kBlock] = {};  // the rest of the data, then both lengths
  if (rest) std::memcpy(last, bytes + blocks * kBlock, rest);
  const uint64_t length = nbytes;
  std::memcpy(last + kBlock, &length, sizeof length);
  poly.add(rest ? last : last + kBlock, rest ? 2 : 1);
  poly.finish(tag);
}

bool Mac::is_right(Part part, const void *data, size_t nbytes, const uint8_t *tag) const {
  uint8_t expected[kTagBytes];
  write(part, data, nbytes, expected);
  uint8_t differ = 0;  // the time tells nothing of where
  for (size_t i = 0; i < kTagBytes; ++i) differ |= expected[i] ^ tag[i];
  return differ == 0;
}

}  // namespace fl::sockets
