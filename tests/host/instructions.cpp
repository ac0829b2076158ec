// The wrapped instructions of warps and threads: matrix fragments and products, asynchronous copies, conversions.
#include <cmath>
#include <cstring>

#include "machine.hpp"
#include "values.hpp"

namespace host {

namespace {

constexpr int lanes = 32;

// A fragment that ldmatrix read from bytes that nobody wrote may be thrown away, but not multiplied.
struct Suspicion {
  bool any;  // in this cluster
  Site site;
} suspicion;
constexpr uint32_t unwritten_word = 0xfdfdfdfdu;

struct Fragments {
  void* d;
  const uint32_t *a, *b;
};

// One 16 x 8 product of a warp; `per` elements of type Element lie in a register.
template <class Element, class Value, class Sum>
void multiply(void* const* all, Value (*value)(Element)) {
  constexpr int per = 4 / int(sizeof(Element)), depth = 8 * per;
  Value a[16][depth], b[depth][8];
  for (int lane = 0; lane < lanes; ++lane) {
    const auto* of = static_cast<const Fragments*>(all[lane]);
    const int row = lane / 4, first = lane % 4 * per;
    for (int i = 0; i < 4; ++i) {
      Element x[per];
      std::memcpy(x, &of->a[i], 4);
      for (int e = 0; e < per; ++e) a[row + i % 2 * 8][first + i / 2 * 4 * per + e] = value(x[e]);
    }
    for (int i = 0; i < 2; ++i) {
      Element x[per];
      std::memcpy(x, &of->b[i], 4);
      for (int e = 0; e < per; ++e) b[first + i * 4 * per + e][row] = value(x[e]);
    }
  }
  Sum sums[16][8];
  for (int lane = 0; lane < lanes; ++lane) {
    const Sum* d = static_cast<const Sum*>(static_cast<const Fragments*>(all[lane])->d);
    for (int i = 0; i < 4; ++i) sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = d[i];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < 8; ++n) sums[m][n] += a[m][k] * b[k][n];
  for (int lane = 0; lane < lanes; ++lane) {
    Sum* d = static_cast<Sum*>(static_cast<const Fragments*>(all[lane])->d);
    for (int i = 0; i < 4; ++i) d[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

void check_written(const uint32_t* a, const uint32_t* b, Site site) {
  if (!suspicion.any) return;
  for (int i = 0; i < 6; ++i)
    if ((i < 4 ? a[i] : b[i - 4]) == unwritten_word)
      fault("multiplies shared memory that nobody wrote, at %s; read last at %s", place(site).c_str(),
            place(suspicion.site).c_str());
}

struct Copy {
  char* target;
  const void* source;
  int bytes;
  bool inside;
};

// Of each thread: the groups committed and not waited for, oldest first, and the copies not yet committed.
struct Copies {
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};
std::vector<Copies> copies;

void need_sm80(const char* what, Site site) {
  if (launch.arch < 800) fault("%s at %s needs sm_80", what, place(site).c_str());
}

void finish(const std::vector<Copy>& group) {
  for (const Copy& copy : group) {
    if (copy.inside)
      std::memcpy(copy.target, copy.source, size_t(copy.bytes));
    else
      std::memset(copy.target, 0, size_t(copy.bytes));
    shared_write_ends(copy.target, copy.bytes, stamp_of(current));
  }
}

}  // namespace

void instructions_start() {
  copies.assign(size_t(cluster_threads()), {});
  suspicion = {};
}

void ldmatrix(unsigned* registers, int matrices, unsigned address) {
  struct Arguments {
    unsigned* registers;
    int matrices;
    unsigned address;
    Site site;
  } mine{registers, matrices, address, HOST_SITE};
  collective(HOST_SITE, matrices == 4 ? "ldmatrix.x4" : "ldmatrix.x2", &mine, [](void* const* all) {
    const auto of = [&](int lane) { return static_cast<Arguments*>(all[lane]); };
    const Site site = of(0)->site;
    for (int source = 0; source < of(0)->matrices * 8; ++source) {
      const char* row = shared_at(of(source)->address, 16, 16, site);
      const int thread = current - lane_of(current) + source;
      if (!shared_read(row, 16, by(thread, site), Unwritten::allowed)) suspicion = {true, site};
      for (int word = 0; word < 4; ++word) std::memcpy(&of(source % 8 * 4 + word)->registers[source / 8], row + word * 4, 4);
    }
  });
}

void multiply_f16(float* d, const unsigned* a, const unsigned* b) {
  Fragments mine{d, a, b};
  check_written(a, b, HOST_SITE);
  collective(HOST_SITE, "mma of f16", &mine, [](void* const* all) { multiply<uint16_t, float, float>(all, f16_value); });
}

void multiply_bf16(float* d, const unsigned* a, const unsigned* b) {
  Fragments mine{d, a, b};
  need_sm80("mma of bf16", HOST_SITE);
  check_written(a, b, HOST_SITE);
  collective(HOST_SITE, "mma of bf16", &mine, [](void* const* all) { multiply<uint16_t, float, float>(all, bf16_value); });
}

void multiply_s8(int* d, const unsigned* a, const unsigned* b) {
  Fragments mine{d, a, b};
  check_written(a, b, HOST_SITE);
  collective(HOST_SITE, "mma of s8", &mine, [](void* const* all) { multiply<int8_t, int, int>(all, s8_value); });
}

void copy_async(unsigned target, const void* source, int bytes, bool inside) {
  need_sm80("cp.async", HOST_SITE);
  char* at = shared_at(target, bytes, bytes, HOST_SITE);
  if (inside) global_read(source, bytes, bytes, HOST_SITE);
  shared_write_begins(at, bytes, by(current, HOST_SITE));
  copies[size_t(current)].open.push_back({at, source, bytes, inside});
}

void copy_async_commit() {
  need_sm80("cp.async.commit_group", HOST_SITE);
  Copies& mine = copies[size_t(current)];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

void copy_async_wait(int pending) {
  need_sm80("cp.async.wait_group", HOST_SITE);
  auto& groups = copies[size_t(current)].groups;
  while (groups.size() > size_t(pending)) {
    finish(groups.front());
    groups.erase(groups.begin());
  }
}

void store_streaming(void* target, const void* source, int bytes) {
  global_write(target, bytes, bytes, HOST_SITE);
  std::memcpy(target, source, size_t(bytes));
}

void load_l2(void* target, const void* source, int bytes) {
  global_load_l2(source, bytes, bytes, HOST_SITE);
  std::memcpy(target, source, size_t(bytes));
}

unsigned atomic_add(void* address, unsigned value) {
  global_atomic(address, 4, HOST_SITE);
  unsigned before, after;
  std::memcpy(&before, address, 4);
  after = before + value;
  std::memcpy(address, &after, 4);
  return before;
}

void fence() { global_fence(current); }

unsigned short to_f16(float x) {
  const uint32_t word = bits_of<uint32_t>(x), sign = word >> 16 & 0x8000u, magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  // from 65520 on
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  // below 2^-14: a multiple of 2^-24, rounded by an addition to the float that has this spacing
  if (magnitude < 0x38800000u) return uint16_t(sign | (bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

unsigned short to_bf16(float x) {
  const uint32_t word = bits_of<uint32_t>(x);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

float from_f16(unsigned short bits) { return f16_value(bits); }

int to_s32(float x) {
  if (std::isnan(x)) return 0;
  const double nearest = std::nearbyint(double(x));
  return nearest <= -2147483648.0 ? -2147483647 - 1 : nearest >= 2147483647.0 ? 2147483647 : int(nearest);
}

}  // namespace host
