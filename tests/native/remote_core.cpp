// Runs verbs of the CPU library that this program is linked with, as standard input asks: for tests on processors that
// this machine emulates. All numbers are int64. A request is
//   verb (0 encode, 1 decode, 2 decode_sum, 3 recode)   fl_spec   option   number of buffers
// and for each buffer: how far past a multiple of 64 it begins, or -1 for a null pointer; its bytes; whether it holds
// messages, then where their planes begin, stride and count; its content. The answer is the status, then all contents.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "fusionlayer_codec.h"

namespace {

void read(void *to, size_t bytes) {
  if (bytes && std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);
}

int64_t number() {
  int64_t n;
  read(&n, sizeof n);
  return n;
}

struct Buffer {
  void *data = nullptr;
  std::vector<unsigned char> memory;
  int64_t bytes = 0;
  fl_messages messages{};

  void receive() {
    const int64_t shift = number();
    bytes = number();
    const bool planes = number();
    int64_t offsets[FL_MAX_PLANES] = {}, stride = 0, count = 0;
    if (planes) {
      for (int64_t &offset : offsets) offset = number();
      stride = number();
      count = number();
    }
    if (shift >= 0) {
      memory.resize(size_t(bytes + shift + 64));
      const size_t past = reinterpret_cast<uintptr_t>(memory.data()) % 64;
      data = memory.data() + (64 - past) % 64 + shift;
    }
    read(data, size_t(bytes));
    for (int i = 0; i < FL_MAX_PLANES; ++i) messages.plane[i] = static_cast<unsigned char *>(data) + offsets[i];
    messages.stride = stride;
    messages.count = count;
  }

  float *floats() const { return static_cast<float *>(data); }
};

int run(int64_t verb, const fl_spec &spec, int option, Buffer *b) {
  if (verb == 0) return fl_encode(&spec, b[0].data, b[1].floats(), &b[2].messages, nullptr);
  if (verb == 1) return fl_decode(&spec, &b[0].messages, b[1].data, nullptr);
  if (verb == 2) return fl_decode_sum(&spec, &b[0].messages, b[1].data, option, nullptr);
  return fl_recode(&spec, &b[0].messages, b[1].data, b[2].floats(), &b[3].messages, nullptr);
}

}  // namespace

int main() {
  for (;;) {
    const int64_t verb = number();
    fl_spec spec;
    read(&spec, sizeof spec);
    const int option = int(number());
    const int64_t count = number();
    std::vector<Buffer> buffers(static_cast<size_t>(count));
    for (Buffer &buffer : buffers) buffer.receive();
    const int64_t status = run(verb, spec, option, buffers.data());
    std::fwrite(&status, sizeof status, 1, stdout);
    for (const Buffer &buffer : buffers)
      if (buffer.bytes) std::fwrite(buffer.data, 1, size_t(buffer.bytes), stdout);
    std::fflush(stdout);
  }
}
