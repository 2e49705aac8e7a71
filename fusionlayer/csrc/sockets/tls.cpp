#include "tls.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <type_traits>

namespace fl::sockets {
namespace {

using Ssl = void;
using Bio = void;

// From the headers of OpenSSL 3, which are not needed to build: their values belong to its ABI.
constexpr int kErrorWantRead = 2, kErrorWantWrite = 3;
constexpr int kControlMode = 33, kControlReadAhead = 41, kControlLeastVersion = 123;
constexpr long kTls13 = 0x0304;
constexpr long kPartialWrite = 1, kMovingBuffer = 2;
constexpr int kVerifyPeer = 1;
constexpr int kOwnBio = 0x0400 | 120;  // a source and sink
constexpr int kRetryRead = 0x09, kRetryWrite = 0x0a, kRetryFlags = 0x0f;
constexpr int kControlFlush = 11;
constexpr size_t kRecord = 16 << 10;
// What is read at once from the socket: several records.
constexpr size_t kReadAhead = 128 << 10;

// Functions of the library, by their names there.
struct Library {
  void *(*TLS_method)();
  void *(*SSL_CTX_new)(void *);
  long (*SSL_CTX_ctrl)(void *, int, long, void *);
  int (*SSL_CTX_set_ciphersuites)(void *, const char *);
  int (*SSL_CTX_set_num_tickets)(void *, size_t);
  void (*SSL_set_verify)(Ssl *, int, void *);
  void (*SSL_CTX_set_default_read_buffer_len)(void *, size_t);
  void (*SSL_CTX_set_psk_client_callback)(void *,
                                          unsigned (*)(Ssl *, const char *, char *, unsigned, uint8_t *, unsigned));
  void (*SSL_CTX_set_psk_server_callback)(void *, unsigned (*)(Ssl *, const char *, uint8_t *, unsigned));
  Ssl *(*SSL_new)(void *);
  void (*SSL_free)(Ssl *);
  int (*SSL_set_ex_data)(Ssl *, int, void *);
  void *(*SSL_get_ex_data)(const Ssl *, int);
  void (*SSL_set_bio)(Ssl *, Bio *, Bio *);
  void (*SSL_set_connect_state)(Ssl *);
  void (*SSL_set_accept_state)(Ssl *);
  int (*SSL_is_init_finished)(const Ssl *);
  int (*SSL_read)(Ssl *, void *, int);
  int (*SSL_write)(Ssl *, const void *, int);
  int (*SSL_get_error)(const Ssl *, int);
  void (*ERR_clear_error)();
  void *(*BIO_meth_new)(int, const char *);
  int (*BIO_meth_set_read)(void *, int (*)(Bio *, char *, int));
  int (*BIO_meth_set_write)(void *, int (*)(Bio *, const char *, int));
  int (*BIO_meth_set_ctrl)(void *, long (*)(Bio *, int, long, void *));
  Bio *(*BIO_new)(void *);
  void (*BIO_set_data)(Bio *, void *);
  void *(*BIO_get_data)(Bio *);
  void (*BIO_set_init)(Bio *, int);
  void (*BIO_set_flags)(Bio *, int);
  void (*BIO_clear_flags)(Bio *, int);

  void *context = nullptr, *method = nullptr;  // null: the library is not there
};

const Library &library();

// What OpenSSL calls: without SIGPIPE, and without a wait.
int bio_read(Bio *bio, char *bytes, int size) {
  auto *tls = static_cast<Tls *>(library().BIO_get_data(bio));
  library().BIO_clear_flags(bio, kRetryFlags);
  const int got = tls->receive(bytes, size);
  if (got < 0 && errno == EAGAIN) library().BIO_set_flags(bio, kRetryRead);
  return got;
}

int bio_write(Bio *bio, const char *bytes, int size) {
  auto *tls = static_cast<Tls *>(library().BIO_get_data(bio));
  library().BIO_clear_flags(bio, kRetryFlags);
  const int put = tls->send(bytes, size);
  if (put < 0 && errno == EAGAIN) library().BIO_set_flags(bio, kRetryWrite);
  return put;
}

long bio_control(Bio *, int what, long, void *) { return what == kControlFlush; }

unsigned give_key(const Ssl *ssl, uint8_t *key, unsigned most) {
  if (most < kKeyBytes) return 0;
  std::memcpy(key, static_cast<const Tls *>(library().SSL_get_ex_data(ssl, 0))->key(), kKeyBytes);
  return kKeyBytes;
}

unsigned client_key(Ssl *ssl, const char *, char *identity, unsigned most_identity, uint8_t *key, unsigned most) {
  if (most_identity < 4) return 0;
  std::memcpy(identity, "job", 4);
  return give_key(ssl, key, most);
}

unsigned server_key(Ssl *ssl, const char *, uint8_t *key, unsigned most) { return give_key(ssl, key, most); }

Library load() {
  Library all{};
  void *handle = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return all;
  bool found = true;
  const auto find = [&](auto *&function, const char *name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    found = found && function;
  };
#define FL_FIND(name) find(all.name, #name)
  FL_FIND(TLS_method), FL_FIND(SSL_CTX_new), FL_FIND(SSL_CTX_ctrl), FL_FIND(SSL_CTX_set_ciphersuites);
  FL_FIND(SSL_CTX_set_num_tickets), FL_FIND(SSL_set_verify), FL_FIND(SSL_CTX_set_default_read_buffer_len);
  FL_FIND(SSL_CTX_set_psk_client_callback), FL_FIND(SSL_CTX_set_psk_server_callback);
  FL_FIND(SSL_new), FL_FIND(SSL_free), FL_FIND(SSL_set_ex_data), FL_FIND(SSL_get_ex_data), FL_FIND(SSL_set_bio);
  FL_FIND(SSL_set_connect_state), FL_FIND(SSL_set_accept_state), FL_FIND(SSL_is_init_finished);
  FL_FIND(SSL_read), FL_FIND(SSL_write), FL_FIND(SSL_get_error), FL_FIND(ERR_clear_error);
  FL_FIND(BIO_meth_new), FL_FIND(BIO_meth_set_read), FL_FIND(BIO_meth_set_write), FL_FIND(BIO_meth_set_ctrl);
  FL_FIND(BIO_new), FL_FIND(BIO_set_data), FL_FIND(BIO_get_data), FL_FIND(BIO_set_init);
  FL_FIND(BIO_set_flags), FL_FIND(BIO_clear_flags);
#undef FL_FIND
  if (!found) return all;
  void *context = all.SSL_CTX_new(all.TLS_method());
  void *method = all.BIO_meth_new(kOwnBio, "connection");
  if (!context || !method || all.SSL_CTX_ctrl(context, kControlLeastVersion, kTls13, nullptr) != 1 ||
      all.SSL_CTX_set_ciphersuites(context, "TLS_CHACHA20_POLY1305_SHA256") != 1)
    return all;
  all.SSL_CTX_set_num_tickets(context, 0);
  all.SSL_CTX_ctrl(context, kControlMode, kPartialWrite | kMovingBuffer, nullptr);
  all.SSL_CTX_ctrl(context, kControlReadAhead, 1, nullptr);
  all.SSL_CTX_set_default_read_buffer_len(context, kReadAhead);
  all.SSL_CTX_set_psk_client_callback(context, client_key);
  all.SSL_CTX_set_psk_server_callback(context, server_key);
  all.BIO_meth_set_read(method, bio_read);
  all.BIO_meth_set_write(method, bio_write);
  all.BIO_meth_set_ctrl(method, bio_control);
  all.context = context;
  all.method = method;
  return all;
}

const Library &library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace

bool Tls::is_there() { return library().context != nullptr; }

Tls::Tls(int fd, bool is_caller, const uint8_t *key) : fd_(fd), ssl_(library().SSL_new(library().context)) {
  std::memcpy(key_, key, sizeof key_);
  Bio *bio = library().BIO_new(library().method);
  library().BIO_set_data(bio, this);
  library().BIO_set_init(bio, 1);
  library().SSL_set_ex_data(ssl_, 0, this);
  library().SSL_set_bio(ssl_, bio, bio);
  // There are no certificates. A host that shows one, in place of the key, is refused, as nobody vouches for it.
  if (is_caller) library().SSL_set_verify(ssl_, kVerifyPeer, nullptr);
  is_caller ? library().SSL_set_connect_state(ssl_) : library().SSL_set_accept_state(ssl_);
}

Tls::~Tls() { library().SSL_free(ssl_); }

bool Tls::is_up() const { return library().SSL_is_init_finished(ssl_) != 0; }

ssize_t Tls::read(const iovec *parts, int count) { return move(parts, count, true); }

ssize_t Tls::write(const iovec *parts, int count) { return move(parts, count, false); }

ssize_t Tls::move(const iovec *parts, int count, bool reads) {
  ssize_t moved = 0;
  for (int i = 0; i < count && !failed_; ++i) {
    auto *at = static_cast<uint8_t *>(parts[i].iov_base);
    size_t left = parts[i].iov_len;
    while (left) {
      has_more_ = i + 1 < count || left > kRecord;
      library().ERR_clear_error();
      const int most = int(left);
      const int part = reads ? library().SSL_read(ssl_, at, most) : library().SSL_write(ssl_, at, most);
      if (part > 0) {
        at += part, left -= size_t(part), moved += part;
        continue;
      }
      const int why = library().SSL_get_error(ssl_, part);
      const bool waits = why == kErrorWantRead || why == kErrorWantWrite;
      if (!waits) failed_ = error_ ? error_ : EBADMSG;
      if (moved) return moved;
      if (failed_) break;
      errno = EAGAIN;
      return -1;
    }
  }
  if (moved) return moved;
  if (reads && failed_ < 0) return 0;
  errno = failed_ < 0 ? EPIPE : failed_;
  return -1;
}

int Tls::receive(void *bytes, int size) {
  ssize_t got;
  do got = ::recv(fd_, bytes, size_t(size), MSG_DONTWAIT);
  while (got < 0 && errno == EINTR);
  if (got == 0) error_ = -1;
  if (got < 0 && errno == EWOULDBLOCK) errno = EAGAIN;
  if (got < 0 && errno != EAGAIN) error_ = errno;
  return int(got);
}

int Tls::send(const void *bytes, int size) {
  ssize_t put;
  do put = ::send(fd_, bytes, size_t(size), MSG_NOSIGNAL | MSG_DONTWAIT | (has_more_ ? MSG_MORE : 0));
  while (put < 0 && errno == EINTR);
  if (put < 0 && errno == EWOULDBLOCK) errno = EAGAIN;
  if (put < 0 && errno != EAGAIN) error_ = errno;
  return int(put);
}

}  // namespace fl::sockets
