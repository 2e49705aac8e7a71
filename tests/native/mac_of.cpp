// Poly1305 and whole tags of csrc/sockets, for what standard input lists: a line for each, "poly KEY DATA" or
// "tag KEY PART NUMBER DATA", in hexadecimal but for the numbers.
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "../../fusionlayer/csrc/sockets/mac.cpp"

namespace {

std::vector<uint8_t> bytes() {
  std::string digits;
  std::cin >> digits;
  std::vector<uint8_t> out;
  for (size_t i = 0; digits != "-" && i < digits.size(); i += 2)
    out.push_back(uint8_t(std::stoul(digits.substr(i, 2), nullptr, 16)));
  return out;
}

}  // namespace

int main() {
  using namespace fl::sockets;
  for (std::string what; std::cin >> what;) {
    const std::vector<uint8_t> key = bytes();
    uint8_t out[kTagBytes];
    if (what == "poly") {
      uint64_t words[4];
      std::memcpy(words, key.data(), sizeof words);
      const std::vector<uint8_t> data = bytes();
      Poly1305 poly(words);
      poly.add(data.data(), data.size() / kBlock);
      poly.finish(out);
    } else {
      uint32_t part;
      uint64_t number;
      std::cin >> part >> number;
      Mac mac;
      mac.open(key.data());
      for (uint64_t i = 0; i < number; ++i) mac.next_frame();
      const std::vector<uint8_t> data = bytes();
      mac.write(Mac::Part(part), data.data(), data.size(), out);
    }
    for (const uint8_t byte : out) std::printf("%02x", byte);
    std::printf("\n");
  }
}
