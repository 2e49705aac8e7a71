// Feeds the decoders of FL_ZIP, FL_RANS and FL_DELTA what no encoder makes; sanitizers watch. With -fsanitize=fuzzer the
// library brings main and the inputs; otherwise main makes inputs: fuzz [isa] [runs] [seed].
//
// An input is six bytes (codec and types, mode, elements, messages), then bytes of the messages themselves, or, in the
// other mode, changes to messages that an encoder has made.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "arguments.h"
#include "fusionlayer_codec.h"

namespace {

struct Free {
  void operator()(void *p) const { std::free(p); }
};
using Room = std::unique_ptr<uint8_t, Free>;

// Exactly as much as is asked for, so that a byte behind it is seen.
Room room(int64_t bytes) { return Room(static_cast<uint8_t *>(std::malloc(bytes > 0 ? size_t(bytes) : 1))); }

uint64_t next(uint64_t &state) {
  state += 0x9e3779b97f4a7c15;
  uint64_t z = state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

int64_t size_of(uint32_t dtype) { return dtype == FL_F32 ? 4 : 2; }

// Elements most of whose exponents are near one another.
void fill(uint8_t *x, int64_t numel, uint32_t dtype, uint64_t seed) {
  for (int64_t i = 0; i < numel; ++i) {
    const uint64_t bits = next(seed);
    const bool common = bits >> 60;
    const uint32_t exponent = common ? 120 + uint32_t(bits >> 50 & 7) : uint32_t(bits >> 40 & 255);
    const uint32_t word = (uint32_t(bits) & 0x807fffffu) | exponent << 23;
    const uint32_t few = common ? 10 + uint32_t(bits >> 50 & 7) : uint32_t(bits >> 40 & 31);
    const uint16_t half = uint16_t(dtype == FL_F16 ? (uint32_t(bits) & 0x83ffu) | few << 10 : word >> 16);
    if (dtype == FL_F32)
      std::memcpy(x + 4 * i, &word, 4);
    else
      std::memcpy(x + 2 * i, &half, 2);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 6) return 0;
  const bool rans = data[0] & 1, delta = data[0] >> 5 & 1, mutated = data[1] & 1;
  fl_spec spec{};
  spec.codec = delta ? FL_DELTA : rans ? FL_RANS : FL_ZIP;
  const uint32_t wire = (data[0] >> 1) % 3, type = (data[0] >> 3) % 3;
  spec.dtype = wire;
  if (!delta) spec.param[0] = wire;
  if (!rans && !delta) spec.param[1] = (data[1] >> 1) % 3;
  spec.numel = data[2] | data[3] << 8 | (data[4] & 1) << 16;
  const int64_t count = 1 + (data[4] >> 1) % 3;
  const uint64_t seed = data[5];
  data += 6;
  size -= 6;

  // One message after the other, each plane alone.
  const int64_t bytes[2] = {fl::plane_bytes(spec, 0), fl::plane_bytes(spec, 1)};
  const int64_t elements = spec.numel * size_of(wire);
  for (int64_t m = 0; m < count; ++m) {
    const Room planes[2] = {room(bytes[0]), room(bytes[1])};
    fl_messages message{{planes[0].get(), planes[1].get(), nullptr, nullptr}, 0, 1};
    for (int p = 0; p < 2; ++p) std::memset(planes[p].get(), 0, size_t(bytes[p]));
    const Room base = room(elements);
    uint8_t of_base[4] = {};
    if (delta) {
      const Room x = room(elements);
      fill(base.get(), spec.numel, wire, seed + uint64_t(m));
      if (elements) std::memcpy(x.get(), base.get(), size_t(elements));
      uint64_t state = seed;
      const uint64_t one_in = 1 + (seed & 63);
      for (int64_t i = 0; mutated && i < elements; ++i)
        if (next(state) % one_in == 0) x.get()[i] ^= uint8_t(next(state) & (seed >> 4 | 1));
      const Room back = room(elements);
      if (fl_delta_encode(&spec, x.get(), base.get(), &message, nullptr, nullptr) != FL_OK) std::abort();
      if (fl_delta_decode(&spec, &message, base.get(), back.get(), nullptr, nullptr, nullptr) != FL_OK) std::abort();
      if (elements && std::memcmp(x.get(), back.get(), size_t(elements)) != 0) std::abort();
      if (bytes[0]) std::memcpy(of_base, planes[0].get() + 8, sizeof of_base);
    } else if (mutated) {
      const Room x = room(elements);
      fill(x.get(), spec.numel, wire, seed + uint64_t(m));
      if (fl_encode(&spec, x.get(), nullptr, &message, nullptr) != FL_OK) std::abort();
      const Room back = room(elements);
      if (fl_decode(&spec, &message, back.get(), nullptr) != FL_OK) std::abort();
      if (elements && std::memcmp(x.get(), back.get(), size_t(elements)) != 0) std::abort();
    }
    if (mutated) {
      for (; size >= 5; data += 5, size -= 5) {
        const int64_t place = data[0] | data[1] << 8 | data[2] << 16;
        const int p = data[3] & 1;
        if (bytes[p]) planes[p].get()[place % bytes[p]] ^= data[4];
      }
    } else {
      int64_t taken = 0;
      for (int p = 0; p < 2; ++p) {
        const int64_t n = int64_t(size) - taken < bytes[p] ? int64_t(size) - taken : bytes[p];
        if (n > 0) std::memcpy(planes[p].get(), data + taken, size_t(n));
        taken += n;
      }
      if (bytes[0] && seed & 1) std::memset(planes[0].get(), 0, 4), planes[0].get()[0] = 1;  // a form that exists
    }
    if (delta) {  // with the digest of the base, so that the message is looked at
      if (bytes[0]) std::memcpy(planes[0].get() + 8, of_base, sizeof of_base);
      const int status = fl_delta_decode(&spec, &message, base.get(), base.get(), nullptr, nullptr, nullptr);
      if (status != FL_OK && status != FL_BAD_MESSAGE) std::abort();
      continue;
    }
    fl_spec target = spec;
    target.dtype = type;
    const Room out = room(spec.numel * size_of(type));
    std::memset(out.get(), 0, size_t(spec.numel * size_of(type)));
    for (const int status : {fl_decode(&target, &message, out.get(), nullptr),
                             fl_decode_sum(&target, &message, out.get(), int(m & 1), nullptr)})
      if (status != FL_OK && status != FL_BAD_MESSAGE) std::abort();
  }
  return 0;
}

#if !defined(FL_LIBFUZZER)
int main(int count, char **words) {
  if (count > 1 && fl_select_isa(words[1]) != FL_OK) return 2;
  const long runs = count > 2 ? std::atol(words[2]) : 1000;
  uint64_t state = count > 3 ? uint64_t(std::atol(words[3])) : 1;
  std::vector<uint8_t> input;
  for (long run = 0; run < runs; ++run) {
    const uint64_t kind = next(state);
    // Few changes, so that a message gets far; or noise, short and long.
    const size_t length = kind & 1 ? 5 * (kind >> 8 & 3) : (kind >> 8) % ((kind & 6) == 2 ? 40000 : 600);
    input.resize(6 + length);
    for (uint8_t &byte : input) byte = uint8_t(next(state));
    input[1] = uint8_t((input[1] & ~1) | (kind & 1));
    if (kind & 8) input[3] = input[4] = 0;
    if (kind & 16)
      for (size_t at = 6; at + 5 <= input.size(); at += 5) input[at + 2] = 0, input[at + 1] &= 1;
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%ld inputs\n", runs);
  return 0;
}
#endif
