// The numbers that matrix instructions multiply: their bits as values.
#pragma once
#include <cstdint>
#include <cstring>

namespace host {

template <class Out, class In>
Out bits_of(In x) {
  static_assert(sizeof(Out) == sizeof(In));
  Out out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

inline float f16_value(uint16_t bits) {
  // the exponent moves to its place and a product corrects its bias, which makes subnormals normal
  const float magnitude = bits_of<float>(uint32_t(bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t word = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u | uint32_t(bits & 0x3ffu) << 13 : bits_of<uint32_t>(magnitude);
  return bits_of<float>(word | uint32_t(bits & 0x8000u) << 16);
}

inline float bf16_value(uint16_t bits) { return bits_of<float>(uint32_t(bits) << 16); }

inline int s8_value(int8_t x) { return x; }

}  // namespace host
