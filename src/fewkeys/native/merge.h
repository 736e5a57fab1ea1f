// Stand-ins that merge: `fewkeys.past.summary` has the equations.
#pragma once
#include "tile.h"

namespace fewkeys {

// Sizes of rows: keys and values side by side are `span` apart, keys alone `fill`, both padded with zeros.
struct Widths {
  int dim, value_dim, wide, span, fill;
  Widths(int dim, int value_dim)
      : dim(dim), value_dim(value_dim), wide(dim + value_dim), span(round_up(dim + round_up(value_dim))),
        fill(round_up(dim)) {}
};

// How far apart stand-ins are and how much attention they may expect, by the keys and queries seen so far.
struct Metric {
  aligned_vector<float> form;        // (D, D), TILE columns after the other: the second moment of the queries
  aligned_vector<float> mean_query;  // padded with zeros
  aligned_vector<float> mean;        // of keys and values
  float unit, tilt;           // 1 / var(v); tilt 0: all weights are one

  explicit Metric(const Widths &w) : form(w.dim * (w.dim + TILE)), mean_query(w.fill), mean(w.span + LANES) {}

  // t g for the centred key x, from m . x and E (q . x)^2 = x^T C x + (m . x)^2; `image` is C x. Beyond dim, m and the
  // image are zero.
  float log_weight(const float *row, const float *image, int dim) const {
    if (tilt == 0.0f) return 0.0f;
    vec first = {}, second = {};
    for (int d = 0; d < dim; d += LANES) {
      const vec x = load(row + d) - load(&mean[d]);
      first += x * load(&mean_query[d]);
      second += x * load(image + d);
    }
    const float along = sum_of_lanes(first), energy = sum_of_lanes(second);
    return tilt * (along + 0.5f * (energy - along * along));
  }
};

// Stand-ins in order of arrival.
class Group {
 public:
  int used = 0;
  aligned_vector<float> rows, image;  // image: the centred key, multiplied by the metric
  aligned_vector<float> excess, size, log_mass;

  Group(const Widths &w, int most)
      : rows(most * w.span), image(most * w.fill), excess(most), size(most), log_mass(most), w(w),
        inner((most + TILE) * TILE) {}

  // Adds a stand-in of a single key; returns its row.
  float *append() {
    excess[used] = 0.0f, size[used] = 1.0f;
    return &rows[used++ * w.span];
  }

  // Adds all of another group, which is measured.
  void append(const Group &other) {
    for (int a = 0; a < other.used; a++, used++) {
      copy(&rows[used * w.span], &other.rows[a * w.span], w.span);
      copy(&image[used * w.fill], &other.image[a * w.fill], w.fill);
      excess[used] = other.excess[a], size[used] = other.size[a], log_mass[used] = other.log_mass[a];
    }
  }

  // The images and masses of all.
  void measure(const Metric &metric) {
    // The image of the mean is taken off.
    for (int c = 0; c < w.dim; c += TILE) {
      float middle[TILE];
      dots(metric.mean.data(), w.span, 1, w.dim, &metric.form[c * w.dim], middle);
      dots(rows.data(), w.span, used, w.dim, &metric.form[c * w.dim], inner.data());
      for (int a = 0; a < used; a++)
        for (int d = 0; d < std::min(TILE, w.fill - c); d += LANES)
          store(&image[a * w.fill + c + d], load(&inner[a * TILE + d]) - load(middle + d));
    }
    for (int a = 0; a < used; a++)
      log_mass[a] = excess[a] + metric.log_weight(&rows[a * w.span], &image[a * w.fill], w.dim);
  }

 protected:
  const Widths w;
  aligned_vector<float> inner;  // inner products of all rows with a tile
};

// Where every stand-in went, and its coefficient in the mean at that place.
struct Moves {
  aligned_vector<int> place;
  aligned_vector<float> coefficient;

  void begin(int count) {
    place.resize(count), coefficient.assign(count, 1.0f);
    for (int a = 0; a < count; a++) place[a] = a;
  }
};

class MergingGroup : public Group {
 public:
  MergingGroup(const Widths &w, int most, float lowest)
      : Group(w, most), lowest(lowest), sorted(most * w.span), lanes(w.wide * TILE), mass(most + TILE),
        lightness(most + TILE), square(most + TILE), least(most + TILE), total(most), coefficient(most), weight(most),
        slot(most), goes_to(most), leader_of(most), key(most + TILE), rank(most + TILE), partner(most + TILE),
        alive(most, 1), merged(most) {
    places.reserve(most);
  }

  // Merges `joining` of those from `first` on into the partner of larger mass that costs least: the cheapest first, all
  // at once. `moves`, if any, receives where they went.
  void join(const Metric &metric, int joining, int first, Moves *moves) {
    if (joining == 0) return;
    const int count = arrange(metric);
    places.clear();
    for (int i = 0; i < count; i++)
      if (slot[i] >= first) places.push_back(i);
    const int pending = places.size();
    for (int tile = 0; tile < pending; tile += TILE) {
      const int end = std::min(tile + TILE, pending), before = places[end - 1];
      // The images of the rows: of keys as measured, of values in their unit.
      const float *key_image[TILE], *value_image[TILE];
      for (int i = tile; i < end; i++) {
        key_image[i - tile] = &image[slot[places[i]] * w.fill];
        value_image[i - tile] = &sorted[places[i] * w.span + w.dim];
      }
      to_lanes(key_image, end - tile, w.dim, 1.0f, lanes.data());
      to_lanes(value_image, end - tile, w.value_dim, metric.unit, &lanes[w.dim * TILE]);
      dots(sorted.data(), w.span, before, w.wide, lanes.data(), inner.data());
      for (int part = 0; part < TILE; part += LANES) seek(tile, part, before);
    }
    for (int i = 0; i < pending; i++) key[i] = ascending(least[i]);
    // None is heavier than the first; it stays even where costs overflow.
    if (places[0] == 0) key[0] = INT32_MAX;
    by_key(pending);
    for (int i = 0; i < count; i++) total[i] = coefficient[i] = 1.0f, leader_of[i] = i;
    for (int i = 0; i < pending; i++) {
      if (rank[i] >= joining) continue;
      // Earlier ones have their leader already.
      const int place = places[i], leader = leader_of[place] = leader_of[partner[i]];
      const int a = slot[place], to = slot[leader];
      coefficient[place] = std::exp(mass[place] - mass[leader]);
      add(&rows[to * w.span], &rows[a * w.span], coefficient[place], w.span);
      add(&image[to * w.fill], &image[a * w.fill], coefficient[place], w.fill);
      total[leader] += coefficient[place];
      size[to] += size[a];
      alive[a] = 0, merged[to] = 1;
    }
    for (int i = 0; i < count; i++) {
      if (total[i] == 1.0f) continue;
      scale(&rows[slot[i] * w.span], 1.0f / total[i], w.span);
      scale(&image[slot[i] * w.fill], 1.0f / total[i], w.fill);
      log_mass[slot[i]] += std::log(total[i]);
    }
    if (moves) tell(*moves, count);
    close_up();
  }

  // A merged stand-in gets the excess that keeps its mass.
  void settle(const Metric &metric) {
    for (int a = 0; a < used; a++)
      if (merged[a]) excess[a] = log_mass[a] - metric.log_weight(&rows[a * w.span], &image[a * w.fill], w.dim);
    std::fill(merged.begin(), merged.end(), 0);
  }

 private:
  const float lowest;
  aligned_vector<float> sorted;  // rows less their mean, in order of mass, like all vectors below
  aligned_vector<float> lanes, mass, lightness, square, least, total;
  aligned_vector<float> coefficient, weight;  // weights in the merged mean, before and after division by the total
  aligned_vector<int> slot, goes_to;  // places in the group, and places after the merge
  aligned_vector<int> leader_of;
  aligned_vector<int> places;              // of those that may join
  aligned_vector<int> key, rank, partner;  // theirs
  aligned_vector<uint8_t> alive, merged;  // merged since the last `settle`

  // Sorts by mass: the largest first, equal ones in order. Returns their number.
  int arrange(const Metric &metric) {
    for (int a = 0; a < used; a++) key[a] = ascending(0.0f - log_mass[a]);
    by_key(used);
    for (int a = 0; a < used; a++) slot[rank[a]] = a;
    for (int i = 0; i < used; i++) {
      mass[i] = log_mass[slot[i]];
      const float *row = &rows[slot[i] * w.span];
      float *to = &sorted[i * w.span], *value = to + w.dim;
      for (int d = 0; d < w.span; d += LANES) store(to + d, load(row + d) - load(&metric.mean[d]));
      square[i] = sum_of_lanes(products(to, &image[slot[i] * w.fill], w.fill) +
                           metric.unit * products(value, value, round_up(w.value_dim)));
    }
    const vec top = broadcast(mass[0]), least_mass = broadcast(lowest);
    for (int i = 0; i < used; i += LANES)
      store(&lightness[i], 1.0f / exponential(max(load(&mass[i]) - top, least_mass)));
    return used;
  }

  // The cheapest partner, among those before it, of each of LANES at `places`; of equal costs, the first.
  void seek(int tile, int part, int before) {
    ivec lane_place;
    vec light, lane_square;
    for (int i = 0; i < LANES; i++) {
      const int at = std::min<int>(tile + part + i, places.size() - 1);
      lane_place[i] = places[at], light[i] = lightness[places[at]], lane_square[i] = square[places[at]];
    }
    // Costs are fractions; comparing two needs no division.
    vec best = broadcast(INFINITY), under = broadcast(1.0f);
    ivec whose = lane_place - 1;
    count_multiply_adds(before * LANES);
    for (int b = 0; b < before; b++) {
      const vec apart = max(lane_square + square[b] - 2.0f * load(&inner[b * TILE + part]), vec{});
      const vec below = light + lightness[b];
      const ivec closer = (apart * under < best * below) & (lane_place > b);
      best = closer ? apart : best;
      under = closer ? below : under;
      whose = closer ? ivec{} + b : whose;
    }
    store(&least[tile + part], best / under);
    memcpy(&partner[tile + part], &whose, sizeof whose);
  }

  // The place of every key in ascending order, equal ones in order: for few keys, counting is faster than sorting.
  void by_key(int count) {
    count_multiply_adds(count * round_up(count, LANES));  // comparisons, rather
    for (int a = 0; a < count; a += LANES) {
      ivec lane_key, smaller = {};
      memcpy(&lane_key, &key[a], sizeof lane_key);
      const ivec lane = count_up() + a;
      const int near = std::min(a + LANES, count);
      for (int b = 0; b < a; b++) smaller -= lane_key >= key[b];
      for (int b = a; b < near; b++) smaller -= (lane_key > key[b]) | ((lane_key == key[b]) & (lane > b));
      for (int b = near; b < count; b++) smaller -= lane_key > key[b];
      memcpy(&rank[a], &smaller, sizeof smaller);
    }
  }

  // Before stand-ins are moved.
  void tell(Moves &moves, int count) {
    for (int a = 0, kept = 0; a < used; a++) goes_to[a] = alive[a] ? kept++ : -1;
    for (int i = 0; i < count; i++) weight[slot[i]] = coefficient[i] / total[leader_of[i]];
    for (int i = 0; i < count; i++)
      if (leader_of[i] != i) goes_to[slot[i]] = goes_to[slot[leader_of[i]]];
    for (size_t i = 0; i < moves.place.size(); i++) {
      moves.coefficient[i] *= weight[moves.place[i]];
      moves.place[i] = goes_to[moves.place[i]];
    }
  }

  // Moves the remaining ones to the front.
  void close_up() {
    int kept = 0;
    for (int a = 0; a < used; a++) {
      if (!alive[a]) {
        alive[a] = 1;
        continue;
      }
      if (kept != a) {
        copy(&rows[kept * w.span], &rows[a * w.span], w.span);
        copy(&image[kept * w.fill], &image[a * w.fill], w.fill);
        excess[kept] = excess[a], size[kept] = size[a], log_mass[kept] = log_mass[a], merged[kept] = merged[a];
      }
      kept++;
    }
    used = kept;
  }

  // The bits of x as an integer whose order is that of the numbers.
  static int ascending(float x) {
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & INT32_MAX);
  }
};

}  // namespace fewkeys
