// Products of warpgroups (wgmma): descriptors decoded, executed no earlier than the wait that ends them.
//
// Each warp computes its 16 rows. Between issue and wait the accumulators of its threads hold a pattern that no sum has, so
// that a kernel which reads them too early computes nonsense, and one that writes them is found out.
#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>

#include "cuda.hpp"
#include "machine.hpp"
#include "swizzle.hpp"
#include "values.hpp"

namespace host {

void wgmma(Number type, int columns, bool accumulate, void* d, uint64_t a, uint64_t b);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

namespace {

constexpr int lanes = 32, rows = 16, k_bytes = 32;
constexpr uint32_t poison = 0xffedcba9u;  // a NaN

struct Descriptor {
  uint32_t address, group_bytes;
  int swizzle;
};

struct Product {
  Number type;
  int columns;
  bool accumulate;
  void* d[lanes];  // of each lane, columns / 2 sums
  Descriptor a, b;
  Site site;
};

// The sums of products that are in flight, in place of the threads' registers.
struct Sums {
  void* d[lanes];
  int columns;
  int products;                 // that have still to be added
  std::vector<uint32_t> words;  // lane by lane
};

struct Warp {
  bool fenced;
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;  // committed, oldest first
  std::vector<Sums> sums;
  uint32_t time;  // counts commits
};
std::vector<Warp> warps;

Descriptor decode(uint64_t bits, Site site) {
  const int mode = int(bits >> 62);
  if (!mode) fault("a matrix descriptor without swizzle, at %s", place(site).c_str());
  if (bits >> 46 & 0xffff) fault("a matrix descriptor with bits set that are not known, at %s", place(site).c_str());
  return {uint32_t(bits & 0x3fff) << 4, uint32_t(bits >> 32 & 0x3fff) << 4, mode == 1 ? 128 : mode == 2 ? 64 : 32};
}

// Row `row` of an operand: two chunks of 16 bytes.
const char* chunk_of(const Descriptor& of, int row, int chunk, Site site) {
  const uint32_t linear = of.address + uint32_t(row / 8) * of.group_bytes + uint32_t(row % 8 * of.swizzle + chunk * 16);
  return shared_at(swizzled(linear, of.swizzle), 16, 16, site);
}

// Of the rows of an operand, those that a warp of a warpgroup multiplies.
int first_row(int warp) { return warp % int(launch.block / 32) % 4 * rows; }

template <class Visit>
void each_chunk(const Product& product, int warp, Visit visit) {
  const int first = first_row(warp);
  for (int row = 0; row < rows; ++row)
    for (int chunk = 0; chunk < 2; ++chunk) visit(chunk_of(product.a, first + row, chunk, product.site));
  for (int row = 0; row < product.columns; ++row)
    for (int chunk = 0; chunk < 2; ++chunk) visit(chunk_of(product.b, row, chunk, product.site));
}

// Row and column of sum `i` of a lane.
int row_of(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
int column_of(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

template <class Element, class Value, class Sum>
void compute(const Product& product, Sums& sums, int warp, Value (*value)(Element)) {
  constexpr int depth = k_bytes / int(sizeof(Element));
  static Value a[rows][depth], b[depth][256];
  static Sum c[rows][256];
  const auto load = [&](const Descriptor& from, int row, auto put) {
    Element elements[depth];
    for (int chunk = 0; chunk < 2; ++chunk)
      std::memcpy(elements + chunk * depth / 2, chunk_of(from, row, chunk, product.site), 16);
    for (int k = 0; k < depth; ++k) put(k, value(elements[k]));
  };
  for (int row = 0; row < rows; ++row) load(product.a, first_row(warp) + row, [&](int k, Value x) { a[row][k] = x; });
  for (int n = 0; n < product.columns; ++n) load(product.b, n, [&](int k, Value x) { b[k][n] = x; });
  const int each = product.columns / 2;
  Sum* words = reinterpret_cast<Sum*>(sums.words.data());
  for (int lane = 0; lane < lanes; ++lane)
    for (int i = 0; i < each; ++i)
      c[row_of(lane, i)][column_of(lane, i)] = product.accumulate ? words[lane * each + i] : Sum(0);
  for (int m = 0; m < rows; ++m)
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < product.columns; ++n) c[m][n] += a[m][k] * b[k][n];
  for (int lane = 0; lane < lanes; ++lane)
    for (int i = 0; i < each; ++i) words[lane * each + i] = c[row_of(lane, i)][column_of(lane, i)];
}

Sums& sums_of(Warp& warp, const Product& product) {
  const auto found = std::find_if(warp.sums.begin(), warp.sums.end(), [&](const Sums& s) { return s.d[0] == product.d[0]; });
  if (found != warp.sums.end() && found->columns == product.columns) return *found;
  for (const Sums& other : warp.sums) {
    const char *mine = static_cast<char*>(product.d[0]), *theirs = static_cast<char*>(other.d[0]);
    if (mine < theirs + other.columns * 2 && theirs < mine + product.columns * 2)
      fault("products in flight overlap in a part of their accumulators, at %s", place(product.site).c_str());
  }
  warp.sums.push_back({{}, product.columns, 0, {}});
  Sums& sums = warp.sums.back();
  std::copy(product.d, product.d + lanes, sums.d);
  const size_t each = size_t(product.columns / 2);
  sums.words.resize(each * lanes);
  for (size_t lane = 0; lane < lanes; ++lane) {
    std::memcpy(&sums.words[lane * each], sums.d[lane], each * 4);
    std::fill_n(static_cast<uint32_t*>(sums.d[lane]), each, poison);
  }
  return sums;
}

void issue(const Product& product, int number) {
  Warp& warp = warps[size_t(number)];
  if (!warp.fenced) fault("a product with no wgmma.fence since its registers were free, at %s", place(product.site).c_str());
  ++sums_of(warp, product).products;
  const By reader{current, stamp(warp_engine(number), warp.time + 1), product.site};
  each_chunk(product, number, [&](const char* at) { shared_read_by_engine(at, 16, reader); });
  warp.open.push_back(product);
}

void execute(const Product& product, int number) {
  Warp& warp = warps[size_t(number)];
  Sums& sums = sums_of(warp, product);
  switch (product.type) {
    case Number::f16: compute<uint16_t, float, float>(product, sums, number, f16_value); break;
    case Number::bf16: compute<uint16_t, float, float>(product, sums, number, bf16_value); break;
    case Number::s8: compute<int8_t, int, int>(product, sums, number, s8_value); break;
  }
  if (--sums.products) return;
  const size_t each = size_t(sums.columns / 2);
  for (size_t lane = 0; lane < lanes; ++lane) {
    const uint32_t* d = static_cast<const uint32_t*>(sums.d[lane]);
    if (std::any_of(d, d + each, [](uint32_t word) { return word != poison; }))
      fault("accumulators were written before the wait for the product at %s", place(product.site).c_str());
    std::memcpy(sums.d[lane], &sums.words[lane * each], each * 4);
  }
  warp.sums.erase(warp.sums.begin() + (&sums - warp.sums.data()));
}

}  // namespace

void products_start() { warps.assign(size_t(cluster_threads()) / 32, {}); }

void products_end(int number) {
  const Warp& warp = warps[size_t(number)];
  if (!warp.open.empty() || !warp.groups.empty()) fault("a warp ends with products that it did not wait for");
}

void wgmma(Number type, int columns, bool accumulate, void* d, uint64_t a, uint64_t b) {
  struct Arguments {
    Product product;
    uint64_t a, b;
    void* d;
  };
  const Site site = HOST_SITE;
  if (launch.arch != 900) fault("wgmma at %s needs sm_90a", place(site).c_str());
  const int step = type == Number::s8 && columns > 32 ? 16 : 8;
  if (columns < 8 || columns > 256 || columns % step) fault("wgmma of %d columns, at %s", columns, place(site).c_str());
  Arguments mine{{type, columns, accumulate, {}, decode(a, site), decode(b, site), site}, a, b, d};
  collective(site, "wgmma", &mine, [](void* const* all) {
    Product product = static_cast<Arguments*>(all[0])->product;
    for (int lane = 0; lane < lanes; ++lane) {
      const auto* of = static_cast<const Arguments*>(all[lane]);
      if (of->a != static_cast<Arguments*>(all[0])->a || of->b != static_cast<Arguments*>(all[0])->b)
        fault("the lanes of a warp give different descriptors, at %s", place(product.site).c_str());
      product.d[lane] = of->d;
    }
    issue(product, warp_of(current));
  });
}

void wgmma_fence() {
  collective(HOST_SITE, "wgmma.fence", nullptr, [](void* const*) { warps[size_t(warp_of(current))].fenced = true; });
}

void wgmma_commit() {
  collective(HOST_SITE, "wgmma.commit_group", nullptr, [](void* const*) {
    Warp& warp = warps[size_t(warp_of(current))];
    warp.groups.push_back(std::move(warp.open));
    warp.open.clear();
    ++warp.time;
  });
}

void wgmma_wait(int pending) {
  struct Arguments {
    int pending;
  } mine{pending};
  collective(HOST_SITE, "wgmma.wait_group", &mine, [](void* const* all) {
    const int number = warp_of(current);
    Warp& warp = warps[size_t(number)];
    while (warp.groups.size() > size_t(static_cast<Arguments*>(all[0])->pending)) {
      for (const Product& product : warp.groups.front()) execute(product, number);
      warp.groups.pop_front();
    }
    if (warp.groups.empty() && warp.open.empty()) warp.fenced = false;
    // what these products read, they have read
    auto read = std::make_shared<Times>(*no_times());
    const uint32_t done = warp.time - uint32_t(warp.groups.size());
    if (done) order_note(stamp(warp_engine(number), done), *read);
    for (int lane = 0; lane < lanes; ++lane) order_acquire(number * lanes + lane, read);
  });
}

}  // namespace host
