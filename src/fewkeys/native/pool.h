// Keeps the buffers of finished kernels for later ones. The system clears every page of new memory, which takes a
// microsecond or more, and a call may need hundreds of pages.
#pragma once
#include <atomic>
#include <cstddef>
#include <new>

#include "counters.h"

namespace fewkeys {

class Pool {
 public:
  static void *take(size_t bytes) {
    const int kind = kind_of(bytes);
    if (kind < 0) return ::operator new(bytes, LINE);
    void *block = pop(kind);
    return block ? block : ::operator new(size_of(kind), LINE);
  }
  static void give(void *block, size_t bytes) {
    const int kind = kind_of(bytes);
    if (kind < 0 || !push(kind, block)) ::operator delete(block, LINE);
  }

 private:
  struct Block {
    Block *next;
  };
  static constexpr std::align_val_t LINE{64};  // bytes of a cache line
  static constexpr int KINDS = 8;
  static constexpr size_t LEAST = 32 << 10, MOST = 16 << 20;  // bytes of the smallest kind, and of all kept blocks
  static inline std::atomic_flag busy = ATOMIC_FLAG_INIT;
  static inline Block *first[KINDS] = {};
  static inline size_t kept = 0;

  // Kinds are powers of two from LEAST on. Larger buffers are rare, and the allocator keeps smaller ones.
  static constexpr size_t size_of(int kind) { return LEAST << kind; }
  static int kind_of(size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    return -1;  // Sanitizers must see every allocation.
#endif
    if (bytes <= LEAST / 2) return -1;
    int kind = 0;
    while (kind < KINDS && size_of(kind) < bytes) kind++;
    return kind < KINDS ? kind : -1;
  }

  // A thread never waits for another one, which may not exist any more after a fork.
  static Block *pop(int kind) {
    if (busy.test_and_set(std::memory_order_acquire)) return nullptr;
    Block *block = first[kind];
    if (block) first[kind] = block->next, kept -= size_of(kind);
    busy.clear(std::memory_order_release);
    return block;
  }
  static bool push(int kind, void *block) {
    if (busy.test_and_set(std::memory_order_acquire)) return false;
    const bool fits = kept + size_of(kind) <= MOST;
    if (fits) {
      ((Block *)block)->next = first[kind];
      first[kind] = (Block *)block, kept += size_of(kind);
    }
    busy.clear(std::memory_order_release);
    return fits;
  }
};

}  // namespace fewkeys
