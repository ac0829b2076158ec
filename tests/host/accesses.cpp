// What the compiler's instrumentation calls before each access that is not provably to a thread's own variables.
#include "cuda.hpp"
#include "machine.hpp"

namespace host {

namespace {

inline void check_alignment(const void* at, int bytes, int alignment, Site site) {
  if (reinterpret_cast<uintptr_t>(at) % uintptr_t(alignment))
    fault("%d bytes of shared memory at an address that is not aligned to %d, at %s", bytes, alignment, place(site).c_str());
}

inline void read(const void* at, int bytes, int alignment, Site site) {
  if (on_own_stack(at)) return;
  if (!is_shared(at)) {
    global_read(at, bytes, alignment, site);
    return;
  }
  check_alignment(at, bytes, alignment, site);
  shared_read(static_cast<const char*>(at), bytes, by(current, site));
}

inline void write(const void* at, int bytes, int alignment, Site site) {
  if (on_own_stack(at)) return;
  if (!is_shared(at)) {
    global_write(at, bytes, alignment, site);
    return;
  }
  check_alignment(at, bytes, alignment, site);
  shared_write(static_cast<const char*>(at), bytes, by(current, site));
}

}  // namespace

void check_copy(void* target, const void* source, unsigned long bytes) {
  read(source, int(bytes), 1, HOST_SITE);
  write(target, int(bytes), 1, HOST_SITE);
}

}  // namespace host

#define ACCESSES(bytes)                                                                                          \
  extern "C" void __tsan_read##bytes(void* at) { host::read(at, bytes, bytes, HOST_SITE); }                      \
  extern "C" void __tsan_write##bytes(void* at) { host::write(at, bytes, bytes, HOST_SITE); }                    \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { host::read(at, bytes, 1, HOST_SITE); }                \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { host::write(at, bytes, 1, HOST_SITE); }

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

extern "C" {
void __tsan_read_range(void* at, size_t bytes) { host::read(at, int(bytes), 1, HOST_SITE); }
void __tsan_write_range(void* at, size_t bytes) { host::write(at, int(bytes), 1, HOST_SITE); }
// clang's copies of structures
void* __tsan_memcpy(void* target, const void* source, size_t bytes) {
  host::read(source, int(bytes), 1, HOST_SITE);
  host::write(target, int(bytes), 1, HOST_SITE);
  return __builtin_memcpy(target, source, bytes);
}
void* __tsan_memmove(void* target, const void* source, size_t bytes) {
  host::read(source, int(bytes), 1, HOST_SITE);
  host::write(target, int(bytes), 1, HOST_SITE);
  return __builtin_memmove(target, source, bytes);
}
void* __tsan_memset(void* target, int byte, size_t bytes) {
  host::write(target, int(bytes), 1, HOST_SITE);
  return __builtin_memset(target, byte, bytes);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
