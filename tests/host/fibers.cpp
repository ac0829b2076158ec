// The threads of a cluster as fibers: context switches, the random schedule of warps, barriers and warp collectives.
#include <semaphore.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <sstream>
#include <thread>

#include "cuda.hpp"
#include "machine.hpp"

// the kernel sees constants; here they follow the fibers
extern "C" {
host::Index3 mutable_thread, mutable_block, mutable_block_extent, mutable_grid_extent;
}
#define ALIAS(name, of) extern "C" const host::Index3 name __attribute__((alias(#of)))
ALIAS(threadIdx, mutable_thread);
ALIAS(blockIdx, mutable_block);
ALIAS(blockDim, mutable_block_extent);
ALIAS(gridDim, mutable_grid_extent);

namespace host {

int current, current_block;

namespace {

constexpr size_t stack_bytes = 128 << 10, page_bytes = 4096;
// of a stack that hold NaNs at first, not the zeros of new memory: a variable that nobody sets then shows
constexpr size_t spoilt_bytes = 16 << 10;
constexpr int lanes = 32;

struct Fiber {
  char* stack;    // its lowest byte
  void* context;  // where it goes on
  bool done;
  const char* waits_for;  // nullptr while it can run
  Site site;              // where it waits
};

struct Warp {
  uint32_t runnable;  // a bit for each lane
  // the collective that lanes have come to
  uint32_t arrived;
  Site site;
  const char* instruction;
  std::array<void*, lanes> arguments;
};

struct Barrier {
  std::vector<int> arrived;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<int> ready;  // warps with a runnable lane
std::map<std::pair<int, int>, Barrier> block_barriers;  // by block and number; number 0 is __syncthreads
std::map<std::pair<int, uint32_t>, Barrier> warp_barriers;
Barrier cluster_barrier;
int finished;
unsigned patience;  // of the engines: switches between threads, on average, from one of their acts to the next
void (*entry)();

// One block of a cluster: its fibers run on a thread of the system that is its own, since shared memory is thread-local.
struct Block {
  sem_t turn;     // given when its fibers go on; at any time one block has it
  void* outside;  // the context of the thread itself
  int finished;
};
std::deque<Block> blocks;
sem_t all_finished;

#if defined(__x86_64__)

// Saves the registers that a call preserves on the stack, and goes on where `to` stands.
extern "C" void host_switch(void** from, void* to);
asm(R"(
.text
.globl host_switch
.type host_switch, @function
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch, . - host_switch
)");

void prepare(Fiber& fiber, void (*start)()) {
  void** top = reinterpret_cast<void**>(fiber.stack + stack_bytes - 64);
  *--top = nullptr;  // the stack's alignment at a function's entry
  *--top = reinterpret_cast<void*>(start);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.context = top;
}

void switch_context(void** from, void* to) { host_switch(from, to); }

#else

}  // namespace
}  // namespace host
#include <ucontext.h>
namespace host {
namespace {

void prepare(Fiber& fiber, void (*start)()) {
  static std::map<Fiber*, ucontext_t> contexts;
  ucontext_t& context = contexts[&fiber];
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = stack_bytes;
  context.uc_link = nullptr;
  makecontext(&context, start, 0);
  fiber.context = &context;
}

// A context stands at one address for as long as it exists.
void switch_context(void** from, void* to) {
  static thread_local ucontext_t whole;
  if (*from == nullptr) *from = &whole;
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
}

#endif

void enter(int thread) {
  if (launch.cluster > 1) {
    const int block = block_of(thread);
    mutable_block.x += unsigned(block - current_block);
    current_block = block;
  }
  current = thread;
  mutable_thread.x = unsigned(thread) - unsigned(current_block) * launch.block;
}

void clear_runnable(int thread) {
  Warp& warp = warps[size_t(warp_of(thread))];
  warp.runnable &= ~(1u << lane_of(thread));
  if (!warp.runnable) ready.erase(std::find(ready.begin(), ready.end(), warp_of(thread)));
}

[[noreturn]] void report_deadlock() {
  std::map<std::string, int> groups;
  for (size_t i = 0; i < fibers.size(); ++i) {
    std::ostringstream line;
    if (fibers[i].done)
      line << "ended";
    else
      line << "of warp " << i / lanes << " wait for " << fibers[i].waits_for << " at " << place(fibers[i].site);
    ++groups[line.str()];
  }
  std::string all;
  for (const auto& [text, count] : groups) all += (all.empty() ? "" : ", ") + std::to_string(count) + " threads " + text;
  fault("deadlock: %s", all.c_str());
}

// Copies come to pass at times that are not the kernel's to know.
void let_engines_work() {
  while (tensor_pending() && (ready.empty() || draw(patience) == 0)) tensor_step();
}

// A warp with a runnable lane; of another block only now and then, since that takes long.
int next_warp() {
  const int warp = ready[draw(unsigned(ready.size()))];
  if (launch.cluster == 1 || draw(8) == 0) return warp;
  const int each = int(launch.block) / lanes, first = warp_of(current) / each * each;
  const auto mine = [=](int other) { return other >= first && other < first + each; };
  const auto count = std::count_if(ready.begin(), ready.end(), mine);
  if (!count) return warp;
  auto chosen = std::find_if(ready.begin(), ready.end(), mine);
  for (unsigned skipped = draw(unsigned(count)); skipped; --skipped) chosen = std::find_if(chosen + 1, ready.end(), mine);
  return *chosen;
}

// The next lane of the present warp, or of a random one when it has none or its turn is over.
int next_thread(bool turn_is_over) {
  let_engines_work();
  if (ready.empty()) report_deadlock();
  int warp = warp_of(current);
  if (turn_is_over || !warps[size_t(warp)].runnable) warp = next_warp();
  const uint32_t runnable = warps[size_t(warp)].runnable;
  const int after = warp == warp_of(current) ? lane_of(current) + 1 : 0;
  const uint32_t later = after < lanes ? runnable >> after << after : 0;
  return warp * lanes + __builtin_ctz(later ? later : runnable);
}

void give_turn() { sem_post(&blocks[size_t(current_block)].turn); }

void take_turn(int block) {
  while (sem_wait(&blocks[size_t(block)].turn)) continue;
}

void go_to(int thread) {
  const int from = current;
  if (thread == from) return;
  enter(thread);
  if (const int block = block_of(from); block != current_block) {
    give_turn();
    take_turn(block);
    if (current == from) return;
  }
  switch_context(&fibers[size_t(from)].context, fibers[size_t(current)].context);
}

void complete_if_due(Barrier& barrier, size_t expected) {
  if (barrier.arrived.empty() || barrier.arrived.size() < expected) return;
  order_join(barrier.arrived);
  for (int thread : barrier.arrived)
    if (thread != current) set_runnable(thread);
  barrier.arrived.clear();
}

void thread_main() {
  entry();
  const int thread = current, block = current_block;
  Block& mine = blocks[size_t(block)];
  products_end(warp_of(thread));
  fibers[size_t(thread)].done = true;
  clear_runnable(thread);
  ++finished;
  complete_if_due(cluster_barrier, fibers.size() - size_t(finished));
  if (++mine.finished == int(launch.block)) {
    tensor_end(block);
    shared_end(block);
    void* gone = fibers[size_t(thread)].context;
    switch_context(&gone, mine.outside);
  }
  go_to(next_thread(false));
  __builtin_unreachable();
}

// What the thread of the system does for its block in each cluster.
void run_block(int block) {
  take_turn(block);
  switch_context(&blocks[size_t(block)].outside, fibers[size_t(current)].context);
  if (finished == int(fibers.size())) {
    sem_post(&all_finished);
    return;
  }
  enter(next_thread(false));
  give_turn();
}

void allocate_fibers(size_t count) {
  const size_t pitch = stack_bytes + page_bytes;
  char* memory = static_cast<char*>(
      mmap(nullptr, count * pitch, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) fault("no memory for %zu stacks", count);
  fibers.resize(count);
  for (size_t i = 0; i < count; ++i) {
    mprotect(memory + i * pitch, page_bytes, PROT_NONE);
    fibers[i].stack = memory + i * pitch + page_bytes;
    memset(fibers[i].stack + stack_bytes - spoilt_bytes, 0xff, spoilt_bytes);
  }
}

// The present thread has come to a barrier of `expected` threads; it goes on when all have.
void arrive(Barrier& barrier, size_t expected, const char* name, Site site) {
  barrier.arrived.push_back(current);
  if (barrier.arrived.size() < expected) {
    wait(name, site);
    return;
  }
  complete_if_due(barrier, expected);
  yield();
}

}  // namespace

void set_runnable(int thread) {
  Warp& warp = warps[size_t(warp_of(thread))];
  if (!warp.runnable) ready.push_back(warp_of(thread));
  warp.runnable |= 1u << lane_of(thread);
  fibers[size_t(thread)].waits_for = nullptr;
}

void wait(const char* what, Site site) {
  fibers[size_t(current)].waits_for = what;
  fibers[size_t(current)].site = site;
  clear_runnable(current);
  go_to(next_thread(false));
}

void yield() { go_to(next_thread(true)); }

bool is_built_in(const void* pointer) {
  for (const Index3* of : {&threadIdx, &blockIdx, &blockDim, &gridDim})
    if (pointer >= of && pointer < of + 1) return true;
  return false;
}

bool on_own_stack(const void* pointer) {
  const char* stack = fibers[size_t(current)].stack;
  return pointer >= stack && pointer < stack + stack_bytes;
}

std::string thread_name(int thread) {
  const std::string name = "thread " + std::to_string(thread % int(launch.block));
  return launch.cluster == 1 ? name : name + " of its block " + std::to_string(block_of(thread));
}

void start_threads() {
  allocate_fibers(size_t(cluster_threads()));
  mutable_block_extent = {launch.block, 1, 1};
  mutable_grid_extent = {launch.grid, 1, 1};
  blocks.resize(launch.cluster);
  for (Block& block : blocks) sem_init(&block.turn, 0, 0);
  sem_init(&all_finished, 0, 0);
  shared_add(0, shared_memory());
  for (int block = 1; block < int(launch.cluster); ++block)
    std::thread([block] {
      shared_add(block, shared_memory());
      sem_post(&all_finished);
      for (;;) run_block(block);
    }).detach();
  for (unsigned block = 1; block < launch.cluster; ++block) sem_wait(&all_finished);
}

void run_cluster(unsigned first, void (*kernel)()) {
  const size_t threads = fibers.size();
  current = current_block = 0;
  mutable_block = {first, 0, 0};
  entry = kernel;
  finished = 0;
  for (Block& block : blocks) block.finished = 0;
  // from hasty to as late as can be, so that copies overtake each other and the threads
  patience = 4u << 8 * draw(4);
  ready.clear();
  warps.assign(threads / lanes, Warp{});
  block_barriers.clear();
  warp_barriers.clear();
  cluster_barrier.arrived.clear();
  for (size_t i = 0; i < threads; ++i) {
    fibers[i].done = false;
    prepare(fibers[i], thread_main);
    set_runnable(int(i));
  }
  enter(int(draw(unsigned(warps.size()))) * lanes);
  give_turn();
  run_block(0);
  sem_wait(&all_finished);
}

void collective(Site site, const char* instruction, void* arguments, void (*execute)(void* const*)) {
  Warp& warp = warps[size_t(warp_of(current))];
  if (!warp.arrived) {
    warp.site = site;
    warp.instruction = instruction;
  } else if (warp.instruction != instruction) {
    fault("a warp's lanes differ: %s at %s, %s at %s", warp.instruction, place(warp.site).c_str(), instruction,
          place(site).c_str());
  }
  const uint32_t mine = 1u << lane_of(current);
  warp.arrived |= mine;
  warp.arguments[size_t(lane_of(current))] = arguments;
  if (warp.arrived != 0xffffffffu) {
    wait(instruction, site);
    return;
  }
  execute(warp.arguments.data());
  warp.arrived = 0;
  for (int lane = 0; lane < lanes; ++lane)
    if (lane != lane_of(current)) set_runnable(warp_of(current) * lanes + lane);
  // some warps run ahead of others
  if (draw(4) == 0) yield();
}

void synchronize() { arrive(block_barriers[{current_block, 0}], launch.block, "__syncthreads", HOST_SITE); }

void synchronize_cluster() {
  arrive(cluster_barrier, fibers.size() - size_t(finished), "the cluster's barrier", HOST_SITE);
}

void synchronize_warpgroup(int id) {
  if (id < 1 || id > 15) fault("bar.sync %d at %s: barriers have numbers from 1 to 15", id, place(HOST_SITE).c_str());
  arrive(block_barriers[{current_block, id}], 128, "bar.sync", HOST_SITE);
}

void synchronize_warp(unsigned mask) {
  if (!(mask >> lane_of(current) & 1)) fault("__syncwarp at %s: a lane that is not in the mask", place(HOST_SITE).c_str());
  arrive(warp_barriers[{warp_of(current), mask}], size_t(__builtin_popcount(mask)), "__syncwarp", HOST_SITE);
}

unsigned shuffle(unsigned mask, unsigned value, int source_lane) {
  struct Arguments {
    unsigned value, result;
    int source;
  } mine{value, 0, source_lane};
  if (mask != 0xffffffffu) fault("__shfl_sync at %s: only the full mask is supported", place(HOST_SITE).c_str());
  collective(HOST_SITE, "__shfl_sync", &mine, [](void* const* all) {
    for (int lane = 0; lane < lanes; ++lane) {
      auto* of = static_cast<Arguments*>(all[lane]);
      of->result = static_cast<Arguments*>(all[of->source % lanes])->value;
    }
  });
  return mine.result;
}

}  // namespace host
