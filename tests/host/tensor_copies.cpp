// The tensor copy engine: boxes and columns of pixels of a described tensor, swizzled into shared memory at a later time.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <sstream>

#include "machine.hpp"
#include "swizzle.hpp"

namespace host {

void copy_box(unsigned target, const void* map, unsigned barrier, const int* coordinates, int rank);
void multicast_box(unsigned target, const void* map, unsigned barrier, unsigned mask, const int* coordinates, int rank);
void copy_pixels(unsigned target, const void* map, unsigned barrier, int c, int w, int h, int n, int offset_w, int offset_h);
void use_map(const void* map);

namespace {

constexpr int ranks = 5;
using Coordinates = std::array<int64_t, ranks>;

struct Tensor {
  std::string operand;
  const char* base;
  int64_t element_bytes;
  std::vector<int64_t> extents, strides, box;  // innermost first; strides of all axes, in bytes
  int64_t swizzle;
  std::vector<int64_t> corners, steps;  // of copies of pixels: (w, h) of the lower, then of the upper
};
std::deque<Tensor> tensors;

// What a kernel gets: the first word tells which tensor.
struct alignas(64) Map {
  uint64_t word[16];
};
constexpr uint64_t mark = 0x7e4503ull << 32;
std::deque<Map> maps;

// One copy that has been started: where the first element of each of its rows lies.
struct Copy {
  const Tensor* tensor;
  uint32_t target;
  int block, barrier;  // of the target
  int64_t row_elements;
  std::vector<Coordinates> rows;
  Site site;
};
std::vector<Copy> pending;

const Tensor& tensor_of(const void* map, Site site) {
  Map of;
  std::memcpy(&of, map, sizeof of);
  if (of.word[0] < mark || of.word[0] >= mark + tensors.size()) fault("not a tensor map, at %s", place(site).c_str());
  return tensors[of.word[0] - mark];
}

int64_t row_bytes(const Copy& copy) { return copy.row_elements * copy.tensor->element_bytes; }

// Calls visit(shared memory, index of row, byte of the row) for every 16 bytes that the copy writes.
template <class Visit>
void each_chunk(const Copy& copy, Visit visit) {
  for (size_t row = 0; row < copy.rows.size(); ++row)
    for (int64_t byte = 0; byte < row_bytes(copy); byte += 16) {
      const uint32_t linear = copy.target + uint32_t(int64_t(row) * row_bytes(copy) + byte);
      visit(shared_at(swizzled(linear, int(copy.tensor->swizzle)), 16, 16, copy.site, copy.block), row, byte);
    }
}

void start(Copy copy, uint32_t barrier) {
  if (copy.target % 128)
    fault("a tensor copy to %#x, which is not aligned to 128 bytes, at %s", copy.target, place(copy.site).c_str());
  shared_use(copy.block, stamp_of(current), copy.site);
  copy.barrier = barrier_for_copy(barrier, copy.block, copy.site);
  each_chunk(copy, [&](char* at, size_t, int64_t) { shared_write_begins(at, 16, by(current, copy.site)); });
  pending.push_back(std::move(copy));
}

void finish(const Copy& copy) {
  const Tensor& tensor = *copy.tensor;
  const Stamp written = barrier_stamp(copy.barrier);
  shared_use(copy.block, written, copy.site);
  const int64_t elements = 16 / tensor.element_bytes;
  each_chunk(copy, [&](char* at, size_t row, int64_t byte) {
    Coordinates where = copy.rows[row];
    where[0] += byte / tensor.element_bytes;
    const char* source = tensor.base;
    bool inside = true;
    for (size_t axis = 0; axis < tensor.extents.size(); ++axis) {
      if (axis) inside = inside && where[axis] >= 0 && where[axis] < tensor.extents[axis];
      source += where[axis] * tensor.strides[axis];
    }
    std::memset(at, 0, 16);
    // elements from `first` to `end` of these lie inside the innermost axis
    const int64_t first = std::clamp<int64_t>(-where[0], 0, elements);
    const int64_t end = std::clamp<int64_t>(tensor.extents[0] - where[0], 0, elements);
    if (inside && first < end) {
      const int bytes = int((end - first) * tensor.element_bytes);
      source += first * tensor.element_bytes;
      global_read(source, bytes, 1, copy.site);
      std::memcpy(at + first * tensor.element_bytes, source, size_t(bytes));
    }
    shared_write_ends(at, 16, written);
  });
  barrier_bytes_written(copy.barrier, unsigned(row_bytes(copy) * int64_t(copy.rows.size())));
}

std::vector<int64_t> numbers(std::istringstream& text) {
  std::string word;
  std::getline(text, word, ';');
  std::istringstream list(word);
  std::vector<int64_t> found;
  for (std::string number; std::getline(list, number, ',');) found.push_back(std::stoll(number));
  return found;
}

// What the driver refuses to encode (CUDA Driver API, "Tensor Map Object Management").
void check(const Tensor& t) {
  const size_t rank = t.extents.size();
  const auto refuse = [&](const char* why) { fault("the tensor map of the %s is refused: %s", t.operand.c_str(), why); };
  const auto all = [](const std::vector<int64_t>& values, auto right) { return std::all_of(values.begin(), values.end(), right); };
  if (rank < 1 || rank > size_t(ranks) || t.strides.size() != rank) refuse("rank");
  if (uintptr_t(t.base) % 16) refuse("alignment");
  if (!all(t.extents, [](int64_t x) { return x >= 1 && x <= int64_t(1) << 32; })) refuse("extents");
  for (size_t i = 1; i < rank; ++i)
    if (t.strides[i] % 16 || t.strides[i] < 0 || t.strides[i] >= int64_t(1) << 40) refuse("strides");
  const bool pixels = !t.corners.empty();
  const int64_t inner_bytes = t.box.at(0) * t.element_bytes;
  if (inner_bytes > t.swizzle || inner_bytes % 16) refuse("the box's row");
  if (t.swizzle != 32 && t.swizzle != 64 && t.swizzle != 128) refuse("swizzle");
  if (!pixels) {
    if (t.box.size() != rank || !all(t.box, [](int64_t x) { return x >= 1 && x <= 256; })) refuse("box");
    if (t.steps.size() != rank || t.steps[0] != 1 || !all(t.steps, [](int64_t x) { return x >= 1 && x <= 8; })) refuse("steps");
    return;
  }
  if (rank != 4 || t.box.size() != 2 || t.box[0] > 256 || t.box[1] < 1 || t.box[1] > 1024) refuse("box of pixels");
  if (t.corners.size() != 4 || !all(t.corners, [](int64_t x) { return x >= -128 && x <= 127; })) refuse("corners");
  if (t.steps.size() != 4 || !all(t.steps, [](int64_t x) { return x >= 1 && x <= 8; })) refuse("steps");
}

}  // namespace

void* tensor_map(const std::string& text, const std::string& operand_name, char* operand) {
  std::istringstream words(text);
  Tensor tensor;
  tensor.operand = operand_name;
  tensor.base = operand;
  tensor.element_bytes = numbers(words).at(0);
  tensor.extents = numbers(words);
  tensor.strides = numbers(words);
  tensor.strides.insert(tensor.strides.begin(), tensor.element_bytes);
  tensor.box = numbers(words);
  tensor.swizzle = numbers(words).at(0);
  tensor.corners = numbers(words);
  tensor.steps = numbers(words);
  check(tensor);
  maps.push_back({{mark + tensors.size()}});
  tensors.push_back(tensor);
  return &maps.back();
}

void tensor_start() { pending.clear(); }

bool tensor_pending() { return !pending.empty(); }

void tensor_end(int block) {
  for (const Copy& copy : pending)
    if (copy.block == block) fault("a block ends while the copy of %s to its shared memory is in flight", place(copy.site).c_str());
}

void tensor_step() {
  // in any order, and often the latest first
  const size_t chosen = draw(2) ? pending.size() - 1 : draw(unsigned(pending.size()));
  const Copy copy = std::move(pending[chosen]);
  pending.erase(pending.begin() + ptrdiff_t(chosen));
  finish(copy);
}

void use_map(const void* map) { tensor_of(map, HOST_SITE); }

namespace {

Copy box(unsigned target, const void* map, const int* coordinates, int rank, Site site) {
  const Tensor& tensor = tensor_of(map, site);
  if (size_t(rank) != tensor.extents.size() || !tensor.corners.empty())
    fault("a copy of a box of %d axes from a tensor map for another, at %s", rank, place(site).c_str());
  Copy copy{&tensor, target, current_block, 0, tensor.box[0], {}, site};
  Coordinates at{};
  std::copy(coordinates, coordinates + rank, at.begin());
  const Coordinates first = at;
  // all combinations of the outer axes, the second axis fastest
  for (int axis = 1; axis < rank || rank == 1;) {
    copy.rows.push_back(at);
    for (axis = 1; axis < rank; ++axis) {
      at[size_t(axis)] += tensor.steps[size_t(axis)];
      if (at[size_t(axis)] < first[size_t(axis)] + tensor.box[size_t(axis)]) break;
      at[size_t(axis)] = first[size_t(axis)];
    }
    if (axis == rank) break;
  }
  return copy;
}

}  // namespace

void copy_box(unsigned target, const void* map, unsigned barrier, const int* coordinates, int rank) {
  start(box(target, map, coordinates, rank, HOST_SITE), barrier);
}

void multicast_box(unsigned target, const void* map, unsigned barrier, unsigned mask, const int* coordinates, int rank) {
  const Site site = HOST_SITE;
  if (!mask || mask >> launch.cluster) fault("a copy to blocks %#x of a cluster of %u, at %s", mask, launch.cluster, place(site).c_str());
  Copy copy = box(target, map, coordinates, rank, site);
  // each block gets it at a time of its own
  for (copy.block = 0; copy.block < int(launch.cluster); ++copy.block)
    if (mask >> copy.block & 1) start(copy, barrier);
}

void copy_pixels(unsigned target, const void* map, unsigned barrier, int c, int w, int h, int n, int offset_w, int offset_h) {
  const Site site = HOST_SITE;
  const Tensor& tensor = tensor_of(map, site);
  if (tensor.corners.empty()) fault("a copy of pixels from a tensor map for boxes, at %s", place(site).c_str());
  if (offset_w < 0 || offset_w > 255 || offset_h < 0 || offset_h > 255)
    fault("offsets of %d and %d pixels, at %s", offset_w, offset_h, place(site).c_str());
  Copy copy{&tensor, target, current_block, 0, tensor.box[0], {}, site};
  // base pixels lie between the corners, the image's extents apart
  const int64_t low_w = tensor.corners[0], low_h = tensor.corners[1];
  const int64_t high_w = tensor.extents[1] - 1 + tensor.corners[2], high_h = tensor.extents[2] - 1 + tensor.corners[3];
  int64_t at_w = w, at_h = h, at_n = n;
  for (int64_t i = 0; i < tensor.box[1]; ++i) {
    copy.rows.push_back({c, at_w + offset_w, at_h + offset_h, at_n, 0});
    if ((at_w += tensor.steps[1]) <= high_w) continue;
    at_w = low_w;
    if ((at_h += tensor.steps[2]) <= high_h) continue;
    at_h = low_h;
    at_n += tensor.steps[3];
  }
  start(std::move(copy), barrier);
}

}  // namespace host
