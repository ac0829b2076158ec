// Shared memory: 32-bit addresses, bounds and alignment, and for every byte who wrote and who read it last.
#include <algorithm>
#include <cstring>
#include <map>

#include "machine.hpp"

namespace host {

namespace {

// Where dynamic shared memory starts: no more aligned than the kernel asks for. Below lies what a device keeps for itself.
constexpr uint32_t reserved_bytes = 1024;
// Where the variables that a kernel declares start.
constexpr uint32_t static_start = 1u << 20;
// The writer of a barrier's bytes.
constexpr Stamp reserved = in_flight - 1;
// What unwritten bytes hold.
constexpr int unwritten_byte = 0xfd;

struct Cell {
  Stamp writer;
  uint32_t writer_site;  // offset of the library
  uint32_t readers;      // number of a set of readers since it was written
};

struct Reader {
  Stamp stamp;
  uint32_t site;
};

// What is known of the shared memory of a block.
struct Memory : SharedMemory {
  std::vector<Cell> cells;
  bool ended;
  Times acts;  // of others on it
};
std::vector<Memory> memories;
// Sets of readers, of whom none is known to the others; set 0 is empty.
std::vector<std::vector<Reader>> reader_sets;
std::map<std::pair<uint32_t, Stamp>, uint32_t> unions;  // of a set and one more reader

uint32_t dynamic_start() { return reserved_bytes + std::min(launch.alignment, reserved_bytes); }

uint32_t offset_of(Site site) { return uint32_t(static_cast<const char*>(site) - library.code); }

std::string place_of(uint32_t offset) { return place(library.code + offset); }

std::string name_of(Stamp stamp) {
  if (stamp == in_flight) return "a copy that is still in flight";
  if (is_thread(stamp)) return thread_name(actor_of(stamp));
  const int warp = actor_of(stamp) - warp_engine(0);
  return warp < 0 ? std::string("a tensor copy") : "a product of warp " + std::to_string(warp);
}

bool holds(const Memory& memory, const void* at) { return at >= memory.begin && at < memory.begin + library.shared_bytes; }

Memory& running_memory() { return memories[size_t(current_block)]; }

// That which holds `at`, by default that of the block that runs.
Memory& memory_of(const char* at) {
  Memory& mine = running_memory();
  if (memories.size() > 1 && !holds(mine, at))
    for (Memory& other : memories)
      if (holds(other, at)) return other;
  return mine;
}

std::string byte_name(const char* at) {
  const Memory& memory = memory_of(at);
  const std::string owner = &memory == &running_memory() ? "" : " of another block";
  if (at >= memory.dynamic && at < memory.dynamic + library.dynamic_capacity)
    return "byte " + std::to_string(at - memory.dynamic) + " of dynamic shared memory" + owner;
  return "byte " + std::to_string(at - memory.begin) + " of the kernel's shared variables" + owner;
}

[[noreturn]] void race(const char* at, const char* act, Site site, const char* other_act, Stamp other, uint32_t other_site) {
  fault("a barrier is missing: %s %s at %s, and %s %s it at %s", act, byte_name(at).c_str(), place(site).c_str(),
        name_of(other).c_str(), other_act, place_of(other_site).c_str());
}

uint32_t with_reader(uint32_t set, const By& by) {
  uint32_t& known = unions[{set, by.stamp}];
  if (known) return known;
  std::vector<Reader> members{{by.stamp, offset_of(by.site)}};
  for (const Reader& reader : reader_sets[set])
    if (!happened_before(reader.stamp, by.thread)) members.push_back(reader);
  reader_sets.push_back(std::move(members));
  return known = uint32_t(reader_sets.size() - 1);
}

Cell* cells_at(const char* at) {
  Memory& memory = memory_of(at);
  return &memory.cells[size_t(at - memory.begin)];
}

void check_bounds(const char* at, int bytes, Site site) {
  const Memory& memory = memory_of(at);
  const char* dynamic_end = memory.dynamic + launch.smem_bytes;
  const char* array_end = memory.dynamic + library.dynamic_capacity;
  // touches the part of the array that the launch does not provide
  if (at + bytes > dynamic_end && at < array_end && at + bytes > memory.dynamic)
    fault("%d bytes at byte %td of %u of dynamic shared memory, at %s", bytes, at - memory.dynamic, launch.smem_bytes,
          place(site).c_str());
  if (at < memory.begin || at + bytes > memory.begin + library.shared_bytes)
    fault("%d bytes outside shared memory, at %s", bytes, place(site).c_str());
}

void check_overwrite(const char* at, int bytes, const By& by) {
  check_bounds(at, bytes, by.site);
  const Cell* cell = cells_at(at);
  Stamp writer = 0;
  uint32_t readers = 0;
  for (int i = 0; i < bytes; ++i) {
    if (cell[i].writer != writer) {
      writer = cell[i].writer;
      if (writer == reserved) fault("writes %s, a barrier, at %s", byte_name(at + i).c_str(), place(by.site).c_str());
      if (writer && !happened_before(writer, by.thread)) race(at + i, "writes", by.site, "writes", writer, cell[i].writer_site);
    }
    if (cell[i].readers != readers) {
      readers = cell[i].readers;
      for (const Reader& reader : reader_sets[readers])
        if (!happened_before(reader.stamp, by.thread)) race(at + i, "writes", by.site, "reads", reader.stamp, reader.site);
    }
  }
}

void set_writer(const char* at, int bytes, Stamp writer, uint32_t site) { std::fill_n(cells_at(at), bytes, Cell{writer, site, 0}); }

}  // namespace

void shared_add(int block, SharedMemory memory) {
  memories.resize(launch.cluster);
  static_cast<SharedMemory&>(memories[size_t(block)]) = memory;
}

void shared_start() {
  reader_sets.assign(1, {});
  unions.clear();
  for (Memory& memory : memories) {
    memory.cells.assign(library.shared_bytes, Cell{});
    memory.ended = false;
    memory.acts = *no_times();
    std::memset(memory.begin, unwritten_byte, library.shared_bytes - library.dynamic_capacity);
    std::memset(memory.dynamic, unwritten_byte, launch.smem_bytes);
  }
}

bool is_shared(const void* pointer) { return holds(running_memory(), pointer); }

char* shared_at(uint32_t address, int bytes, int alignment, Site site, int block) {
  const Memory& memory = memories[size_t(block)];
  if (address % uint32_t(alignment))
    fault("shared address %#x is not aligned to %d bytes, at %s", address, alignment, place(site).c_str());
  char* at = address >= static_start ? memory.begin + (address - static_start)
                                     : memory.dynamic + (int64_t(address) - dynamic_start());
  if (address < static_start && (at < memory.dynamic || at + bytes > memory.dynamic + launch.smem_bytes))
    fault("%d bytes at byte %td of %u of dynamic shared memory, at %s", bytes, at - memory.dynamic, launch.smem_bytes,
          place(site).c_str());
  check_bounds(at, bytes, site);
  return at;
}

uint32_t shared_address(const void* pointer) {
  const char* at = static_cast<const char*>(pointer);
  if (!is_shared(at)) fault("not an address in shared memory, at %s", place(HOST_SITE).c_str());
  const Memory& memory = running_memory();
  if (at >= memory.dynamic && at <= memory.dynamic + launch.smem_bytes) return dynamic_start() + uint32_t(at - memory.dynamic);
  return static_start + uint32_t(at - memory.begin);
}

bool shared_read(const char* at, int bytes, By by, Unwritten unwritten) {
  check_bounds(at, bytes, by.site);
  Cell* cell = cells_at(at);
  bool written = true;
  Stamp writer = 0;
  uint32_t before = 0, after = with_reader(0, by);
  for (int i = 0; i < bytes; ++i) {
    if (!cell[i].writer) {
      if (unwritten == Unwritten::refused)
        fault("reads %s, which nobody wrote, at %s", byte_name(at + i).c_str(), place(by.site).c_str());
      written = false;
      continue;
    }
    if (cell[i].writer != writer) {
      writer = cell[i].writer;
      if (writer == reserved) fault("reads %s, a barrier, at %s", byte_name(at + i).c_str(), place(by.site).c_str());
      if (!happened_before(writer, by.thread)) race(at + i, "reads", by.site, "writes", writer, cell[i].writer_site);
    }
    if (cell[i].readers != before) {
      before = cell[i].readers;
      after = with_reader(before, by);
    }
    cell[i].readers = after;
  }
  return written;
}

void shared_read_by_engine(const char* at, int bytes, By by) {
  const Cell* cell = cells_at(at);
  for (int i = 0; i < bytes; ++i)
    if (cell[i].writer && cell[i].writer < reserved && is_thread(cell[i].writer))
      fault("reads %s at %s, which %s wrote at %s, with no fence between the threads' and the engines' accesses",
            byte_name(at + i).c_str(), place(by.site).c_str(), name_of(cell[i].writer).c_str(), place_of(cell[i].writer_site).c_str());
  shared_read(at, bytes, by);
}

void shared_write(const char* at, int bytes, By by) {
  check_overwrite(at, bytes, by);
  set_writer(at, bytes, by.stamp, offset_of(by.site));
}

void shared_write_begins(const char* at, int bytes, By by) {
  check_overwrite(at, bytes, by);
  set_writer(at, bytes, in_flight, offset_of(by.site));
}

void shared_write_ends(const char* at, int bytes, Stamp stamp) { set_writer(at, bytes, stamp, cells_at(at)->writer_site); }

void shared_reserve(const char* at, int bytes, By by) {
  check_overwrite(at, bytes, by);
  set_writer(at, bytes, reserved, offset_of(by.site));
}

void shared_use(int block, Stamp stamp, Site site) {
  Memory& memory = memories[size_t(block)];
  if (memory.ended) fault("the shared memory of block %d of the cluster, which has ended, is used at %s", block, place(site).c_str());
  order_note(stamp, memory.acts);
}

void shared_end(int block) {
  Memory& memory = memories[size_t(block)];
  memory.ended = true;
  for (size_t actor = 0; actor < memory.acts.size(); ++actor) {
    const uint32_t time = memory.acts[actor];
    bool known = !time;
    for (int i = 0; i < int(launch.block) && !known; ++i)
      known = happened_before(stamp(int(actor), time), block * int(launch.block) + i);
    if (!known)
      fault("a barrier is missing: block %d of the cluster ends, and %s uses its shared memory", block,
            name_of(stamp(int(actor), time)).c_str());
  }
}

}  // namespace host
