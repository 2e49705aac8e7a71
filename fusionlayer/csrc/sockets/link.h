#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "clock.h"
#include "connection.h"

namespace fl::sockets {

// Between two looks, within a call, at connections that may be stalled.
constexpr int64_t kLook = 100 * kMillisecond;

// One rank's connections to all others. See fusionlayer_sockets.h.
class Link {
 public:
  Link(int rank, int size, int connections, const uint8_t *checked, uint64_t window);
  ~Link();

  bool is_open() const { return epoll_ >= 0 && wake_ >= 0; }
  void add(int peer, int index, int fd, const uint8_t *keys, bool encrypted);
  int exchange(const fl_link_message *outgoing, int sends, const fl_link_message *incoming, int receives,
               int64_t deadline, fl_link_result *result);
  int wait(int64_t deadline, fl_link_result *result);
  int64_t tend();
  void states(uint8_t *out);
  void sent(int64_t *out);
  void close(bool at_once);
  void forget();

 private:
  Connection &connection(int peer, int index) { return connections_[size_t(peer) * count_ + size_t(index)]; }
  int wait_locked(std::unique_lock<std::mutex> &lock, int64_t deadline, fl_link_result *result);
  void await(std::unique_lock<std::mutex> &lock, int64_t until, bool *interrupted);
  void poll(int milliseconds, std::unique_lock<std::mutex> *lock, bool *interrupted);
  void progress();
  bool send(int peer);
  Connection *free_connection(Peer &peer);
  Connection *earliest(Peer &peer);
  void write(int peer, Connection &connection);
  void lose(int peer, Connection &connection);
  void fail(int status, int peer);
  void look(int64_t now);
  void tell(int peer, bool all);
  void judge(int peer);
  bool is_done() const;
  bool is_bulk() const;
  int missing() const;
  void end_call();
  void shut();

  const int rank_, size_, count_;
  int epoll_, wake_;
  // Guards all below. It is not held while a thread waits for the network.
  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::unique_ptr<Connection[]> connections_;
  bool is_calling_ = false, is_waiting_ = false, is_ending_ = false, is_shut_ = false;
  int status_ = FL_LINK_DONE;  // why the link has failed
  int culprit_ = -1;
  int64_t next_look_ = 0;
  uint64_t moved_ = 0;  // bytes in the last round
  int trickles_ = 0;    // rounds in a row in which few were
};

}  // namespace fl::sockets
