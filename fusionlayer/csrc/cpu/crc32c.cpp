#include "crc32c.h"

#include <array>
#include <cstring>

#include "crc.h"

#if defined(__x86_64__)
#pragma GCC diagnostic push  // gcc 12 warns of its own _mm512_undefined_epi32
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace fl {
namespace {

using Table = std::array<uint32_t, 256>;

// tables[k][b]: the register after byte b and k zero bytes.
constexpr std::array<Table, 8> make_byte_tables() {
  std::array<Table, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int i = 0; i < 8; ++i) crc = crc_shifted(crc);
    tables[0][b] = crc;
  }
  for (int k = 1; k < 8; ++k)
    for (int b = 0; b < 256; ++b) {
      const uint32_t crc = tables[k - 1][b];
      tables[k][b] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  return tables;
}

constexpr std::array<Table, 8> kByteTables = make_byte_tables();

uint64_t load64(const uint8_t *p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

uint32_t update_byte(uint32_t crc, uint8_t byte) { return (crc >> 8) ^ kByteTables[0][(crc ^ byte) & 0xff]; }

uint32_t update_portable(uint32_t crc, const uint8_t *p, size_t n) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; n >= 8; n -= 8, p += 8) {
    const uint64_t v = load64(p) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= kByteTables[7 - i][v >> (8 * i) & 0xff];
  }
#endif
  for (; n; --n) crc = update_byte(crc, *p++);
  return crc;
}

#if defined(__x86_64__)

// Three streams of kStream bytes hide the latency of the crc32 instruction; their registers are then joined.
constexpr size_t kStream = 2048;

// tables[k][b]: what byte k = b of the register becomes after kStream zero bytes.
constexpr std::array<Table, 4> make_shift_tables() {
  std::array<Table, 4> tables{};
  std::array<uint32_t, 32> bits{};
  for (int i = 0; i < 32; ++i) bits[i] = uint32_t(1) << i;
  // Squaring the map "one zero bit" log2(8 * kStream) times.
  for (int i = 0; i < 32; ++i) bits[i] = crc_shifted(bits[i]);
  for (size_t zeros = 1; zeros < 8 * kStream; zeros *= 2) {
    std::array<uint32_t, 32> squared{};
    for (int i = 0; i < 32; ++i)
      for (int j = 0; j < 32; ++j)
        if (bits[i] >> j & 1) squared[i] ^= bits[j];
    bits = squared;
  }
  for (int k = 0; k < 4; ++k)
    for (int b = 0; b < 256; ++b)
      for (int j = 0; j < 8; ++j)
        if (b >> j & 1) tables[k][b] ^= bits[8 * k + j];
  return tables;
}

constexpr std::array<Table, 4> kShiftTables = make_shift_tables();

uint32_t shift_stream(uint32_t crc) {
  return kShiftTables[0][crc & 0xff] ^ kShiftTables[1][crc >> 8 & 0xff] ^ kShiftTables[2][crc >> 16 & 0xff] ^
         kShiftTables[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t crc, const uint8_t *p, size_t n) {
  for (; n >= 3 * kStream; n -= 3 * kStream, p += 3 * kStream) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kStream + i));
      c = _mm_crc32_u64(c, load64(p + 2 * kStream + i));
    }
    crc = shift_stream(shift_stream(uint32_t(a)) ^ uint32_t(b)) ^ uint32_t(c);
  }
  for (; n >= 8; n -= 8, p += 8) crc = uint32_t(_mm_crc32_u64(crc, load64(p)));
  for (; n; --n) crc = _mm_crc32_u8(crc, *p++);
  return crc;
}

const bool has_sse42 = __builtin_cpu_supports("sse4.2");

// Vectors of 64 bytes are folded: what is left of one is carried over as many bits as there are between it and the vector
// that it is added to, by multiplying its halves by powers of x modulo the polynomial (Gopal et al., Intel 2009).
constexpr int kFolded = 4;  // vectors side by side, which hide the latency of a multiplication
constexpr size_t kFold = kFolded * 64;

// x to this power, bits reversed, as a factor of a half.
constexpr int64_t power_factor(int power) {
  uint32_t crc = 1u << 31;
  for (int i = 0; i < power; ++i) crc = crc_shifted(crc);
  return int64_t(uint64_t(crc) << 1);
}

__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i fold(__m512i a, __m512i factors, __m512i to) {
  const __m512i low = _mm512_clmulepi64_epi128(a, factors, 0x00), high = _mm512_clmulepi64_epi128(a, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, to, 0x96);
}

__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) uint32_t update_folding(uint32_t crc, const uint8_t *p, size_t n) {
  if (n < 2 * kFold) return update_sse42(crc, p, n);
  constexpr int64_t kLow = power_factor(8 * kFold + 32), kHigh = power_factor(8 * kFold - 32);
  const __m512i factors = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
  __m512i v[kFolded];
  for (int i = 0; i < kFolded; ++i) v[i] = _mm512_loadu_si512(p + 64 * i);
  v[0] = _mm512_xor_si512(v[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
  for (p += kFold, n -= kFold; n >= kFold; p += kFold, n -= kFold)
    for (int i = 0; i < kFolded; ++i) v[i] = fold(v[i], factors, _mm512_loadu_si512(p + 64 * i));
  alignas(64) uint8_t rest[kFold];
  for (int i = 0; i < kFolded; ++i) _mm512_store_si512(rest + 64 * i, v[i]);
  return update_sse42(update_sse42(0, rest, kFold), p, n);
}

const bool has_folding = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");

#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const uint8_t *data, size_t n, [[maybe_unused]] bool portable) {
#if defined(__x86_64__)
  if (has_folding && has_sse42 && !portable) return ~update_folding(~crc, data, n);
  if (has_sse42 && !portable) return ~update_sse42(~crc, data, n);
#endif
  return ~update_portable(~crc, data, n);
}

}  // namespace fl
