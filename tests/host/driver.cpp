// Runs a kernel's library on the host: the program that tests start, one kernel with one set of operands each time.
//
// usage: driver LIBRARY DYNAMIC GRID BLOCK SMEM_BYTES ALIGNMENT ARCH CLUSTER SEED LAUNCHES SECONDS OPERAND... -- PARAMETER...
// DYNAMIC: the library's array of dynamic shared memory. OPERAND: NAME:USE:BYTES:FILE with a use of input, output or
// workspace. PARAMETER: NAME for a pointer, NAME=element bytes;extents;strides;box;swizzle;corners;steps for a tensor map.
// Prints `ok`, or `fault` and what is wrong in one line.
#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>

#include "cuda.hpp"
#include "machine.hpp"

namespace host {

Launch launch;
Library library;

namespace {

constexpr size_t margin_bytes = size_t(1) << 30;

uint64_t random_state;
bool running;  // a cluster
void* handle;  // of the library
const char* dynamic_name;
void (*run_kernel)(void* const*);
std::map<std::string, void*> operands;
std::vector<void*> arguments;  // where the kernel's parameters lie

}  // namespace

std::string place(Site site) {
  char text[32];
  // one less: within the call, not after it
  std::snprintf(text, sizeof text, "{%#tx}", static_cast<const char*>(site) - library.code - 1);
  return text;
}

void fault(const char* format, ...) {
  std::printf("fault ");
  va_list values;
  va_start(values, format);
  std::vprintf(format, values);
  va_end(values);
  if (running) std::printf(": thread %u of block %u", threadIdx.x, blockIdx.x);
  std::printf("\n");
  std::fflush(stdout);
  _exit(1);
}

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
unsigned draw(unsigned limit) {
  uint64_t x = random_state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return unsigned(((x ^ (x >> 31)) >> 32) * limit >> 32);
}

namespace {

void on_signal(int number, siginfo_t* information, void* context) {
#if defined(__x86_64__)
  const auto counter = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  const auto counter = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#else
  const uintptr_t counter = 0;
#endif
  // one more: what `place` takes off
  const Site site = reinterpret_cast<const char*>(counter) + 1;
  const bool inside = site >= library.code && site < library.end;
  const std::string where = inside ? place(site) : "a place outside the kernel";
  if (number == SIGVTALRM) fault("does not end, at %s", where.c_str());
  if (number == SIGILL) fault("an overflow, a shift, an index beyond an array or a misaligned address, at %s", where.c_str());
  fault("signal %d for address %p, at %s", number, information->si_addr, where.c_str());
}

void catch_signals(unsigned seconds) {
  static char stack[64 << 10];
  const stack_t other{stack, 0, sizeof stack};
  sigaltstack(&other, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM}) sigaction(number, &action, nullptr);
  // of computing: a busy machine does not count
  const itimerval limit{{0, 0}, {time_t(seconds), 0}};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
}

// What the kernel's library is: the program header that holds `run_kernel`.
int describe(dl_phdr_info* found, size_t, void* shared) {
  const char* base = reinterpret_cast<const char*>(found->dlpi_addr);
  const char* end = base;
  size_t local_bytes = 0;
  for (int i = 0; i < found->dlpi_phnum; ++i) {
    const auto& header = found->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) end = std::max(end, base + header.p_vaddr + header.p_memsz);
    if (header.p_type == PT_TLS) local_bytes = header.p_memsz;
  }
  const char* code = reinterpret_cast<const char*>(run_kernel);
  if (code < base || code >= end) return 0;
  library.code = base;
  library.end = end;
  library.shared_bytes = local_bytes;
  static_cast<SharedMemory*>(shared)->begin = static_cast<char*>(found->dlpi_tls_data);
  return 1;
}

template <class Pointer>
Pointer symbol(const char* name) {
  void* found = dlsym(handle, name);
  if (!found) fault("%s", dlerror());
  return reinterpret_cast<Pointer>(found);
}

void open_library(const char* path, const char* dynamic) {
  handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) fault("%s", dlerror());
  dynamic_name = dynamic;
  run_kernel = symbol<void (*)(void* const*)>("run_kernel");
  library.dynamic_capacity = *symbol<const size_t*>("dynamic_capacity");
  if (launch.smem_bytes > library.dynamic_capacity) fault("%u bytes of dynamic shared memory are too many", launch.smem_bytes);
}

}  // namespace

SharedMemory shared_memory() {
  SharedMemory found{nullptr, symbol<char*>(dynamic_name)};
  if (!dl_iterate_phdr(describe, &found)) fault("the kernel's library is not loaded");
  return found;
}

namespace {

void add_operand(const std::string& text) {
  const size_t one = text.find(':'), two = text.find(':', one + 1), three = text.find(':', two + 1);
  if (three == std::string::npos) fault("not an operand: %s", text.c_str());
  const std::string name = text.substr(0, one), use = text.substr(one + 1, two - one - 1), file = text.substr(three + 1);
  const size_t bytes = std::strtoull(text.c_str() + two + 1, nullptr, 10);
  const bool input = use == "input";
  void* at = nullptr;
  if (bytes) {
    // nothing lies near an operand, so that what an access beyond it meant is known
    void* room = mmap(nullptr, bytes + 2 * margin_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) fault("no room for %s", file.c_str());
    const int descriptor = open(file.c_str(), O_RDWR);
    at = mmap(static_cast<char*>(room) + margin_bytes, bytes, input ? PROT_READ : PROT_READ | PROT_WRITE,
              MAP_SHARED | MAP_FIXED, descriptor, 0);
    if (descriptor < 0 || at == MAP_FAILED) fault("cannot map %s", file.c_str());
    close(descriptor);
    global_add(name, input ? Use::input : use == "output" ? Use::output : Use::workspace, static_cast<char*>(at), bytes);
  }
  operands[name] = at;
}

void add_parameter(const std::string& text) {
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  const auto found = operands.find(name);
  if (found == operands.end()) fault("no operand %s", name.c_str());
  if (equals == std::string::npos)
    arguments.push_back(&found->second);
  else
    arguments.push_back(tensor_map(text.substr(equals + 1), name, static_cast<char*>(found->second)));
}

void launch_once() {
  std::vector<unsigned> clusters(launch.grid / launch.cluster);
  std::iota(clusters.begin(), clusters.end(), 0u);
  for (size_t i = clusters.size(); i > 1; --i) std::swap(clusters[i - 1], clusters[draw(unsigned(i))]);
  global_start_launch();
  for (unsigned cluster : clusters) {
    order_start();
    shared_start();
    instructions_start();
    barriers_start();
    tensor_start();
    products_start();
    global_start_cluster();
    running = true;
    run_cluster(cluster * launch.cluster, [] { run_kernel(arguments.data()); });
    running = false;
  }
  global_end_launch();
}

}  // namespace

int run(int count, char** words) {
  if (count < 12) fault("usage: driver LIBRARY DYNAMIC GRID BLOCK SMEM_BYTES ALIGNMENT ARCH CLUSTER SEED LAUNCHES SECONDS OPERAND... -- PARAMETER...");
  const auto number = [&](int i) { return unsigned(std::strtoul(words[i], nullptr, 10)); };
  launch = {number(3), number(4), number(5), number(6), number(7), number(8)};
  if (launch.block % 32 || !launch.block || launch.block > 1024) fault("%u threads are not whole warps", launch.block);
  if (launch.cluster < 1 || launch.cluster > 8 || launch.grid % launch.cluster)
    fault("a grid of %u blocks is not made of clusters of %u", launch.grid, launch.cluster);
  if (launch.cluster > 1 && launch.arch < 900) fault("a cluster of blocks needs sm_90");
  random_state = number(9);
  open_library(words[1], words[2]);
  int word = 12;
  for (; word < count && std::string(words[word]) != "--"; ++word) add_operand(words[word]);
  for (++word; word < count; ++word) add_parameter(words[word]);
  start_threads();
  catch_signals(number(11));
  for (unsigned i = 0; i < number(10); ++i) launch_once();
  std::puts("ok");
  return 0;
}

}  // namespace host

int main(int count, char** words) { return host::run(count, words); }
