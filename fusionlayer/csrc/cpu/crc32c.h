#pragma once

#include <cstddef>
#include <cstdint>

namespace fl {

// crc32c (Castagnoli) of n bytes, continuing from crc.
uint32_t crc32c(uint32_t crc, const uint8_t *data, size_t n);

}  // namespace fl
