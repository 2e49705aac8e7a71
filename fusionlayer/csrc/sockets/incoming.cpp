#include "incoming.h"

#include <algorithm>
#include <cstring>

namespace fl::sockets {

void Incoming::want(void *data, uint64_t length, uint64_t key) {
  wanted_.push_back({static_cast<uint8_t *>(data), length, key});
  ++unmet_;
  unmet_bytes_ += length;
  match();
}

Incoming::Place Incoming::place(const Frame &frame, uint8_t **target) {
  if (is_done(frame.serial)) return Place::nowhere;
  auto found = open_.find(frame.serial);
  if (found == open_.end()) {
    InMessage message{};
    message.key = frame.key;
    message.length = frame.length;
    message.after = frame.back ? frame.serial - frame.back : 0;
    message.chunk = frame.chunk;
    message.chunks = message.missing = uint32_t((frame.length + frame.chunk - 1) / frame.chunk);
    open_.emplace(frame.serial, std::move(message));
    match();
    found = open_.find(frame.serial);
  }
  const InMessage &message = found->second;
  if (message.key != frame.key || message.length != frame.length || message.chunk != frame.chunk)
    return Place::nonsense;
  if (message.into) {
    if (message.have[frame.index]) return Place::nowhere;
    *target = message.into + frame.offset();
    return Place::wanted;
  }
  if (message.stored.count(frame.index)) return Place::nowhere;
  // The sender keeps to the window. A chunk may go beyond it alone, and a lost one may have been kept twice.
  return held_ + frame.nbytes > window_ + kMostChunk ? Place::nonsense : Place::stored;
}

void Incoming::arrive(const Frame &frame, Bytes own) {
  const auto found = open_.find(frame.serial);
  if (found == open_.end()) return;
  InMessage &message = found->second;
  if (!message.into) {
    if (!own || message.stored.count(frame.index)) return;
    held_ += frame.nbytes;
    message.stored.emplace(frame.index, std::move(own));
    return;
  }
  if (message.have[frame.index]) return;
  if (own) std::memcpy(message.into + frame.offset(), own.get(), frame.nbytes);
  put(message, frame.index, frame.nbytes);
  if (message.missing == 0) finish(frame.serial);
}

void Incoming::put(InMessage &message, uint32_t index, uint64_t nbytes) {
  message.have[index] = 1;
  --message.missing;
  delivered_ += nbytes;
  unmet_bytes_ -= nbytes;
}

void Incoming::match() {
  for (Wanted &wanted : wanted_) {
    if (wanted.is_matched) continue;
    for (auto &[serial, message] : open_) {
      if (message.into || message.key != wanted.key || message.length != wanted.length) continue;
      if (message.after && !is_known(message.after)) break;  // an earlier one is to come
      wanted.is_matched = true;
      message.into = wanted.data;
      message.have.assign(message.chunks, 0);
      for (const auto &[index, bytes] : message.stored) {
        const uint64_t offset = uint64_t(index) * message.chunk;
        const uint64_t nbytes = std::min<uint64_t>(message.chunk, message.length - offset);
        std::memcpy(message.into + offset, bytes.get(), nbytes);
        held_ -= nbytes;
        put(message, index, nbytes);
      }
      message.stored.clear();
      if (message.missing == 0) finish(serial);
      break;
    }
  }
  wanted_.erase(std::remove_if(wanted_.begin(), wanted_.end(), [](const Wanted &each) { return each.is_matched; }),
                wanted_.end());
}

void Incoming::finish(uint64_t serial) {
  open_.erase(serial);
  --unmet_;
  done_.insert(serial);
  while (!done_.empty() && *done_.begin() == first_) {
    done_.erase(done_.begin());
    ++first_;
  }
}

void Incoming::drop() {
  wanted_.clear();
  unmet_ = unmet_bytes_ = 0;
}

}  // namespace fl::sockets
