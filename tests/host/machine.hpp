// The machine that runs one kernel on the host: what its parts know of each other.
//
// One cluster of blocks (mostly of one block) runs at a time, the threads of each block as fibers of one thread of the
// system; blocks and warps take turns in an order drawn from the seed. A defect of the kernel ends the process with one
// line; `{0x12}` in it stands for the source line at that offset of the kernel's library.
//
// Threads, warps and barriers are numbered within the cluster, block by block.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace host {

// An address in the kernel's library, that of the call or access that the machine serves.
using Site = const void*;

struct Launch {
  unsigned grid, block, smem_bytes;
  unsigned alignment;  // that the kernel asks for its dynamic shared memory
  unsigned arch;       // as __CUDA_ARCH__
  unsigned cluster;    // blocks of a cluster
};

[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// `{0x12}` for a site.
std::string place(Site site);

extern Launch launch;

// A pseudo-random number below `limit`, from the seed.
unsigned draw(unsigned limit);

// The library of the kernel: where its code lies, and how large its shared memory is.
struct Library {
  const char* code;  // where it is loaded
  const char* end;   // beyond its last segment
  size_t shared_bytes;
  size_t dynamic_capacity;
};
extern Library library;

// All shared memory of a block: the thread-local block that the library has on the block's thread of the system.
struct SharedMemory {
  char* begin;
  char* dynamic;  // the part of it that is sized by the launch
};
// That of the present thread of the system.
SharedMemory shared_memory();

// Fibers: the threads of the cluster, scheduled one at a time.

extern int current;        // the thread that runs
extern int current_block;  // its block
inline int warp_of(int thread) { return thread / 32; }
inline int lane_of(int thread) { return thread % 32; }
inline int block_of(int thread) { return thread / int(launch.block); }
inline int cluster_threads() { return int(launch.block * launch.cluster); }
// `thread 7`, in a cluster `thread 7 of its block 1`.
std::string thread_name(int thread);

// Has a thread of the system for each block of a cluster; before the first of them runs.
void start_threads();
// first: the number of the cluster's first block.
void run_cluster(unsigned first, void (*entry)());
bool on_own_stack(const void* pointer);
bool is_built_in(const void* pointer);

// Waits until every lane of the warp has come to the same instruction; the last one executes it for all.
// `arguments`: this lane's, handed to `execute` for all 32 lanes.
void collective(Site site, const char* instruction, void* arguments, void (*execute)(void* const* lanes));

// Order: which events of a cluster happened before which, as the kernel's barriers tell.

// Who acts: the threads, then the engines that write or read asynchronously, one for each barrier and one for each warp.
constexpr int barrier_engines = 128;
inline int barrier_engine(int barrier) { return cluster_threads() + barrier; }
inline int warp_engine(int warp) { return cluster_threads() + barrier_engines + warp; }

// Who did something, and when by its own clock; 0 is nobody.
using Stamp = uint32_t;
constexpr Stamp in_flight = 0xffffffffu;  // the stamp of bytes that an asynchronous copy has still to write
// Of every actor, the time up to which its acts are known.
using Times = std::vector<uint32_t>;

void order_start();
std::shared_ptr<const Times> no_times();
Stamp stamp(int actor, uint32_t time);
Stamp stamp_of(int thread);
int actor_of(Stamp stamp);
bool is_thread(Stamp stamp);
bool happened_before(Stamp stamp, int thread);
// All that each of these threads did is before all that each of them does from now on.
void order_join(const std::vector<int>& threads);
// Adds what the thread did and knows to what a barrier passes on.
void order_release(int thread, Times& into);
void order_note(Stamp stamp, Times& into);
// The thread learns what a barrier passes on.
void order_acquire(int thread, const std::shared_ptr<const Times>& from);

// Shared memory: addresses, bounds, who wrote and read last.

// Notes where the shared memory of a block of every cluster lies.
void shared_add(int block, SharedMemory memory);
void shared_start();
// Whether it points into the shared memory of the block that runs.
bool is_shared(const void* pointer);
// The bytes at a 32-bit address of a block's shared memory; a fault where they are not there or not aligned.
char* shared_at(uint32_t address, int bytes, int alignment, Site site, int block = current_block);
enum class Unwritten { refused, allowed };
// Who an access is by: `thread` must be allowed it, `stamp` is left behind.
struct By {
  int thread;
  Stamp stamp;
  Site site;
};
inline By by(int thread, Site site) { return {thread, stamp_of(thread), site}; }
// Notes an access, and faults where no barrier orders it after the accesses that it depends on.
// A read tells whether all bytes have been written.
bool shared_read(const char* at, int bytes, By by, Unwritten unwritten = Unwritten::refused);
void shared_write(const char* at, int bytes, By by);
// An asynchronous engine's read of what the threads themselves did not write.
void shared_read_by_engine(const char* at, int bytes, By by);
void shared_write_begins(const char* at, int bytes, By by);
void shared_write_ends(const char* at, int bytes, Stamp stamp);
// From here on these bytes are a barrier's.
void shared_reserve(const char* at, int bytes, By by);

// Notes that an engine or another block uses a block's shared memory, which must not have ended.
void shared_use(int block, Stamp stamp, Site site);
// Faults where the block's end is not ordered after such a use.
void shared_end(int block);

// Global memory: the operands, and who wrote what.

enum class Use { input, output, workspace };
void global_add(const std::string& name, Use use, char* begin, size_t bytes);
void global_start_launch();
void global_start_cluster();
void global_read(const void* at, int bytes, int alignment, Site site);
void global_load_l2(const void* at, int bytes, int alignment, Site site);
void global_write(const void* at, int bytes, int alignment, Site site);
void global_atomic(const void* at, int bytes, Site site);
void global_fence(int thread);
void global_end_launch();

// Instructions with state of their own.

void instructions_start();
void barriers_start();
void tensor_start();
void products_start();
// Faults where a thread ends with products that it did not wait for.
void products_end(int warp);

// The barrier at an address of a block's shared memory, for a copy that the present thread starts.
int barrier_for_copy(uint32_t address, int block, Site site);
Stamp barrier_stamp(int barrier);
// A copy has brought this many of the bytes that hold back its phase.
void barrier_bytes_written(int barrier, unsigned bytes);

// Copies of the tensor engine that have not come to pass.
bool tensor_pending();
// Faults where such a copy goes to the shared memory of this block.
void tensor_end(int block);
void tensor_step();

// A kernel's parameter that describes a tensor, from its text; `operand` is where the tensor lies.
void* tensor_map(const std::string& text, const std::string& operand_name, char* operand);

// Scheduling, for instructions that block.

// Lets others run until something has happened; `what` and `site` tell what the thread waits for.
void wait(const char* what, Site site);
void set_runnable(int thread);
// The thread may be overtaken here.
void yield();

#define HOST_SITE (static_cast<::host::Site>(__builtin_return_address(0)))

}  // namespace host
