// What happened before what in a block: vector clocks over threads, joined by barriers.
//
// Every thread counts its own time, which a barrier moves on, and knows of every other thread up to which time its acts
// are visible. Threads that passed the same barrier share what they know. (C. Flanagan and S. Freund, "FastTrack:
// efficient and precise dynamic race detection", PLDI 2009, describes such stamps.)
#include <algorithm>
#include <memory>

#include "machine.hpp"

namespace host {

namespace {

constexpr int clock_bits = 20;

using Times = std::vector<uint32_t>;

struct Knowledge {
  std::shared_ptr<const Times> others;
  uint32_t own;
};

std::vector<Knowledge> threads_;

}  // namespace

void order_start(int threads) {
  threads_.assign(size_t(threads), {std::make_shared<const Times>(size_t(threads), 0u), 1});
}

Stamp stamp_of(int thread) { return Stamp(thread + 1) << clock_bits | threads_[size_t(thread)].own; }

int thread_of(Stamp stamp) { return int(stamp >> clock_bits) - 1; }

bool happened_before(Stamp stamp, int thread) {
  if (stamp == in_flight) return false;
  const int actor = thread_of(stamp);
  const uint32_t time = stamp & ((1u << clock_bits) - 1);
  return actor == thread || (*threads_[size_t(thread)].others)[size_t(actor)] >= time;
}

void order_join(const std::vector<int>& joined) {
  auto all = std::make_shared<Times>(threads_.size(), 0u);
  const Times* last = nullptr;
  for (int thread : joined) {
    const Times* others = threads_[size_t(thread)].others.get();
    if (others == last) continue;
    last = others;
    std::transform(all->begin(), all->end(), others->begin(), all->begin(),
                   [](uint32_t a, uint32_t b) { return std::max(a, b); });
  }
  for (int thread : joined) (*all)[size_t(thread)] = threads_[size_t(thread)].own;
  for (int thread : joined) {
    threads_[size_t(thread)].others = all;
    if (++threads_[size_t(thread)].own >> clock_bits) fault("too many barriers in one block");
  }
}

}  // namespace host
