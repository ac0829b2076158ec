// Global memory: the operands' bounds and use, and whether another block may see what one wrote.
#include <algorithm>
#include <map>

#include "cuda.hpp"
#include "machine.hpp"

namespace host {

namespace {

constexpr size_t word_bytes = 4;

// Who wrote a word of a workspace last in this launch; block 0 is nobody.
struct Written {
  uint32_t block;
  uint32_t fences;  // that the writer had passed by then
  Stamp stamp;
};

struct Region {
  std::string name;
  Use use;
  char* begin;
  size_t bytes;
  std::vector<uint32_t> writers;  // of an output: for every byte the block, counted from 1
  std::vector<Written> words;     // of a workspace
};

std::vector<Region> regions;
std::vector<uint32_t> fences;                  // that the threads of this cluster passed
std::vector<std::vector<uint32_t>> published;  // of every block: the fences before its last atomic
uint64_t now;                               // counts atomics and fences
std::vector<uint64_t> last_atomic;          // of this cluster's blocks
std::vector<uint64_t> last_fence;           // of this cluster's threads
// What the atomics on a word pass on within this cluster.
std::map<const void*, std::shared_ptr<const Times>> passed_on;

uint32_t running_block() { return blockIdx.x + 1; }

Region& region_at(const void* pointer, int bytes, int alignment, const char* act, Site site) {
  const char* at = static_cast<const char*>(pointer);
  if (reinterpret_cast<uintptr_t>(at) % uintptr_t(alignment))
    fault("%s %d bytes at an address that is not aligned to %d, at %s", act, bytes, alignment, place(site).c_str());
  for (Region& region : regions)
    if (at >= region.begin && at + bytes <= region.begin + region.bytes) return region;
  // the operand it comes closest to
  const Region* nearest = nullptr;
  ptrdiff_t distance = 0;
  for (const Region& region : regions) {
    const ptrdiff_t beyond = std::max<ptrdiff_t>(region.begin - at, at + bytes - (region.begin + ptrdiff_t(region.bytes)));
    if (!nearest || beyond < distance) nearest = &region, distance = beyond;
  }
  if (!nearest) fault("%s %d bytes outside every operand, at %s", act, bytes, place(site).c_str());
  fault("%s %d bytes at byte %td of %s, which has %zu, at %s", act, bytes, at - nearest->begin, nearest->name.c_str(),
        nearest->bytes, place(site).c_str());
}

size_t first_word(const Region& region, const void* at) { return size_t(static_cast<const char*>(at) - region.begin) / word_bytes; }

size_t end_word(const Region& region, const void* at, int bytes) {
  return (size_t(static_cast<const char*>(at) - region.begin) + size_t(bytes) + word_bytes - 1) / word_bytes;
}

std::string word_of(const Region& region, size_t i) { return "word " + std::to_string(i) + " of " + region.name; }

// A fault unless this thread's act on a word comes after the write of it.
void follows(const char* act, const Written& word, const std::string& where, Site site) {
  const bool of_cluster = (word.block - 1) / launch.cluster == blockIdx.x / launch.cluster;
  if (of_cluster && !happened_before(word.stamp, current))
    fault("a barrier is missing: %s %s, which %s writes, at %s", act, where.c_str(), thread_name(actor_of(word.stamp)).c_str(),
          place(site).c_str());
  if (word.block == running_block()) return;
  const auto& of_writer = published[word.block - 1];
  if (of_writer.empty() || of_writer[size_t(actor_of(word.stamp))] <= word.fences)
    fault("%s %s at %s, which block %u did not make visible by __threadfence", act, where.c_str(), place(site).c_str(),
          word.block - 1);
  const uint64_t atomic = last_atomic[size_t(current_block)];
  if (!atomic || last_fence[size_t(current)] < atomic)
    fault("%s %s of block %u at %s with no __threadfence after the atomic that tells of it", act, where.c_str(),
          word.block - 1, place(site).c_str());
}

void read(const void* at, int bytes, int alignment, bool through_l2, Site site) {
  const Region& region = region_at(at, bytes, alignment, "reads", site);
  if (region.use == Use::output) fault("reads the output at %s", place(site).c_str());
  if (region.use != Use::workspace) return;
  for (size_t i = first_word(region, at); i < end_word(region, at, bytes); ++i) {
    const Written& word = region.words[i];
    const std::string where = word_of(region, i);
    if (!word.block) fault("reads %s, which nobody wrote in this launch, at %s", where.c_str(), place(site).c_str());
    follows("reads", word, where, site);
    if (word.block != running_block() && !through_l2)
      fault("reads %s of block %u at %s, perhaps from a stale first-level cache", where.c_str(), word.block - 1,
            place(site).c_str());
  }
}

}  // namespace

void global_add(const std::string& name, Use use, char* begin, size_t bytes) {
  regions.push_back({name, use, begin, bytes, {}, {}});
}

void global_start_launch() {
  published.assign(launch.grid, {});
  for (Region& region : regions) {
    if (region.use == Use::output) region.writers.assign(region.bytes, 0);
    if (region.use == Use::workspace) region.words.assign((region.bytes + word_bytes - 1) / word_bytes, {});
  }
}

void global_start_cluster() {
  fences.assign(size_t(cluster_threads()), 0);
  last_fence.assign(size_t(cluster_threads()), 0);
  last_atomic.assign(launch.cluster, 0);
  passed_on.clear();
}

void global_read(const void* at, int bytes, int alignment, Site site) {
  // constants of the kernel itself, and threadIdx and the like
  const char* byte = static_cast<const char*>(at);
  if ((byte >= library.code && byte + bytes <= library.end) || is_built_in(at)) return;
  read(at, bytes, alignment, false, site);
}

void global_load_l2(const void* at, int bytes, int alignment, Site site) { read(at, bytes, alignment, true, site); }

void global_write(const void* at, int bytes, int alignment, Site site) {
  Region& region = region_at(at, bytes, alignment, "writes", site);
  if (region.use == Use::input) fault("writes to %s at %s", region.name.c_str(), place(site).c_str());
  if (region.use == Use::output) {
    const size_t first = size_t(static_cast<const char*>(at) - region.begin);
    for (size_t i = first; i < first + size_t(bytes); ++i) {
      if (region.writers[i])
        fault("writes byte %zu of %s for the second time, first in block %u, at %s", i, region.name.c_str(),
              region.writers[i] - 1, place(site).c_str());
      region.writers[i] = running_block();
    }
    return;
  }
  const Written word{running_block(), fences[size_t(current)], stamp_of(current)};
  for (size_t i = first_word(region, at); i < end_word(region, at, bytes); ++i) {
    if (region.words[i].block) follows("writes", region.words[i], word_of(region, i), site);
    region.words[i] = word;
  }
}

void global_atomic(const void* at, int bytes, Site site) {
  const Region& region = region_at(at, bytes, bytes, "atomically changes", site);
  if (region.use != Use::workspace) fault("atomically changes %s at %s", region.name.c_str(), place(site).c_str());
  last_atomic[size_t(current_block)] = ++now;
  published[blockIdx.x] = fences;
  auto& before = passed_on.try_emplace(at, no_times()).first->second;
  order_acquire(current, before);
  auto after = std::make_shared<Times>(*before);
  order_release(current, *after);
  before = after;
}

void global_fence(int thread) {
  ++fences[size_t(thread)];
  last_fence[size_t(thread)] = ++now;
}

void global_end_launch() {
  for (const Region& region : regions) {
    const size_t missing = size_t(std::count(region.writers.begin(), region.writers.end(), 0u));
    if (missing)
      fault("%zu of %zu bytes of %s were not written, the first at byte %td", missing, region.bytes, region.name.c_str(),
            std::find(region.writers.begin(), region.writers.end(), 0u) - region.writers.begin());
  }
}

}  // namespace host
