#include "outgoing.h"

#include <algorithm>
#include <cstring>

#include "frame.h"

namespace fl::sockets {
namespace {

// A chunk is long enough to be worth its system calls, and short enough that each connection gets several of a message:
// the last ones end together then. The short one fits into the ten segments that TCP sends after a pause before it waits
// for the peer: one of 16 KB would take a round trip more.
constexpr uint64_t kLongChunk = 128 << 10;
constexpr uint64_t kShortChunk = 12 << 10;
constexpr uint64_t kChunksEach = 16;

uint32_t chunk_for(uint64_t length, uint32_t connections) {
  const uint64_t chunk = std::clamp(length / (kChunksEach * connections), kShortChunk, kLongChunk);
  return uint32_t((chunk + kLeastChunk - 1) / kLeastChunk * kLeastChunk);
}

}  // namespace

void OutMessage::copy(uint32_t index) {
  if (copies.empty()) copies.resize(chunks);
  if (copies[index] || !data) return;
  copies[index] = Bytes(new uint8_t[nbytes(index)]);
  std::memcpy(copies[index].get(), data + offset(index), nbytes(index));
}

void Outgoing::post(const void *data, uint64_t length, uint64_t key) {
  auto message = std::make_shared<OutMessage>();
  message->serial = ++serial_;
  message->key = key;
  message->length = length;
  message->chunk = connections_ == 1 ? uint32_t(kLongChunk) : chunk_for(length, connections_);
  message->chunks = uint32_t((length + message->chunk - 1) / message->chunk);
  message->back = 0;
  for (auto earlier = open_.rbegin(); earlier != open_.rend(); ++earlier)
    if ((*earlier)->key == key && (*earlier)->length == length) {
      message->back = uint32_t(std::min<uint64_t>(serial_ - (*earlier)->serial, UINT32_MAX));
      break;
    }
  message->data = static_cast<const uint8_t *>(data);
  message->states.resize(message->chunks);
  unwritten_ += message->chunks;
  untaken_ += length;
  open_.push_back(message);
  waiting_.push_back(std::move(message));
}

Piece Outgoing::pull() {
  while (!again_.empty()) {
    Piece piece = std::move(again_.front());
    again_.pop_front();
    if (!(piece.message->states[piece.index] & OutMessage::kAcknowledged)) return piece;
  }
  if (waiting_.empty()) return {};
  const std::shared_ptr<OutMessage> message = waiting_.front();
  const uint32_t index = message->next, nbytes = message->nbytes(index);
  if (sent_ > delivered_ && sent_ + nbytes > delivered_ + window_) return {};
  sent_ += nbytes;
  untaken_ -= nbytes;
  if (++message->next == message->chunks) waiting_.pop_front();
  return {message, index};
}

void Outgoing::note_written(const Piece &piece) {
  uint8_t &state = piece.message->states[piece.index];
  if (state & OutMessage::kWritten) return;
  state |= OutMessage::kWritten;
  ++piece.message->written;
  --unwritten_;
}

void Outgoing::note_acknowledged(const Piece &piece) {
  OutMessage &message = *piece.message;
  uint8_t &state = message.states[piece.index];
  if (state & OutMessage::kAcknowledged) return;
  state |= OutMessage::kAcknowledged;
  if (++message.acknowledged < message.chunks) return;
  open_.erase(std::find(open_.begin(), open_.end(), piece.message));
}

void Outgoing::repeat(const Piece &piece) {
  if (piece.message->states[piece.index] & OutMessage::kAcknowledged || !piece.message->at(piece.index)) return;
  again_.push_back(piece);
}

void Outgoing::settle() {
  for (const auto &message : open_) {
    if (!message->data) continue;
    for (uint32_t index = 0; connections_ > 1 && index < message->chunks; ++index)
      if (!(message->states[index] & OutMessage::kAcknowledged)) message->copy(index);
    message->data = nullptr;
  }
}

}  // namespace fl::sockets
