// What a link does beside moving messages: it acknowledges, and looks after connections in trouble and silent peers.
#include <algorithm>

#include "link.h"

namespace fl::sockets {
namespace {

// A connection that is silent for so long, while something is expected of the peer, is sent a few bytes: the kernel
// notices by their acknowledgements whether the network still works.
constexpr int64_t kSilence = 1000 * kMillisecond;
// What has come is acknowledged from so many bytes or chunks on at once, else with the next chunk or look.
constexpr uint64_t kTellBytes = 128 << 10;
constexpr uint32_t kTellChunks = 16;

}  // namespace

// Acknowledges what has come: much of it, or `all`.
void Link::tell(int peer, bool all) {
  Peer &each = peers_[size_t(peer)];
  // What waited here, and is wanted now, no connection tells of by itself.
  bool owes = each.incoming.delivered() - each.told_delivered >= (all ? 1 : kTellBytes);
  for (int index = 0; index < count_; ++index) {
    Connection &by = connection(peer, index);
    if (!by.writable || by.is_writing()) continue;
    const bool due = by.untold() >= kTellChunks || by.untold_bytes() >= kTellBytes || (all && by.untold());
    if (!due && !(owes && !by.stalled)) continue;
    owes = false;
    by.begin(each, Kind::note);
    write(peer, by);
  }
}

// Looks after connections that are stalled, and peers that are silent.
void Link::look(int64_t time) {
  next_look_ = time + kLook;
  for (int peer = 0; peer < size_ && !status_; ++peer) {
    Peer &each = peers_[size_t(peer)];
    tell(peer, true);
    for (int index = 0; index < count_; ++index) {
      Connection &by = connection(peer, index);
      if (!by.is_open()) continue;
      if (by.heard() != by.heard_then) by.heard_then = by.heard(), by.heard_at = time;
      if (each.incoming.unmet() && time - by.heard_at >= kSilence && by.writable && !by.is_writing()) {
        by.heard_at = time;
        if (!by.has_flight()) by.begin(each, Kind::note);
        write(peer, by);
      }
      by.stalled = by.is_in_trouble();
      by.repeated = by.repeated && by.stalled;
    }
    const bool any_works = std::any_of(each.connections, each.connections + count_,
                                       [](const Connection &by) { return by.is_open() && !by.stalled; });
    for (int index = 0; index < count_ && any_works; ++index) {
      Connection &by = connection(peer, index);
      if (!by.is_open() || !by.stalled || by.repeated) continue;
      by.abandon(each.outgoing);
      by.repeated = true;
    }
  }
}

int64_t Link::tend() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_calling_ || is_shut_ || status_) return 0;
  bool interrupted;
  poll(0, nullptr, &interrupted);
  progress();
  if (!status_) look(now());
  if (status_) return 0;
  int64_t left = 0;
  bool all_told = true;
  for (int peer = 0; peer < size_; ++peer) {
    Peer &each = peers_[size_t(peer)];
    if (!each.is_reachable() || each.has_left) continue;
    left += int64_t(each.outgoing.unacknowledged());
    for (int index = 0; index < count_ && is_ending_; ++index) {
      Connection &by = connection(peer, index);
      if (each.outgoing.is_acknowledged() && by.writable && !by.is_writing() && !by.bid_farewell) {
        by.begin(each, Kind::farewell);
        write(peer, by);
      }
      all_told = all_told && (!by.is_open() || by.stalled || (by.bid_farewell && !by.is_writing()));
    }
  }
  if (is_ending_ && left == 0 && all_told) shut();
  return left + (is_ending_ && !is_shut_);
}

}  // namespace fl::sockets
