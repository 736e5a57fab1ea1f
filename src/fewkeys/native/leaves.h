// The keys of opened leaves, read as they are held: float, bfloat16, or int8 after two scales (`fewkeys.tree.leaves`).
#pragma once
#include "rows.h"

namespace fewkeys {

class Leaves {
 public:
  int count = 0;
  aligned_vector<int64_t> place;  // of the keys, among all of the problem

  explicit Leaves(const Descend &p) : p(p) {}

  void make_room(size_t most) {
    if (place.size() < most) place.resize(most), key.resize(most), value.resize(most);
  }

  void take(int64_t batch, int64_t head, int64_t at) {
    place[count] = at;
    key[count] = row_of(p.leaf_key, batch, head, at - p.leaf_first);
    value[count] = row_of(p.leaf_value, batch, head, at - p.leaf_first);
    with_type([&](auto type) { prefetch(key[count], p.dim * sizeof type); });
    count++;
  }

  // Their products with a scaled query.
  void score(const float *q, float *to) const {
    with_type([&](auto type) { score_as<decltype(type)>(q, to); });
  }

  // Adds their values under weights, which are of no use afterwards.
  void mix(float *weight, float *into) const {
    with_type([&](auto type) { mix_as<decltype(type)>(weight, into); });
  }

 private:
  const Descend &p;
  aligned_vector<const char *> key, value;

  template <class Run>
  void with_type(Run run) const {
    p.leaf_type == 0 ? run(float()) : p.leaf_type == 1 ? run(bf16()) : run(int8_t());
  }
  const char *row_of(const Rows &rows, int64_t batch, int64_t head, int64_t at) const {
    return rows.at<char>(batch, head, at & ((int64_t(1) << p.chunk) - 1)) + (at >> p.chunk) * p.chunk_bytes;
  }

  // Both scales of an int8 leaf stand before its key.
  static const float *scales_of(const char *key) { return (const float *)key - 2; }

  template <class L>
  void score_as(const float *q, float *to) const {
    for (int c = 0; c < count; c += FOUR) {
      four_dots((const L *const *)&key[c], q, p.dim, to + c);
      for (int r = 0; r < FOUR; r++) {
        if (sizeof(L) == 1) to[c + r] *= scales_of(key[c + r])[0];
        prefetch(value[c + r], p.value_dim * sizeof(L));
      }
    }
  }

  template <class L>
  void mix_as(float *weight, float *into) const {
    for (int c = 0; sizeof(L) == 1 && c < count; c++) weight[c] *= scales_of(key[c])[1];
    mix_rows((const L *const *)value.data(), weight, count, p.value_dim, into);
  }
};

}  // namespace fewkeys
