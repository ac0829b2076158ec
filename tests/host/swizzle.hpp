// The permutation of 16-byte chunks that the tensor copy engine and matrix descriptors apply to shared addresses.
#pragma once
#include <cstdint>

namespace host {

// `bytes` of a row (32, 64, 128): the chunk's number within a row is changed by the number of the 128-byte line.
inline uint32_t swizzled(uint32_t address, int bytes) {
  const uint32_t chunks = uint32_t(bytes) / 16;
  return address ^ ((address >> 7 & (chunks - 1)) << 4);
}

}  // namespace host
