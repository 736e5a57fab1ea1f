// The operands of attention's products, in lanes of floats. `matrix.h` has the same for bfloat16 on the matrix unit.
#pragma once
#include "tile.h"

namespace fewkeys {

// Columns of scores and weights are padded to a multiple of this.
constexpr int STEP = 32;

// Queries may have weights for all columns.
struct Everywhere {
  void operator()(int, int &, int &) const {}
};

template <class T>
struct LaneProducts {
  typedef T Number;
  struct Session {};  // the state of a thread while it multiplies

  // A tile of queries.
  class Queries {
   public:
    explicit Queries(int dim) : dim(dim), lanes(dim * TILE) {}
    void set(const T *rows, int64_t stride, int count) { to_lanes(rows, stride, count, dim, 1.0f, lanes.data()); }
    void set(const T *const *rows, int count) { to_lanes(rows, count, dim, 1.0f, lanes.data()); }

   private:
    friend LaneProducts;
    const int dim;
    aligned_vector<float> lanes;
  };

  // Sums of values, one for every query of a tile: (TILE, padded Dv).
  class Mixed {
   public:
    explicit Mixed(int value_dim) : wide(round_up(value_dim)), sums(TILE * wide) {}
    void clear() { std::fill(sums.begin(), sums.end(), 0.0f); }
    float *rows() { return sums.data(); }

   private:
    friend LaneProducts;
    const int wide;
    aligned_vector<float> sums;
  };

  // Keys and values side by side.
  class Columns {
   public:
    Columns(int dim, int value_dim) : dim(dim), value_dim(value_dim), wide(round_up(value_dim)) {}

    // Consecutive rows are read in place if possible.
    template <class R>
    void read(const R *keys, int64_t key_pitch, const R *values, int64_t value_pitch, int count) {
      key_stride = key_pitch, value_stride = value_pitch;
      make_room(count);
      key = floats(keys, key_stride, count, dim, dim, copy.data());
      value = floats(values, value_stride, count, value_dim, wide, copy.data() + count * dim);
    }

    // Inner products (count, TILE) of the first `count` keys.
    void dots(const Queries &query, int count, float *score) const {
      fewkeys::dots(key, key_stride, count, dim, query.lanes.data(), score);
    }

    // Adds the first `count` values to the sums of `rows` queries under weights (count, TILE), which are lost.
    // `reach(i, low, high)`: all but those between have no weight for the queries i .. i + SOME - 1.
    template <class Reach>
    void mix(float *weight, int count, int rows, Reach reach, Mixed &into) const {
      for (int i = 0; i < rows; i += SOME) {
        int low = 0, high = count;
        reach(i, low, high);
        if (low == high) continue;
        fewkeys::mix(value + low * value_stride, value_stride, high - low, wide, weight + low * TILE + i, TILE,
                    &into.sums[i * wide], wide);
      }
    }

   private:
    int dim, value_dim, wide;
    const float *key = nullptr, *value = nullptr;
    int64_t key_stride = 0, value_stride = 0;
    aligned_vector<float> copy;

    void make_room(int64_t count) {
      if ((int64_t)copy.size() < count * (dim + wide)) copy.resize(count * (dim + wide));
    }
  };
};

}  // namespace fewkeys
