#include "connection.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace fl::sockets {
namespace {

// Bytes that the kernel takes before those before them have left, in all connections to a peer, and in one of them. A
// connection that could hold more would take chunks that a faster one could have sent earlier.
constexpr int kUnsent = 256 << 10;
constexpr int kLeastUnsent = 16 << 10;
constexpr int kMostUnsent = 128 << 10;
// Bytes to read from one connection before the others have their turn.
constexpr size_t kTurn = 512 << 10;
constexpr uint8_t kFruitless = 2;

uint8_t nowhere[64 << 10];  // what nobody wants is written here, by any thread, and never read

void set(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

}  // namespace

void Connection::open(int fd, int connections, const uint8_t *keys, Tunnel tls) {
  close();
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, std::clamp(kUnsent / connections, kLeastUnsent, kMostUnsent));
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 6);
  fd_ = fd;
  readable = writable = true;
  stalled = bid_farewell = repeated = false;
  begin_ = end_ = head_left_ = body_left_ = 0;
  left_ = received_ = told_ = acknowledged_ = 0;
  flight_bytes_ = untold_bytes_ = 0;
  own_.reset();
  was_up_ = false;
  if (tls != Tunnel::none) {
    const bool is_caller = tls == Tunnel::as_caller;
    tls_ = std::make_unique<Tls>(fd, is_caller, is_caller ? keys : keys + kKeyBytes);
    keys = nullptr;
  }
  sending_.open(keys);
  arriving_.open(keys ? keys + kKeyBytes : nullptr);
}

void Connection::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  tls_.reset();
  readable = writable = false;
}

void Connection::forget() {
  (void)tls_.release();  // its memory may be in any state
  close();
}

Step Connection::read(Peer &peer) {
  size_t turn = 0;
  while (turn < kTurn) {
    iovec parts[2];
    int count = 0;
    size_t room = 0;
    if (left_) {
      parts[count++] = target_ ? iovec{target_, left_} : iovec{nowhere, std::min<size_t>(left_, sizeof nowhere)};
      room += parts[0].iov_len;
    }
    if (!left_ || room == left_) {  // what follows comes along: the next frame, and the start of its payload
      parts[count++] = {staging_ + end_, left_ ? std::min<size_t>(kStaging - end_, 4096) : kStaging - end_};
      room += parts[count - 1].iov_len;
    }
    const ssize_t got = tls_ ? tls_->read(parts, count) : readv(fd_, parts, count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EBADMSG) {
      peer.damaged_bytes = head_bytes();
      return Step::damaged;
    }
    if (tls_ && !was_up_ && tls_->is_up()) was_up_ = writable = true;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      readable = false;
      break;
    }
    if (got <= 0) return Step::lost;
    turn += size_t(got);
    heard_ += uint64_t(got);
    size_t rest = size_t(got);
    if (left_) {
      const size_t part = std::min<size_t>(rest, left_);
      if (target_) target_ += part;
      left_ -= uint32_t(part);
      rest -= part;
      if (left_ == 0)
        if (const Step step = end_payload(peer); step != Step::some) return step;
    }
    end_ += rest;
    if (const Step step = take(peer); step != Step::some) return step;
  }
  return turn ? Step::some : Step::none;
}

// Takes whole frames from what was read, and the parts of payloads that came with them.
Step Connection::take(Peer &peer) {
  while (true) {
    if (left_ == 0) {
      if (end_ - begin_ < head_bytes()) break;
      if (const Step step = take_head(peer); step != Step::some) return step;
      if (frame_.kind != Kind::chunk) continue;
      if (const Step step = start_payload(peer); step != Step::some) return step;
    }
    const size_t part = std::min<size_t>(end_ - begin_, left_);
    if (part == 0) break;
    if (target_) {
      std::memcpy(target_, staging_ + begin_, part);
      target_ += part;
    }
    begin_ += part;
    left_ -= uint32_t(part);
    if (left_ == 0)
      if (const Step step = end_payload(peer); step != Step::some) return step;
  }
  std::memmove(staging_, staging_ + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  return Step::some;
}

// Takes a frame up to its payload. Nothing in it is believed before its tag is right.
Step Connection::take_head(Peer &peer) {
  std::memcpy(&arrived_, staging_ + begin_, head_bytes());
  begin_ += head_bytes();
  arriving_.next_frame();
  const bool is_intact = arriving_.is_on()
                             ? arriving_.is_right(Mac::Part::head, &arrived_, offsetof(Head, tag), arrived_.tag)
                             : frame_.own == frame_.digest();
  if (!is_intact) {
    peer.damaged_bytes = head_bytes();
    return Step::damaged;
  }
  if (!frame_.makes_sense()) return Step::nonsense;
  if (frame_.kind == Kind::chunk && needs_checksum(peer) != (frame_.checked == 1)) return Step::nonsense;
  if (frame_.received - acknowledged_ > flight_.size()) return Step::nonsense;
  for (; acknowledged_ != frame_.received; ++acknowledged_) {
    flight_bytes_ -= flight_.front().message->nbytes(flight_.front().index);
    peer.outgoing.note_acknowledged(flight_.front());
    flight_.pop_front();
  }
  peer.outgoing.note_delivered(frame_.delivered);
  if (frame_.kind == Kind::farewell) peer.has_left = true;
  return Step::some;
}

Step Connection::start_payload(Peer &peer) {
  left_ = frame_.nbytes;
  target_ = nullptr;
  const Incoming::Place place = peer.incoming.place(frame_, &target_);
  is_kept_ = place == Incoming::Place::wanted || place == Incoming::Place::stored;
  if (place == Incoming::Place::nonsense) return Step::nonsense;
  // The sender may have taken this chunk from another connection, where it is stuck half way. Both go on, in memory of
  // their own, because each may be the one that arrives, and what arrives is acknowledged.
  bool is_shared = false;
  for (int index = 0; index < peer.count; ++index)
    is_shared = is_shared || (&peer.connections[index] != this && peer.connections[index].is_at(frame_));
  if (place == Incoming::Place::stored || (is_kept_ && is_shared)) {
    own_ = Bytes(new uint8_t[left_]);
    target_ = own_.get();
  }
  return Step::some;
}

Step Connection::end_payload(Peer &peer) {
  ++received_;
  untold_bytes_ += frame_.nbytes;
  if (!is_kept_) return Step::some;
  is_kept_ = false;
  const uint8_t *payload = own_ ? own_.get() : target_ - frame_.nbytes;
  const bool is_intact = arriving_.is_on()
                             ? arriving_.is_right(Mac::Part::payload, payload, frame_.nbytes, arrived_.payload_tag)
                             : !frame_.checked || fl_crc32c(0, payload, frame_.nbytes) == frame_.checksum;
  if (!is_intact) {
    peer.damaged_bytes = frame_.length;
    return Step::damaged;
  }
  // From here on nobody else writes to where it belongs: the caller may get that memory back at any time.
  for (int index = 0; index < peer.count; ++index)
    if (peer.connections[index].is_at(frame_)) peer.connections[index].turn_away();
  peer.incoming.arrive(frame_, std::move(own_));
  return Step::some;
}

bool Connection::needs_checksum(const Peer &peer) const { return peer.checked && !sending_.is_on() && !tls_; }

bool Connection::is_at(const Frame &frame) const {
  return left_ && is_kept_ && frame_.serial == frame.serial && frame_.index == frame.index;
}

void Connection::turn_away() {
  is_kept_ = false;
  target_ = nullptr;
  own_.reset();
}

void Connection::begin(Peer &peer, Piece piece) {
  const OutMessage &message = *piece.message;
  Frame frame;
  frame.kind = Kind::chunk;
  frame.checked = needs_checksum(peer);
  frame.nbytes = message.nbytes(piece.index);
  frame.serial = message.serial;
  frame.key = message.key;
  frame.length = message.length;
  frame.index = piece.index;
  frame.chunk = message.chunk;
  frame.back = message.back;
  if (frame.checked) frame.checksum = fl_crc32c(0, message.at(piece.index), frame.nbytes);
  piece_ = std::move(piece);
  begin(peer, frame, piece_.message->at(piece_.index));
}

void Connection::begin(Peer &peer, Kind kind) {
  Frame frame;
  frame.kind = kind;
  bid_farewell = kind == Kind::farewell;
  begin(peer, frame, nullptr);
}

void Connection::begin(Peer &peer, const Frame &frame, const uint8_t *payload) {
  head_ = Head{frame};
  head_.frame.received = told_ = received_;
  head_.frame.delivered = peer.told_delivered = peer.incoming.delivered();
  head_.frame.own = head_.frame.digest();
  sending_.next_frame();
  if (sending_.is_on()) {
    if (payload) sending_.write(Mac::Part::payload, payload, frame.nbytes, head_.payload_tag);
    sending_.write(Mac::Part::head, &head_, offsetof(Head, tag), head_.tag);
  }
  untold_bytes_ = 0;
  head_left_ = head_bytes();
  body_left_ = payload ? frame.nbytes : 0;
}

Step Connection::write(Peer &peer) {
  while (is_writing()) {
    iovec parts[2];
    msghdr message{};
    message.msg_iov = parts;
    if (head_left_)
      parts[message.msg_iovlen++] = {reinterpret_cast<uint8_t *>(&head_) + head_bytes() - head_left_, head_left_};
    if (body_left_) {
      const uint8_t *payload = piece_.message->at(piece_.index) + head_.frame.nbytes - body_left_;
      parts[message.msg_iovlen++] = {const_cast<uint8_t *>(payload), body_left_};
    }
    const ssize_t given =
        tls_ ? tls_->write(parts, int(message.msg_iovlen)) : sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (given < 0 && errno == EINTR) continue;
    if (given < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      writable = false;
      return Step::none;
    }
    if (given < 0) return Step::lost;
    const size_t of_head = std::min<size_t>(size_t(given), head_left_);
    head_left_ -= of_head;
    body_left_ -= size_t(given) - of_head;
  }
  if (piece_.message) {
    sent_ += head_.frame.nbytes;
    flight_bytes_ += head_.frame.nbytes;
    peer.outgoing.note_written(piece_);
    flight_.push_back(std::move(piece_));
    piece_ = {};
  }
  return Step::some;
}

void Connection::abandon(Outgoing &outgoing) {
  for (const Piece &piece : flight_) outgoing.repeat(piece);
  if (piece_.message) outgoing.repeat(piece_);
}

void Connection::drop() {
  flight_.clear();
  piece_ = {};
  head_left_ = body_left_ = 0;
}

// The first packet of a route that is gone, as of an interface that is down, never counts as sent: the kernel probes.
bool Connection::is_in_trouble() const {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
         std::max(info.tcpi_retransmits, info.tcpi_probes) >= kFruitless;
}

Pace Connection::pace() const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return {double(info.tcpi_delivery_rate), double(info.tcpi_unacked) * info.tcpi_snd_mss + info.tcpi_notsent_bytes};
}

bool Peer::is_reachable() const {
  return std::any_of(connections, connections + count, [](const Connection &each) { return each.is_open(); });
}

}  // namespace fl::sockets
