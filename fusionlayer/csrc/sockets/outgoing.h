#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace fl::sockets {

using Bytes = std::unique_ptr<uint8_t[]>;

// A message on its way to a peer.
struct OutMessage {
  uint64_t serial, key, length;
  uint32_t back, chunk, chunks;
  const uint8_t *data;   // null once the caller has it back
  uint32_t next = 0;     // the first chunk that no connection has taken yet
  uint32_t written = 0;  // chunks that some connection has taken whole
  uint32_t acknowledged = 0;
  std::vector<uint8_t> states;  // of each chunk, bits kWritten and kAcknowledged
  std::vector<Bytes> copies;    // of chunks that may have to travel again

  static constexpr uint8_t kWritten = 1, kAcknowledged = 2;

  uint64_t offset(uint32_t index) const { return uint64_t(index) * chunk; }
  uint32_t nbytes(uint32_t index) const {
    const uint64_t left = length - offset(index);
    return left < chunk ? uint32_t(left) : chunk;
  }
  const uint8_t *at(uint32_t index) const {
    if (data) return data + offset(index);
    return copies.empty() ? nullptr : copies[index].get();
  }
  void copy(uint32_t index);
};

// A chunk of a message.
struct Piece {
  std::shared_ptr<OutMessage> message;
  uint32_t index = 0;
};

// What one peer has yet to receive or to acknowledge.
class Outgoing {
 public:
  // Whether chunks are kept until they are acknowledged, because they may have to travel again.
  void open(int connections, uint64_t window) {
    connections_ = uint32_t(connections);
    window_ = window;
  }

  // `data` must stay until `settle`.
  void post(const void *data, uint64_t length, uint64_t key);
  // The next chunk that may travel, or one without a message.
  Piece pull();
  // The piece has left, perhaps for good: to the kernel of this host.
  void note_written(const Piece &piece);
  void note_acknowledged(const Piece &piece);
  void note_delivered(uint64_t bytes) { delivered_ = bytes > delivered_ ? bytes : delivered_; }
  // Let a piece travel again that may have been lost.
  void repeat(const Piece &piece);
  // Bytes that no connection has taken yet, and those of the next chunk.
  uint64_t untaken() const { return untaken_; }
  uint64_t next_nbytes() const { return waiting_.empty() ? 0 : waiting_.front()->nbytes(waiting_.front()->next); }
  // Whether all that calls wait for has been taken by connections.
  bool is_written() const { return unwritten_ == 0; }
  bool is_acknowledged() const { return open_.empty(); }
  uint64_t unacknowledged() const { return open_.size(); }
  // Give the caller its memory back. Chunks that may have to travel again are copied.
  void settle();

 private:
  uint32_t connections_ = 1;
  uint64_t window_ = 0, serial_ = 0, sent_ = 0, delivered_ = 0, unwritten_ = 0, untaken_ = 0;
  std::deque<std::shared_ptr<OutMessage>> open_;     // those that are not acknowledged whole
  std::deque<std::shared_ptr<OutMessage>> waiting_;  // those with chunks that no connection has taken
  std::deque<Piece> again_;
};

}  // namespace fl::sockets
