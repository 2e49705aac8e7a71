#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fusionlayer_sockets.h"
#include "mac.h"

namespace fl::sockets {

enum class Kind : uint8_t { chunk = 1, note = 2, farewell = 3 };

constexpr uint16_t kMagic = 0x4c46;
constexpr uint32_t kLeastChunk = 4 << 10;
constexpr uint32_t kMostChunk = 1 << 20;
constexpr uint64_t kLongest = uint64_t(1) << 46;

// What precedes every chunk, and stands alone where there is none. Both ends run on one kind of machine, whose numbers
// begin with their lowest byte.
struct Frame {
  uint16_t magic = kMagic;
  Kind kind = Kind::note;
  uint8_t checked = 0;     // whether `checksum` counts; not where tags do
  uint32_t nbytes = 0;     // of the payload that follows
  uint64_t serial = 0;     // of the message, among those to this peer, from 1 on
  uint64_t key = 0;        // of the message
  uint64_t length = 0;     // of the message
  uint64_t delivered = 0;  // payload bytes that have come to where they were wanted, over all connections
  uint32_t index = 0;      // of the chunk within its message
  uint32_t chunk = 0;      // bytes of every chunk of the message but the last
  uint32_t back = 0;       // an earlier message with this key and length is under way, so many serials before; 0: none
  uint32_t received = 0;   // chunks that have come by this connection; counts on from 0 after 2^32
  uint32_t checksum = 0;   // crc32c of the payload
  uint32_t own = 0;        // crc32c of all before

  uint32_t digest() const { return fl_crc32c(0, this, offsetof(Frame, own)); }
  uint64_t offset() const { return uint64_t(index) * chunk; }

  // Whether the numbers fit each other, so that none of them leads out of a message.
  bool makes_sense() const {
    if (magic != kMagic) return false;
    if (kind == Kind::note || kind == Kind::farewell) return nbytes == 0;
    if (kind != Kind::chunk || serial == 0 || back >= serial || length == 0 || length > kLongest) return false;
    if (chunk < kLeastChunk || chunk > kMostChunk || offset() >= length) return false;
    const uint64_t left = length - offset();
    return nbytes == (left < chunk ? left : chunk);
  }
};

// A frame as it travels. The tags follow where the connection has keys.
struct Head {
  Frame frame;
  uint8_t payload_tag[kTagBytes] = {};
  uint8_t tag[kTagBytes] = {};  // of all before
};

static_assert(sizeof(Head) == sizeof(Frame) + 2 * kTagBytes);
static_assert(sizeof(Frame) == 64 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

}  // namespace fl::sockets
