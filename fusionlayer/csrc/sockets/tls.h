#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>

#include "mac.h"

namespace fl::sockets {

// TLS 1.3 on a connection, by OpenSSL's libssl.so.3, which is loaded when it is asked for. Both ends have a key, and no
// certificates. The cipher, ChaCha20-Poly1305, may carry any number of bytes under one key. An ephemeral exchange of keys
// comes first: who records the bytes, and learns the job's secret later, still cannot read them.
class Tls {
 public:
  // Whether there is a library to load.
  static bool is_there();

  // `key`: that of what the caller sends. The library must be there.
  Tls(int fd, bool is_caller, const uint8_t *key);
  ~Tls();
  Tls(const Tls &) = delete;

  // As readv and writev on a socket that does not wait; EBADMSG where the other end has not the key, or where what it has
  // sent was changed. Each brings the handshake on first.
  ssize_t read(const iovec *parts, int count);
  ssize_t write(const iovec *parts, int count);
  // Until the handshake has ended nothing can be written, whatever the socket can take.
  bool is_up() const;

  // For OpenSSL's callbacks.
  int receive(void *bytes, int size);
  int send(const void *bytes, int size);
  const uint8_t *key() const { return key_; }

 private:
  ssize_t move(const iovec *parts, int count, bool reads);

  const int fd_;
  uint8_t key_[kKeyBytes];
  void *ssl_;
  bool has_more_ = false;  // whether what is written now is followed by more at once
  int error_ = 0;          // of the socket; 0: none, -1: its end
  int failed_ = 0;         // the error with which all ends
};

}  // namespace fl::sockets
