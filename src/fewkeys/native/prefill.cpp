// Softmax over a list of keys and means of the past, where the past moves on meanwhile: `blocks.cpp` over `past.cpp`.
//
// The means of a block are read by its queries alone, so those of a few blocks are all that is ever held.
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>

#include "blocks.cpp"
#include "past.cpp"

// The blocks of one head on their way from the one thread that makes their means to all that attend to them.
template <class T>
class Queue {
 public:
  Queue(const Blocks &p, int64_t head) : p(p), head(head) {
    for (int64_t slot = 0; slot < HELD; slot++) free[slot] = slot;
  }

  void make_all(Block<T> &mine) {
    const int64_t wide = p.dim + p.value_dim;
    rows.reset(new float[HELD * p.means * wide]), excess.reset(new float[HELD * p.means]);
    Walker walker(*p.past, head);
    for (int64_t block = 0; block < p.blocks; block++) {
      if (block) walker.move<T, T>(block - 1);
      const int64_t slot = block % HELD;
      // Where nobody helps, this thread attends to them all.
      while (free[slot].load(std::memory_order_acquire) != block) attend_one(mine);
      walker.write(&rows[slot * p.means * wide], &excess[slot * p.means], nullptr);
      made.store(block + 1, std::memory_order_release);
    }
    walker.finish();
    while (done.load(std::memory_order_acquire) < p.blocks) attend_one(mine);
    rows.reset(), excess.reset();
  }

  // Attends to the next block whose means are known, if there is one.
  bool attend_one(Block<T> &mine) {
    int64_t block = begun;
    do {
      if (block >= made.load(std::memory_order_acquire)) {
        // Who waits must not slow down a neighbour on the same core.
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        return false;
      }
    } while (!begun.compare_exchange_weak(block, block + 1));
    const int64_t slot = block % HELD, wide = p.dim + p.value_dim;
    const float *row = &rows[slot * p.means * wide];
    mine.attend(head, block, {row, row + p.dim, &excess[slot * p.means], wide, wide});
    free[slot].store(block + HELD, std::memory_order_release);
    done.fetch_add(1, std::memory_order_release);
    return true;
  }

  bool empty() const { return begun >= p.blocks; }

 private:
  static constexpr int64_t HELD = 16;  // blocks: their means fit in the cache next to a core
  const Blocks &p;
  const int64_t head;
  std::unique_ptr<float[]> rows, excess;
  std::atomic<int64_t> made{0}, begun{0}, done{0}, free[HELD];  // free: the block that a slot is next for
};

template <class T>
static void prefill(const Blocks &p, int threads) {
  std::deque<Queue<T>> queues;
  for (int64_t head = 0; head < p.batch * (p.heads / p.groups); head++) queues.emplace_back(p, head);
  std::atomic<size_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    const std::unique_ptr<float[]> scratch(new float[scratch_of(p)]);
    Block<T> block(p, scratch.get());
    for (size_t head; (head = next++) < queues.size();) queues[head].make_all(block);
    // Who has no head left helps the others.
    for (auto &queue : queues)
      while (!queue.empty()) queue.attend_one(block);
  }
}

extern "C" void fewkeys_prefill(const Blocks *p, int is_bf16, int threads) {
  is_bf16 ? prefill<bf16>(*p, threads) : prefill<float>(*p, threads);
}
