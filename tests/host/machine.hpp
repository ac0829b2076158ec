// The machine that runs one kernel on the host: what its parts know of each other.
//
// One block runs at a time, its threads as fibers of one thread of the system; blocks and warps take turns in an order
// drawn from the seed. A defect of the kernel ends the process with one line; `{0x12}` in it stands for the source line
// at that offset of the kernel's library.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace host {

// An address in the kernel's library, that of the call or access that the machine serves.
using Site = const void*;

struct Launch {
  unsigned grid, block, smem_bytes;
  unsigned alignment;  // that the kernel asks for its dynamic shared memory
  unsigned arch;       // as __CUDA_ARCH__
};

[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// `{0x12}` for a site.
std::string place(Site site);

extern Launch launch;

// A pseudo-random number below `limit`, from the seed.
unsigned draw(unsigned limit);

// The library of the kernel: where its code and shared memory lie.
struct Library {
  const char* code;       // where it is loaded
  const char* end;        // beyond its last segment
  char* shared;           // its thread-local block: all shared memory of a block
  size_t shared_bytes;
  char* dynamic;          // the part of it that is sized by the launch
  size_t dynamic_capacity;
};
extern Library library;

// Fibers: the threads of the block, scheduled one at a time.

extern int current;  // the thread that runs
inline int warp_of(int thread) { return thread / 32; }
inline int lane_of(int thread) { return thread % 32; }

void run_block(unsigned block, void (*entry)());
bool on_own_stack(const void* pointer);

// Waits until every lane of the warp has come to the same instruction; the last one executes it for all.
// `arguments`: this lane's, handed to `execute` for all 32 lanes.
void collective(Site site, const char* instruction, void* arguments, void (*execute)(void* const* lanes));

// Order: which events of a block happened before which, as the kernel's barriers tell.

// Who did something, and when by its own clock; 0 is nobody.
using Stamp = uint32_t;
constexpr Stamp in_flight = 0xffffffffu;  // the stamp of bytes that an asynchronous copy has still to write

void order_start(int threads);
Stamp stamp_of(int thread);
bool happened_before(Stamp stamp, int thread);
int thread_of(Stamp stamp);
// All that each of these threads did is before all that each of them does from now on.
void order_join(const std::vector<int>& threads);

// Shared memory: addresses, bounds, who wrote and read last.

void shared_start();
bool is_shared(const void* pointer);
// The bytes at a 32-bit address of shared memory; a fault where they are not there or not aligned.
char* shared_at(uint32_t address, int bytes, int alignment, Site site);
enum class Unwritten { refused, allowed };
// Notes an access of `thread`, and faults where no barrier orders it after the accesses that it depends on.
// A read tells whether all bytes have been written.
bool shared_read(const char* at, int bytes, int thread, Site site, Unwritten unwritten = Unwritten::refused);
void shared_write(const char* at, int bytes, int thread, Site site);
void shared_write_begins(const char* at, int bytes, int thread, Site site);
void shared_write_ends(const char* at, int bytes, int thread);

// Global memory: the operands, and who wrote what.

enum class Use { input, output, workspace };
void global_add(const std::string& name, Use use, char* begin, size_t bytes);
void global_start_launch();
void global_start_block(unsigned block);
void global_read(const void* at, int bytes, int alignment, Site site);
void global_load_l2(const void* at, int bytes, int alignment, Site site);
void global_write(const void* at, int bytes, int alignment, Site site);
void global_atomic(const void* at, int bytes, Site site);
void global_fence(int thread);
void global_end_launch();

// Instructions with state of their own.
void instructions_start(int threads);

#define HOST_SITE (static_cast<::host::Site>(__builtin_return_address(0)))

}  // namespace host
