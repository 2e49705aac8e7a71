#pragma once

#include <cstddef>
#include <cstdint>

namespace fl::sockets {

constexpr size_t kKeyBytes = 32;
constexpr size_t kTagBytes = 16;

// Message authentication codes of one direction of a connection. A tag is that of ChaCha20-Poly1305 (RFC 8439) where the
// data is the associated data and there is no plaintext. The nonce has the part of the frame and the number of the frame,
// so no nonce is used twice with a key, and a frame that is repeated, left out or moved has a wrong tag.
class Mac {
 public:
  enum class Part : uint32_t { head = 0, payload = 1 };

  // `key`: of this direction of this connection alone; null: frames have no tags.
  void open(const uint8_t *key);
  bool is_on() const { return is_on_; }
  // The first frame has number 1.
  void next_frame() { ++frame_; }
  // Writes the tag of a part of this frame.
  void write(Part part, const void *data, size_t nbytes, uint8_t *tag) const;
  bool is_right(Part part, const void *data, size_t nbytes, const uint8_t *tag) const;

 private:
  bool is_on_ = false;
  uint32_t key_[kKeyBytes / 4];
  uint64_t frame_ = 0;
};

}  // namespace fl::sockets
