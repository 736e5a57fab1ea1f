// The matrix unit of the processor (AMX), which adds A B to C. Scans of codes multiply bytes on it.
#pragma once
#include "lanes.h"

#if defined(__AMX_INT8__) && defined(__linux__)
#define FEWKEYS_MATRIX
#include <sys/syscall.h>
#include <unistd.h>

namespace fewkeys {

constexpr int EDGE = 16;  // rows of a tile of the unit

// Tells the compiler that the unit reads memory. Otherwise it could delay or omit writes to it.
static inline void written(const void *there) { asm volatile("" : : "r"(there) : "memory"); }

// Four tiles of the unit hold the sums of TILE queries: EDGE rows above, and as many below.
static inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
static inline void store_sums(float *above, float *below) {
  constexpr int PITCH = TILE * sizeof(float);
  _tile_stored(0, above, PITCH);
  _tile_stored(1, above + EDGE, PITCH);
  _tile_stored(2, below, PITCH);
  _tile_stored(3, below + EDGE, PITCH);
}

struct AmxProducts {
  // Linux enables the unit for a process on request.
  static bool is_there() {
    constexpr int ASK = 0x1023, TILES = 18;
    static const bool lent = syscall(SYS_arch_prctl, ASK, TILES) == 0;
    return lent;
  }

  struct Session {
    Session() {
      struct {
        uint8_t palette = 1, start = 0, none[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
      } shape;
      for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = EDGE;
      written(&shape);
      _tile_loadconfig(&shape);
    }
    // The destructor of a copy would release the unit of the thread.
    Session(const Session &) = delete;
    ~Session() { _tile_release(); }
  };
};

}  // namespace fewkeys
#endif
