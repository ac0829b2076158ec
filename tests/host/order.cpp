// What happened before what in a cluster: vector clocks over threads and engines, joined by barriers.
//
// Every actor counts its own time, which a barrier moves on, and every thread knows of every actor up to which time its
// acts are visible. Threads that passed the same barrier share what they know. (C. Flanagan and S. Freund, "FastTrack:
// efficient and precise dynamic race detection", PLDI 2009, describes such stamps.)
#include <algorithm>

#include "machine.hpp"

namespace host {

namespace {

constexpr int clock_bits = 20;

struct Knowledge {
  std::shared_ptr<const Times> others;
  uint32_t own;
};

std::vector<Knowledge> threads_;
size_t actors;

void raise_to(Times& times, const Times& others) {
  std::transform(times.begin(), times.end(), others.begin(), times.begin(), [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

void tick(Knowledge& thread) {
  if (++thread.own >> clock_bits) fault("too many barriers in one cluster");
}

}  // namespace

void order_start() {
  actors = size_t(warp_engine(0)) + size_t(cluster_threads()) / 32;
  threads_.assign(size_t(cluster_threads()), {no_times(), 1});
}

std::shared_ptr<const Times> no_times() { return std::make_shared<const Times>(actors, 0u); }

Stamp stamp(int actor, uint32_t time) {
  if (time >> clock_bits || size_t(actor) >= actors) fault("too many engines or too long a block");
  return Stamp(actor + 1) << clock_bits | time;
}

Stamp stamp_of(int thread) { return Stamp(thread + 1) << clock_bits | threads_[size_t(thread)].own; }

int actor_of(Stamp stamp) { return int(stamp >> clock_bits) - 1; }

bool is_thread(Stamp stamp) { return stamp != in_flight && size_t(actor_of(stamp)) < threads_.size(); }

bool happened_before(Stamp stamp, int thread) {
  if (stamp == in_flight) return false;
  const int actor = actor_of(stamp);
  const uint32_t time = stamp & ((1u << clock_bits) - 1);
  return actor == thread || (*threads_[size_t(thread)].others)[size_t(actor)] >= time;
}

void order_join(const std::vector<int>& joined) {
  auto all = std::make_shared<Times>(actors, 0u);
  const Times* last = nullptr;
  for (int thread : joined) {
    const Times* others = threads_[size_t(thread)].others.get();
    if (others == last) continue;
    last = others;
    raise_to(*all, *others);
  }
  for (int thread : joined) (*all)[size_t(thread)] = threads_[size_t(thread)].own;
  for (int thread : joined) {
    threads_[size_t(thread)].others = all;
    tick(threads_[size_t(thread)]);
  }
}

void order_release(int thread, Times& into) {
  Knowledge& mine = threads_[size_t(thread)];
  raise_to(into, *mine.others);
  into[size_t(thread)] = std::max(into[size_t(thread)], mine.own);
  tick(mine);
}

void order_note(Stamp stamp, Times& into) {
  uint32_t& time = into[size_t(actor_of(stamp))];
  time = std::max(time, stamp & ((1u << clock_bits) - 1));
}

void order_acquire(int thread, const std::shared_ptr<const Times>& from) {
  // the lanes of a warp mostly know the same and learn the same
  static std::shared_ptr<const Times> before, learnt, after;
  Knowledge& mine = threads_[size_t(thread)];
  if (mine.others != before || from != learnt) {
    auto all = std::make_shared<Times>(*mine.others);
    raise_to(*all, *from);
    before = mine.others;
    learnt = from;
    after = all;
  }
  mine.others = after;
}

}  // namespace host
