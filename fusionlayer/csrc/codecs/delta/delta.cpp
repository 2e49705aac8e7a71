// FL_DELTA for one instruction set of the CPU: the order of the steps, digests, threads. Messages are encoded side by side,
// blocks decoded so. Compiled once for each.

#include <atomic>
#include <cstring>

#include "cpu/codec_list.h"
#include "cpu/thread_pool.h"
#include "delta_decode.h"

namespace fl::FL_ISA {
namespace {

constexpr int kDeltaSlack = 128;  // bytes behind a block that its decoder may read
constexpr int kBlockBytes = kDeltaBlock * 4;
constexpr int kListBytes = kDeltaBlock;  // more than a list and what else is written before the bytes are counted
alignas(64) const uint8_t kZeros[kBlockBytes] = {};

// The elements of a message, or of its base: zeros where there is none.
class Elements {
 public:
  Elements(const void *x, const DeltaShape &shape, int64_t message)
      : at_(x ? static_cast<const uint8_t *>(x) + message * shape.raw_bytes() : nullptr), shape_(shape) {}

  const uint8_t *block(int64_t block) const { return at_ ? at_ + block * kDeltaBlock * shape_.element_bytes : kZeros; }
  int bytes(int64_t block) const { return shape_.block_bytes(block); }
  uint32_t digest(int64_t block) const { return delta_mixed(fl_crc32c(0, this->block(block), bytes(block)), block); }

 private:
  const uint8_t *at_;
  DeltaShape shape_;
};

template <class T>
const T *as(const void *p) {
  return static_cast<const T *>(p);
}

// A block's bytes: 0 where nothing changed, kDeltaWhole where the elements are no longer than it would be.
int encode_block(int element_bytes, const void *x, const void *base, int n, uint8_t *out) {
  return element_bytes == 4 ? encode_delta(as<uint32_t>(x), as<uint32_t>(base), n, out)
                            : encode_delta(as<uint16_t>(x), as<uint16_t>(base), n, out);
}

// False where the bytes are not coherent; `out` may be `base`.
bool decode_block(int element_bytes, const uint8_t *in, int bytes, const void *base, void *out, int n) {
  return element_bytes == 4 ? decode_delta(in, bytes, as<uint32_t>(base), static_cast<uint32_t *>(out), n)
                            : decode_delta(in, bytes, as<uint16_t>(base), static_cast<uint16_t *>(out), n);
}

struct Message {
  uint8_t *head, *data;

  Message(const fl_messages &messages, int64_t m)
      : head(static_cast<uint8_t *>(messages.plane[0]) + m * messages.stride),
        data(static_cast<uint8_t *>(messages.plane[1]) + m * messages.stride) {}

  uint32_t entry(int64_t block) const { return uint32_t(data[2 * block] | data[2 * block + 1] << 8); }
};

void encode_message(const DeltaShape &shape, const Elements &x, const Elements &base, const Message &out) {
  uint8_t coded[kBlockBytes + kListBytes + kDeltaSlack];
  DeltaHead head{kDeltaCoded, 0, 0, 0};
  for (int64_t block = 0; block < shape.blocks(); ++block) {
    const int n = shape.in_block(block);
    head.base += base.digest(block);
    head.result += x.digest(block);
    if (head.form == kDeltaRaw) continue;
    const int found = encode_block(shape.element_bytes, x.block(block), base.block(block), n, coded);
    const uint8_t *from = found == int(kDeltaWhole) ? x.block(block) : coded;
    const int bytes = shape.told_bytes(block, uint32_t(found));
    if (head.rest + int64_t(bytes) >= shape.too_many()) {
      head.form = kDeltaRaw;
      continue;
    }
    std::memcpy(out.data + shape.index_bytes() + head.rest, from, size_t(bytes));
    out.data[2 * block] = uint8_t(found);
    out.data[2 * block + 1] = uint8_t(found >> 8);
    head.rest += uint32_t(bytes);
  }
  if (head.form == kDeltaRaw) {
    head.rest = 0;
    for (int64_t block = 0; block < shape.blocks(); ++block)
      std::memcpy(out.data + block * kDeltaBlock * shape.element_bytes, x.block(block), size_t(x.bytes(block)));
  }
  std::memcpy(out.head, &head, sizeof head);
}

// Decodes the blocks of one message, in any order.
class Decoder {
 public:
  Decoder(const DeltaShape &shape, const Message &in, const Elements &base, const void *out, int64_t message)
      : shape_(shape), in_(in), base_(base), out_(out, shape, message) {
    std::memcpy(&head_, in.head, sizeof head_);
  }

  const DeltaHead &head() const { return head_; }

  // Whether the blocks end where the message does, and may be read.
  bool fits() const {
    if (head_.form == kDeltaRaw) return head_.rest == 0;
    return head_.form == kDeltaCoded && head_.rest < shape_.too_many() && begin_of(shape_.blocks()) == head_.rest;
  }

  // Where a block begins, behind the index.
  int64_t begin_of(int64_t block) const {
    int64_t begin = 0;
    for (int64_t b = 0; b < block; ++b) begin += bytes_of(b);
    return begin;
  }
  int64_t bytes_of(int64_t block) const { return shape_.told_bytes(block, in_.entry(block)); }

  // Writes a block that begins there, and adds to the digest what it became; false where it is not coherent.
  bool run(int64_t block, int64_t begin, uint32_t &digest) const {
    uint8_t *out = const_cast<uint8_t *>(out_.block(block));
    const uint8_t *base = base_.block(block), *from = in_.data + shape_.index_bytes() + begin;
    const size_t bytes = size_t(base_.bytes(block));
    if (head_.form == kDeltaRaw) {
      std::memcpy(out, in_.data + block * kDeltaBlock * shape_.element_bytes, bytes);
    } else if (in_.entry(block) == kDeltaWhole) {
      std::memcpy(out, from, bytes);
    } else if (in_.entry(block) == 0) {
      if (out != base) std::memcpy(out, base, bytes);
    } else {
      uint8_t coded[kDeltaWhole + kDeltaSlack];
      const int length = int(in_.entry(block));
      std::memcpy(coded, from, size_t(length));
      std::memset(coded + length, 0, kDeltaSlack);
      if (!decode_block(shape_.element_bytes, coded, length, base, out, shape_.in_block(block))) return false;
    }
    digest += out_.digest(block);
    return true;
  }

 private:
  const DeltaShape &shape_;
  const Message in_;
  const Elements &base_;
  const Elements out_;
  DeltaHead head_;
};

// Where the elements take the base's place, all of the base is looked at before any of it changes; else each block is
// looked at when it is used, so that memory is read once.
int decode_message(const DeltaShape &shape, const Decoder &decoder, const Elements &base, bool in_place) {
  if (!decoder.fits()) return FL_BAD_MESSAGE;
  std::atomic<uint32_t> before{0}, after{0};
  std::atomic<bool> coherent{true};
  const auto look = [&](int64_t begin, int64_t end) {
    uint32_t mine = 0;
    for (; begin < end; ++begin) mine += base.digest(begin);
    before += mine;
  };
  if (in_place) {
    parallel_for(shape.blocks(), 2, RangeTask(look));
    if (before != decoder.head().base) return FL_OTHER_BASE;
  }
  const auto task = [&](int64_t block, int64_t end) {
    uint32_t of_base = 0, mine = 0;
    for (int64_t begin = decoder.begin_of(block); block < end; begin += decoder.bytes_of(block), ++block) {
      if (!in_place) of_base += base.digest(block);
      if (!decoder.run(block, begin, mine)) coherent = false;
    }
    before += of_base;
    after += mine;
  };
  parallel_for(shape.blocks(), 2, RangeTask(task));
  if (before != decoder.head().base) return FL_OTHER_BASE;
  return coherent && after == decoder.head().result ? FL_OK : FL_BAD_MESSAGE;
}

int encode(Job &job) {
  if (job.spec->numel == 0) return FL_OK;
  const DeltaShape shape = delta_shape(*job.spec);
  const auto task = [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      encode_message(shape, {job.x, shape, begin}, {job.y, shape, begin}, Message(*job.out, begin));
  };
  if (job.out->count > 0) parallel_for(job.out->count, 1, RangeTask(task));
  return FL_OK;
}

int decode(Job &job) {
  if (job.spec->numel == 0) return FL_OK;
  const DeltaShape shape = delta_shape(*job.spec);
  for (int64_t m = 0; m < job.in->count; ++m) {
    const Elements before(job.x, shape, m);
    const Decoder decoder(shape, Message(*job.in, m), before, job.y, m);
    if (const int bad = decode_message(shape, decoder, before, job.y == job.x)) return bad;
  }
  return FL_OK;
}

}  // namespace

const CodecVerbs delta_verbs = {nullptr, nullptr, nullptr, nullptr, {encode, decode}};

}  // namespace fl::FL_ISA
