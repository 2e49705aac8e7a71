#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "frame.h"
#include "outgoing.h"

namespace fl::sockets {

// A message that this rank wants.
struct Wanted {
  uint8_t *data;
  uint64_t length, key;
  bool is_matched = false;
};

// A message of which something has come.
struct InMessage {
  uint64_t key, length, after;  // after: an earlier message that must be known before this one is matched; 0: none
  uint32_t chunk, chunks, missing;
  uint8_t *into = nullptr;           // where it is wanted; null until it is
  std::vector<uint8_t> have;         // the chunks that have come, once it is wanted
  std::map<uint32_t, Bytes> stored;  // those that came before
};

// What has come from one peer, and what is wanted of it.
class Incoming {
 public:
  void open(uint64_t window) { window_ = window; }

  // Where the payload of a chunk goes.
  enum class Place { wanted, stored, nowhere, nonsense };

  void want(void *data, uint64_t length, uint64_t key);
  // For `wanted`, `target` is where the payload has to be written.
  Place place(const Frame &frame, uint8_t **target);
  // The payload is there: in its place, or in `own`, which is then used up.
  void arrive(const Frame &frame, Bytes own);
  // Whether the message is complete, so that its memory is the caller's again.
  bool is_done(uint64_t serial) const { return serial < first_ || done_.count(serial) > 0; }

  uint64_t unmet() const { return unmet_; }  // messages that are wanted and not complete
  uint64_t unmet_bytes() const { return unmet_bytes_; }
  uint64_t delivered() const { return delivered_; }  // payload bytes that have come to where they are wanted
  // Forget what is wanted.
  void drop();

 private:
  bool is_known(uint64_t serial) const { return is_done(serial) || open_.count(serial) > 0; }
  void match();
  void put(InMessage &message, uint32_t index, uint64_t nbytes);
  void finish(uint64_t serial);

  uint64_t window_ = 0, held_ = 0, delivered_ = 0, unmet_ = 0, unmet_bytes_ = 0;
  uint64_t first_ = 1;       // all messages before it are done
  std::set<uint64_t> done_;  // and these ones
  std::map<uint64_t, InMessage> open_;
  std::vector<Wanted> wanted_;  // in the order in which they are matched
};

}  // namespace fl::sockets
