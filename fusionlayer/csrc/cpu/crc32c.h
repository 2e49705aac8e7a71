#pragma once

#include <cstddef>
#include <cstdint>

namespace fl {

// crc32c (Castagnoli) of n bytes, continuing from crc; by tables alone where `portable`, else with the CPU's instruction
// if it has one.
uint32_t crc32c(uint32_t crc, const uint8_t *data, size_t n, bool portable);

}  // namespace fl
