#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "frame.h"
#include "incoming.h"
#include "outgoing.h"
#include "tls.h"

namespace fl::sockets {

// What came of reading or writing.
enum class Step { none, some, lost, damaged, nonsense };

struct Peer;

// How fast a connection is, as the kernel has measured it: bytes a second, 0 if it does not know, and bytes that have
// been written and not acknowledged.
struct Pace {
  double rate = 0, backlog = 0;
};

// One TCP connection to a peer, with the frame that is being read and the one that is being written.
class Connection {
 public:
  ~Connection() { close(); }

  // `connections`: how many there are to the peer. `keys`: of what is sent, then of what comes; null: there are no tags.
  // With `tls` they serve it, and there are no tags either.
  enum class Tunnel { none, as_caller, as_host };
  void open(int fd, int connections, const uint8_t *keys, Tunnel tls);
  // A connection that is closed in a forked child is its parent's, and is not shut.
  void close();
  // The same in a forked child, where another thread may have been in the middle of a call.
  void forget();
  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }

  // Reads what has come, up to a bound, and hands it to the peer.
  Step read(Peer &peer);
  // Begins to send a chunk, or a frame without one. Only when nothing is being written.
  void begin(Peer &peer, Piece piece);
  void begin(Peer &peer, Kind kind);
  // Goes on writing; `some` if the frame has left as a whole.
  Step write(Peer &peer);

  bool is_writing() const { return head_left_ > 0 || body_left_ > 0; }
  const Piece &piece() const { return piece_; }
  // What was sent by this connection and not acknowledged, the frame that is being written included.
  void abandon(Outgoing &outgoing);
  // Forgets what `abandon` has told of.
  void drop();
  bool has_flight() const { return !flight_.empty(); }
  uint64_t flight_bytes() const { return flight_bytes_; }
  uint64_t sent() const { return sent_; }
  uint64_t heard() const { return heard_; }  // bytes that have come
  // What has come since the peer was told last.
  uint32_t untold() const { return received_ - told_; }
  uint64_t untold_bytes() const { return untold_bytes_; }
  // Whether it is in the middle of the same chunk.
  bool is_at(const Frame &frame) const;
  // Reads the rest of the chunk without keeping it.
  void turn_away();
  // Whether the kernel has sent what was not acknowledged twice and more, in vain: the network is in trouble, not the
  // peer's program.
  bool is_in_trouble() const;
  Pace pace() const;

  bool readable = false, writable = false, stalled = false, bid_farewell = false;
  int64_t heard_at = 0;  // when a look found last that something had come
  uint64_t heard_then = 0;
  bool repeated = false;  // whether what it has under way travels by another one, too

 private:
  Step take(Peer &peer);
  Step take_head(Peer &peer);
  Step start_payload(Peer &peer);
  Step end_payload(Peer &peer);
  void begin(Peer &peer, const Frame &frame, const uint8_t *payload);
  bool needs_checksum(const Peer &peer) const;
  size_t head_bytes() const { return sending_.is_on() ? sizeof(Head) : sizeof(Frame); }

  static constexpr size_t kStaging = 16 << 10;

  int fd_ = -1;
  // What is being read.
  uint8_t staging_[kStaging];
  size_t begin_ = 0, end_ = 0;
  Head arrived_;
  Frame &frame_ = arrived_.frame;
  Mac arriving_, sending_;
  std::unique_ptr<Tls> tls_;
  bool was_up_ = false;        // whether its handshake had ended when something was read last
  uint32_t left_ = 0;          // payload bytes that are missing
  uint8_t *target_ = nullptr;  // where the next one goes; null: nowhere
  Bytes own_;                  // memory of the payload, unless it goes where it is wanted
  bool is_kept_ = false;       // whether the payload counts
  uint32_t received_ = 0, told_ = 0;
  uint64_t untold_bytes_ = 0;
  // What is being written.
  Head head_;
  size_t head_left_ = 0, body_left_ = 0;
  Piece piece_;
  std::deque<Piece> flight_;  // written and not acknowledged, in the order of writing
  uint32_t acknowledged_ = 0;
  uint64_t flight_bytes_ = 0, sent_ = 0, heard_ = 0;
};

// What one peer and this rank have to do with each other.
struct Peer {
  bool checked = false;
  bool has_left = false;  // it has bidden farewell
  uint64_t told_delivered = 0;
  uint64_t damaged_bytes = 0;
  Incoming incoming;
  Outgoing outgoing;
  Connection *connections = nullptr;
  int count = 0;

  bool is_reachable() const;
};

}  // namespace fl::sockets
