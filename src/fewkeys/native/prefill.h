// Softmax over a list of keys and means of the past, where the past moves on meanwhile: `blocks.h` over `scan.h`.
//
// One thread moves the means of a head on; others may prepare the keys that come next and attend to the blocks whose
// means are known. The means of a block are read by its queries alone, so those of a few blocks are all that is held.
#pragma once
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>

#include "blocks.h"
#include "scan.h"

namespace fewkeys {

template <class Products>
class Prefill {
 public:
  Prefill(const Blocks &p, int64_t head) : p(p), head(head) {
    for (int64_t slot = 0; slot < HELD; slot++) free[slot] = slot;
  }

  // By one thread.
  void scan(BlockAttention<Products> &mine) {
    const Widths w(p.dim, p.value_dim);
    rows.resize(HELD * p.means * w.wide), excess.resize(HELD * p.means);
    constexpr bool is_bf16 = sizeof(Number) == sizeof(bf16);
    inflow.reset(new Inflow(*p.past, head, is_bf16, is_bf16));
    for (int64_t i = 0; i < AHEAD; i++) ahead.emplace_back(*p.past, w);
    Summary summary(*p.past, head);
    open.store(true, std::memory_order_release);
    for (int64_t block = 0; block < p.blocks; block++) {
      if (block) {
        while (prepared.load(std::memory_order_acquire) < block)
          if (!prepare_one()) attend_one(mine);
        summary.absorb(ahead[(block - 1) % AHEAD]);
        taken.store(block, std::memory_order_release);
      }
      const int64_t slot = block % HELD;
      // Where nobody helps, this thread attends to them all.
      while (free[slot].load(std::memory_order_acquire) != block) attend_one(mine);
      summary.write(rows.data() + slot * p.means * w.wide, excess.data() + slot * p.means, nullptr);
      made.store(block + 1, std::memory_order_release);
    }
    while (done.load(std::memory_order_acquire) < p.blocks) attend_one(mine);
    summary.finish();
    inflow->finish();
    rows = {}, excess = {}, inflow.reset(), ahead.clear();
  }

  // By any thread; false where there is nothing to do at the moment.
  bool help(BlockAttention<Products> &mine) {
    return (open.load(std::memory_order_acquire) && prepare_one()) || attend_one(mine);
  }

  bool empty() const { return begun >= p.blocks; }

 private:
  typedef typename Products::Number Number;
  static constexpr int64_t HELD = 8, AHEAD = 2;  // blocks and steps: they fit in the cache next to a core
  const Blocks &p;
  const int64_t head;
  aligned_vector<float> rows, excess;
  std::unique_ptr<Inflow> inflow;
  std::deque<Step> ahead;
  std::atomic<bool> open{false}, preparing{false};
  std::atomic<int64_t> prepared{0}, taken{0};                   // steps
  std::atomic<int64_t> made{0}, begun{0}, done{0}, free[HELD];  // blocks; free: the block that a slot is next for

  // Makes the next step, if there is room for it and nobody else does.
  bool prepare_one() {
    const auto wanted = [this] {
      const int64_t next = prepared.load(std::memory_order_acquire);
      return next + 1 < p.blocks && next - taken.load(std::memory_order_acquire) < AHEAD;
    };
    if (!wanted() || preparing.exchange(true, std::memory_order_acquire)) return false;
    const bool still = wanted();
    if (still) {
      inflow->make(prepared, ahead[prepared % AHEAD]);
      prepared.fetch_add(1, std::memory_order_release);
    }
    preparing.store(false, std::memory_order_release);
    return still;
  }

  // Attends to the next block whose means are known, if there is one.
  bool attend_one(BlockAttention<Products> &mine) {
    Team::check();
    int64_t block = begun;
    do {
      if (block >= made.load(std::memory_order_acquire)) return false;
    } while (!begun.compare_exchange_weak(block, block + 1));
    const int64_t slot = block % HELD, wide = p.dim + p.value_dim;
    const float *row = rows.data() + slot * p.means * wide;
    mine.attend(head, block, {row, row + p.dim, excess.data() + slot * p.means, wide, wide});
    free[slot].store(block + HELD, std::memory_order_release);
    done.fetch_add(1, std::memory_order_release);
    return true;
  }
};

template <class Products>
static void prefill(const Blocks &p, int threads) {
  std::deque<Prefill<Products>> heads;
  for (int64_t head = 0; head < p.batch * (p.heads / p.gqa_ratio); head++) heads.emplace_back(p, head);
  std::atomic<size_t> next{0};
  Team team;
  on_threads(team_size(threads), [&] {
    team.run([&] {
      BlockAttention<Products> block(p);
      for (size_t head; (head = next++) < heads.size();) heads[head].scan(block);
      // Who has no head left helps the others, and rests where there is nothing to do: the core may have other threads.
      for (auto &head : heads)
        while (!head.empty())
          if (!head.help(block)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  });
  team.settle();
}

}  // namespace fewkeys
