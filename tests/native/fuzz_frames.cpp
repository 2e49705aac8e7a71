// Feeds connections of csrc/sockets what no peer sends; sanitizers watch. With -fsanitize=fuzzer the library brings
// main and the inputs; otherwise main makes inputs: fuzz_frames [runs] [seed].
//
// An input steers what is sent: frames whose numbers mostly fit each other, with right checksums or tags but for some,
// bytes of the input, in parts of any length, by one connection or two; and what happens in between: messages are wanted
// or sent, and connections are lost and made again.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "connection.h"
#include "crc32c.h"

// That of the library chooses kernels, none of which are here.
extern "C" uint32_t fl_crc32c(uint32_t crc, const void *data, int64_t n) {
  return fl::crc32c(crc, static_cast<const uint8_t *>(data), size_t(n), false);
}

namespace {

using namespace fl::sockets;

class Input {
 public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size) {}

  bool is_over() const { return at_ >= size_; }
  uint8_t byte() { return is_over() ? 0 : data_[at_++]; }
  uint64_t below(uint64_t bound) { return (byte() | byte() << 8) % bound; }
  uint64_t word() {
    uint64_t out = 0;
    for (int i = 0; i < 8; ++i) out = out << 8 | byte();
    return out;
  }

 private:
  const uint8_t *data_;
  size_t size_, at_ = 0;
};

class Run {
 public:
  Run(const uint8_t *data, size_t size) : in_(data, size) {
    const uint8_t how = in_.byte();
    keyed_ = how & 1;
    peer_.checked = how >> 1 & 1;
    peer_.connections = connections_;
    peer_.count = 1 + (how >> 2 & 1);
    peer_.incoming.open(kWindow);
    peer_.outgoing.open(peer_.count, kWindow);
    for (size_t i = 0; i < sizeof keys_; ++i) keys_[i] = uint8_t(i * 7);
    for (int index = 0; index < peer_.count; ++index) connect(index);
  }

  ~Run() {
    for (const End &end : ends_)
      if (end.far >= 0) ::close(end.far);
  }

  void steps() {
    while (!in_.is_over() && !is_broken_) {
      const int index = int(in_.below(uint64_t(peer_.count)));
      switch (in_.byte() % 12) {
        case 0:
          want();
          break;
        case 1:
          sent_.emplace_back(5000);
          peer_.outgoing.post(sent_.back().data(), 1 + in_.below(5000), in_.below(3));
          break;
        case 2:
          connect(index);
          break;
        case 3:
          for (uint64_t left = in_.below(200); left && !keyed_; --left) ends_[index].unsent.push_back(in_.byte());
          break;
        case 4:
          ::shutdown(ends_[index].far, SHUT_WR);
          break;
        case 5:
          flush(index, size_t(in_.below(300)));
          break;
        default:
          put_frame(index);
          if (in_.byte() % 4) flush(index, SIZE_MAX);
      }
    }
    for (int index = 0; index < peer_.count; ++index) flush(index, SIZE_MAX);
  }

 private:
  struct End {
    int far = -1;
    Mac mac;
    std::vector<uint8_t> unsent;
  };

  void connect(int index) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
    End &end = ends_[index];
    if (end.far >= 0) ::close(end.far);
    end.far = pair[1];
    end.unsent.clear();
    end.mac.open(keyed_ ? keys_ + kKeyBytes : nullptr);
    lose(index);
    connections_[index].open(pair[0], peer_.count, keyed_ ? keys_ : nullptr, Connection::Tunnel::none);
  }

  void lose(int index) {
    connections_[index].abandon(peer_.outgoing);
    connections_[index].drop();
    connections_[index].close();
  }

  // Few lengths and keys, so that some of what comes is wanted. Exactly as much memory as that.
  void want() {
    const uint64_t length = 1 + in_.below(3) * 5000;
    wanted_.emplace_back(new uint8_t[length], length);
    peer_.incoming.want(wanted_.back().first.get(), length, in_.below(3));
  }

  void put_frame(int index) {
    End &end = ends_[index];
    Head head;
    Frame &frame = head.frame;
    const uint8_t kind = in_.byte();
    frame.kind = kind < 200 ? Kind::chunk : kind < 240 ? Kind::note : kind < 245 ? Kind::farewell : Kind(kind);
    if (frame.kind == Kind::chunk) {
      frame.serial = 1 + in_.below(6);
      frame.key = in_.below(3);
      frame.length = 1 + in_.below(3) * 5000;
      frame.chunk = kLeastChunk * uint32_t(1 + in_.below(2));
      frame.index = uint32_t(in_.below((frame.length + frame.chunk - 1) / frame.chunk));
      frame.back = in_.byte() % 4 ? 0 : uint32_t(in_.below(frame.serial));
      frame.nbytes = uint32_t(std::min<uint64_t>(frame.chunk, frame.length - frame.offset()));
      frame.checked = peer_.checked && !keyed_;
    }
    frame.delivered = in_.byte() % 4 ? 0 : in_.below(20000);
    frame.received = in_.byte() % 4 ? 0 : uint32_t(in_.below(4));
    std::vector<uint8_t> payload(frame.nbytes, kFill);
    frame.checksum = fl_crc32c(0, payload.data(), int64_t(payload.size()));
    if (in_.byte() % 8 == 0) {  // a number that may not fit, in a frame that is else in order
      const uint64_t word = in_.word();
      const size_t at = size_t(in_.below(sizeof frame - 8));
      std::memcpy(reinterpret_cast<uint8_t *>(&frame) + at, &word, size_t(1 + in_.below(8)));
    }
    frame.own = frame.digest();
    end.mac.next_frame();
    if (keyed_) {
      end.mac.write(Mac::Part::payload, payload.data(), payload.size(), head.payload_tag);
      end.mac.write(Mac::Part::head, &head, offsetof(Head, tag), head.tag);
    }
    const auto *bytes = reinterpret_cast<const uint8_t *>(&head);
    const size_t start = end.unsent.size();
    end.unsent.insert(end.unsent.end(), bytes, bytes + (keyed_ ? sizeof(Head) : sizeof(Frame)));
    end.unsent.insert(end.unsent.end(), payload.begin(), payload.end());
    if (in_.byte() % 16 == 0) end.unsent[start + size_t(in_.below(end.unsent.size() - start))] ^= in_.byte();
  }

  // Sends a part of what is to be sent, and lets the other end read and answer.
  void flush(int index, size_t most) {
    End &end = ends_[index];
    while (!is_broken_) {
      const size_t part = std::min(most, end.unsent.size());
      const ssize_t sent = send(end.far, end.unsent.data(), part, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) end.unsent.erase(end.unsent.begin(), end.unsent.begin() + sent);
      if (!connections_[index].is_open()) return;
      connections_[index].readable = connections_[index].writable = true;
      const Step step = connections_[index].read(peer_);
      if (step == Step::lost) return lose(index);
      is_broken_ = step == Step::damaged || step == Step::nonsense;
      check();
      if (!is_broken_) answer(index);
      if (sent <= 0 || most != SIZE_MAX || end.unsent.empty()) return;
    }
  }

  void answer(int index) {
    Connection &by = connections_[index];
    if (!by.is_writing()) {
      Piece piece = peer_.outgoing.pull();
      if (piece.message)
        by.begin(peer_, std::move(piece));
      else if (by.untold())
        by.begin(peer_, Kind::note);
    }
    if (by.is_writing()) by.write(peer_);
    uint8_t answer[4096];
    while (recv(ends_[index].far, answer, sizeof answer, MSG_DONTWAIT) > 0) continue;
  }

  // With tags no byte reaches a caller that the peer has not sent.
  void check() const {
    if (!keyed_ || is_broken_ || peer_.incoming.unmet()) return;
    for (const auto &[data, length] : wanted_)
      for (uint64_t i = 0; i < length; ++i)
        if (data[i] != kFill) std::abort();
  }

  static constexpr uint64_t kWindow = 64 << 10;
  static constexpr uint8_t kFill = 0x5a;

  Input in_;
  bool keyed_, is_broken_ = false;
  uint8_t keys_[2 * kKeyBytes];
  std::vector<std::pair<std::unique_ptr<uint8_t[]>, uint64_t>> wanted_;
  std::deque<std::vector<uint8_t>> sent_;
  Connection connections_[2];
  Peer peer_;
  End ends_[2];
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Run(data, size).steps();
  return 0;
}

#ifndef FL_LIBFUZZER
int main(int argc, char **argv) {
  const long runs = argc > 1 ? std::atol(argv[1]) : 4000;
  uint64_t state = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  std::vector<uint8_t> input;
  for (long run = 0; run < runs; ++run) {
    const auto next = [&state] {  // splitmix64
      uint64_t z = state += 0x9e3779b97f4a7c15;
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
      z = (z ^ z >> 27) * 0x94d049bb133111eb;
      return z ^ z >> 31;
    };
    input.resize(20 + next() % 400);
    for (uint8_t &byte : input) byte = uint8_t(next() >> 8);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%ld inputs\n", runs);
}
#endif
