// Barriers in shared memory that count arrivals and bytes (mbarrier), and the registers that warpgroups pass on.
#include <algorithm>
#include <map>
#include <numeric>

#include "machine.hpp"

namespace host {

void barrier_init(unsigned address, unsigned arrivals);
void barrier_init_fence();
void barrier_expect(unsigned address, unsigned bytes);
void barrier_arrive(unsigned address);
void barrier_arrive_remote(unsigned address, unsigned block);
void barrier_wait(unsigned address, unsigned parity);
void reassign_registers(int registers, bool more);

namespace {

// The largest number of bytes that a phase may wait for (PTX ISA, "tx-count range").
constexpr int64_t most_bytes = (1 << 20) - 1;
constexpr int registers_of_block = 65536;

struct PhaseBarrier {
  Stamp initialised;
  bool fenced;  // its initialisation is visible to the tensor engine
  unsigned expected;
  unsigned missing;  // arrivals of the present phase
  int64_t bytes;     // that copies have still to write in the present phase
  uint32_t phase;
  Times arriving;                        // what the present phase will pass on
  std::shared_ptr<const Times> passed;   // what the phases before passed on
  std::vector<int> waiting;
};

std::vector<PhaseBarrier> barriers;
std::map<std::pair<int, uint32_t>, int> places;  // number by block and address
std::vector<int> registers;      // of a thread, by warp
std::vector<int> waiting_for_registers;

int usable(uint32_t address, Site site, int block = current_block) {
  const auto found = places.find({block, address});
  if (found == places.end()) fault("%#x is not an initialised barrier in shared memory, at %s", address, place(site).c_str());
  const PhaseBarrier& barrier = barriers[size_t(found->second)];
  if (!happened_before(barrier.initialised, current))
    fault("a barrier is missing: uses a barrier in shared memory at %s that %s initialises", place(site).c_str(),
          thread_name(actor_of(barrier.initialised)).c_str());
  return found->second;
}

PhaseBarrier& barrier_at(uint32_t address, Site site, int block = current_block) {
  return barriers[size_t(usable(address, site, block))];
}

void need_fence(const PhaseBarrier& barrier, Site site) {
  if (!barrier.fenced) fault("a barrier for copies whose initialisation no fence made visible, at %s", place(site).c_str());
}

void complete_if_due(PhaseBarrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  ++barrier.phase;
  barrier.missing = barrier.expected;
  barrier.passed = std::make_shared<const Times>(barrier.arriving);
  // a thread that comes back late finds another phase, as on the device
  for (int thread : barrier.waiting) set_runnable(thread);
  barrier.waiting.clear();
}

void arrive(PhaseBarrier& barrier, Site site) {
  if (!barrier.missing) fault("one arrival too many in a barrier's phase, at %s", place(site).c_str());
  order_release(current, barrier.arriving);
  --barrier.missing;
  complete_if_due(barrier);
}

}  // namespace

void barriers_start() {
  barriers.clear();
  barriers.reserve(barrier_engines);
  places.clear();
  waiting_for_registers.clear();
  // what the compiler gives each thread of a block that has a multiprocessor to itself, where it meets setmaxnreg
  const unsigned whole = (launch.block + 127) / 128 * 128;
  registers.assign(size_t(cluster_threads()) / 32, int(std::min(240u, registers_of_block / whole / 8 * 8)));
}

int barrier_for_copy(uint32_t address, int block, Site site) {
  const int number = usable(address, site, block);
  need_fence(barriers[size_t(number)], site);
  return number;
}

Stamp barrier_stamp(int barrier) {
  const PhaseBarrier& of = barriers[size_t(barrier)];
  return stamp(barrier_engine(barrier), of.phase + 1);
}

void barrier_bytes_written(int number, unsigned bytes) {
  PhaseBarrier& barrier = barriers[size_t(number)];
  order_note(barrier_stamp(number), barrier.arriving);
  barrier.bytes -= bytes;
  if (barrier.bytes < -most_bytes) fault("a barrier's copies bring more bytes than it expects");
  complete_if_due(barrier);
}

void barrier_init(unsigned address, unsigned arrivals) {
  const char* at = shared_at(address, 8, 8, HOST_SITE);
  shared_reserve(at, 8, by(current, HOST_SITE));
  if (!arrivals || arrivals > most_bytes) fault("a barrier of %u arrivals, at %s", arrivals, place(HOST_SITE).c_str());
  if (barriers.size() == barrier_engines) fault("more than %d barriers, at %s", barrier_engines, place(HOST_SITE).c_str());
  places[{current_block, address}] = int(barriers.size());
  barriers.push_back({stamp_of(current), false, arrivals, arrivals, 0, 0, *no_times(), no_times(), {}});
}

void barrier_init_fence() {
  for (PhaseBarrier& barrier : barriers)
    if (actor_of(barrier.initialised) == current) barrier.fenced = true;
}

void barrier_expect(unsigned address, unsigned bytes) {
  PhaseBarrier& barrier = barrier_at(address, HOST_SITE);
  need_fence(barrier, HOST_SITE);
  barrier.bytes += bytes;
  if (barrier.bytes > most_bytes) fault("a barrier of %u bytes, at %s", bytes, place(HOST_SITE).c_str());
  arrive(barrier, HOST_SITE);
}

void barrier_arrive(unsigned address) { arrive(barrier_at(address, HOST_SITE), HOST_SITE); }

void barrier_arrive_remote(unsigned address, unsigned block) {
  const Site site = HOST_SITE;
  if (block >= launch.cluster) fault("block %u of a cluster of %u, at %s", block, launch.cluster, place(site).c_str());
  shared_use(int(block), stamp_of(current), site);
  PhaseBarrier& barrier = barrier_at(address, site, int(block));
  need_fence(barrier, site);
  arrive(barrier, site);
}

void barrier_wait(unsigned address, unsigned parity) {
  const Site site = HOST_SITE;
  if (parity > 1) fault("a parity of %u, at %s", parity, place(site).c_str());
  PhaseBarrier& barrier = barrier_at(address, site);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(current);
    wait("a barrier in shared memory", site);
  }
  order_acquire(current, barrier.passed);
}

void reassign_registers(int count, bool more) {
  struct Arguments {
    int count;
    bool more;
  } mine{count, more};
  const Site site = HOST_SITE;
  const size_t warp = size_t(warp_of(current));
  if (count < 24 || count > 256 || count % 8) fault("setmaxnreg of %d, at %s", count, place(site).c_str());
  if (more ? count < registers[warp] : count > registers[warp])
    fault("setmaxnreg.%s from %d to %d registers, at %s", more ? "inc" : "dec", registers[warp], count, place(site).c_str());
  collective(site, more ? "setmaxnreg.inc" : "setmaxnreg.dec", &mine, [](void* const* all) {
    const auto* of = static_cast<const Arguments*>(all[0]);
    if (of->more) return;
    registers[size_t(warp_of(current))] = of->count;
    for (int thread : waiting_for_registers) set_runnable(thread);
    waiting_for_registers.clear();
  });
  const auto first = registers.begin() + current_block * int(launch.block) / 32;
  while (registers[warp] < count) {
    if (std::accumulate(first, first + int(launch.block) / 32, count - registers[warp]) * 32 <= registers_of_block) {
      registers[warp] = count;
      return;
    }
    waiting_for_registers.push_back(current);
    wait("registers", site);
  }
}

}  // namespace host
